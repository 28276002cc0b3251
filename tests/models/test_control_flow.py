"""Steps that Python steers: branches, loops, prints, NumPy, exceptions, and modes that change on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.training import assert_same, callback, compare, fit
from tests.models.wild import (
    STEPS,
    Wild,
    assert_in_parts,
    assert_not_captured,
    assert_only_a_rest,
    assert_whole,
    assert_whole_in_several_ways,
    model_name,
    tight,
    vectors,
)


class BranchesOnItsLoss(Wild):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss.item() > 1.35 else loss.square()


class Prints(Wild):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.features(batch[0])
        print("batch", batch_idx, list(h.shape))
        loss = functional.cross_entropy(self.head(h.sin()), batch[1])
        self.print("batch", batch_idx, "loss", loss.item())
        return loss


class LoopsAsTheBatchSays(Wild):
    """How often the body runs is a number of the batch."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.abs().sum()) % 2 + 1):
            x = self.net(x).tanh()
        return x


def lists_of_pictures() -> DataLoader[Any]:
    """As detectors get them: a list of pictures of several sizes, and a list of dicts."""
    numbers = torch.Generator().manual_seed(5)

    def made(count: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
        images = [torch.randn(3, 8 + i, 9, generator=numbers) for i in range(2)]
        return images, [{"boxes": torch.rand(count + i, 4, generator=numbers)} for i in range(2)]

    return DataLoader([made(1), made(2)], batch_size=None)


class DetectorMatchedByNumpy(Wild):
    """Each picture has its own number of boxes; each box is matched with a prediction, in a loop."""

    train_loader = staticmethod(lists_of_pictures)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16, 20)

    def loss(self, batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for image, target in zip(*batch, strict=True):
            boxes = self.head(self.net(self.stem(image[None]).relu().mean((2, 3)))).view(5, 4).sigmoid()
            cost = torch.cdist(boxes.detach(), target["boxes"], p=1)
            chosen = torch.from_numpy(np.argsort(cost.numpy(), axis=0)[0].copy())
            total = total + functional.l1_loss(boxes[chosen], target["boxes"])
        return total / len(batch[0])


class Training(Wild):
    """`self.training`, and a part that is put in evaluation mode for a while by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(16), nn.BatchNorm1d(16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        self.norm.train(False)
        x = self.norm(x)
        self.norm.train(True)
        return self.other(x.sin())


class NormedInBothModes(Wild):
    """Running statistics are updated, and read by another layer after that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.net(x)).sin()
        self.norm.train(False)
        x = self.norm(x)
        self.norm.train(True)
        return x


class AsksWhetherItIsCompiled(Wild):
    """Libraries take other ways where they are compiled."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        return h.sin() if torch.compiler.is_compiling() else h.tanh()


class TriesAndExcepts(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.net(x.view(len(x), 17))
        except RuntimeError:
            with torch.profiler.record_function("the other way"):
                return self.net(x)


FOLLOWS_ERRORS = torch.__version__ >= (2, 14)  # Dynamo goes on in the user's `except` where an op is refused its input
WHOLE = [Training, AsksWhetherItIsCompiled, *([TriesAndExcepts] if FOLLOWS_ERRORS else [])]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(LoopsAsTheBatchSays, 2, {})]


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)


IN_PARTS = [BranchesOnItsLoss]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)


A_REST = [] if FOLLOWS_ERRORS else [TriesAndExcepts]  # its network, which the step calls


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)


NOT_CAPTURED = [(DetectorMatchedByNumpy, "Tensor.numpy")]


@pytest.mark.parametrize(("make", "reason"), NOT_CAPTURED, ids=model_name)
def test_not_captured_and_the_reason_is_said(make: type[Wild], reason: str) -> None:
    assert_not_captured(make, reason)


def test_prints_come_once_and_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    said, results = [], []
    for callbacks in ([], [tight()]):
        results.append(fit(Prints, *callbacks, train=vectors).results)
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("batch")])
    assert said[0] == said[1] and len(said[0]) == 2 * STEPS
    assert_same(*results)


def test_running_statistics_may_be_read_after_they_were_updated() -> None:
    compare(NormedInBothModes, train=vectors, remat=callback(0.8, solver="chen_sqrt"), plans=1)
