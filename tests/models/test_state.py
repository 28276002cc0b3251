"""State that a model keeps beside its weights: buffers, running means, codebooks, counters, averages and schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat.planner import RematWarning
from tests.helpers.training import assert_same, fit
from tests.models.wild import (
    Wild,
    assert_whole,
    assert_whole_in_several_ways,
    model_name,
    share_of_weights,
    tight,
)


class OwnMeans(Wild):
    """Running means of its own making: a buffer written to, one bound anew, a tensor that is none, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("other", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.average = torch.zeros(())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        with torch.no_grad():
            self.steps += 1
            self.mean.lerp_(x.mean(0), 0.1)
        self.other = 0.9 * self.other + 0.1 * x.detach().mean(0)
        return self.net((x - self.mean - self.other).tanh())

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / (1 + self.average)


class CumulativeBatchNorm(Wild):
    """Batch norm without momentum: it divides by how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=None)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x)).tanh()


class Codebook(Wild):
    """VQ-VAE: a codebook that follows what it is near to; codes that nobody uses are drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(16, 16)
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        z = self.features(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 8).float()
        quantized = chosen @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
            codes = self.sums / self.sizes[:, None].clamp(min=1e-3)
            unused = (self.sizes < 0.5)[:, None]
            self.codes.copy_(torch.where(unused, z[torch.randint(len(z), (8,))], codes))
        straight = z + (quantized - z).detach()
        return functional.mse_loss(self.decoder(straight), x) + 0.25 * functional.mse_loss(z, quantized.detach())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.tanh().sin()


class CountsInAPart(Wild):
    """A submodule counts its calls in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Counting()

    def on_train_end(self) -> None:
        self.seen.append(self.net.calls)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sin() * len(self.name)


class NamesEachBatch(Wild):
    """What a submodule reads is another text in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Named()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.name = f"{self.current_epoch}, {batch_idx}"


class LogsItsLearningRate(Wild):
    """Under a schedule it is another one in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = x.square().mean()
        self.output = x.tanh()
        return self.output.sin()


class RememberedActivation(Wild):
    """Layers leave activations on themselves: of an auxiliary loss, and for who looks later."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Remembering()

    def loss(self, batch: Any) -> torch.Tensor:
        loss = functional.cross_entropy(self.head(self.part(self.features(batch[0]))), batch[1])
        return loss + 0.1 * self.part.auxiliary

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [self.part.auxiliary.detach().clone(), self.part.output.detach().clone()]

    def on_train_end(self) -> None:
        self.part.auxiliary = self.part.output = None


class OwnAverage(Wild):
    """An exponential average of its own weights, moved after every batch and swapped in for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def swap(self) -> None:
        for name, p in self.named_parameters():
            p.data, self.average[name] = self.average[name], p.data

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, p in self.named_parameters():
            self.average[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def on_validation_start(self) -> None:
        self.swap()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_end(self) -> None:
        self.swap()

    def on_train_end(self) -> None:
        self.seen.append(self.average)


WHOLE = [OwnMeans, Codebook, RememberedActivation, CumulativeBatchNorm]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(OwnAverage, 1, {"val": True}), (CountsInAPart, 2, {})]


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)


def test_what_the_step_calls_is_captured_in_the_end() -> None:
    options = {"train": NamesEachBatch.train_loader, "max_epochs": 3}
    plain, remat = fit(NamesEachBatch, **options), tight()
    with pytest.warns(RematWarning, match="depends on a value that changes from call to call"):
        run = fit(NamesEachBatch, remat, **options)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and sum(remat.runs) == 6 and "is planned in parts" in remat.failures[0]


def test_a_learning_rate_that_is_scheduled() -> None:
    options = {"train": LogsItsLearningRate.train_loader, "max_epochs": 3}
    plain, remat = fit(LogsItsLearningRate, **options), tight()
    run = fit(LogsItsLearningRate, remat, **options)
    assert_same(plain.results, run.results)
    assert not remat.failures and remat.runs == (6,)
    assert share_of_weights(run, remat) == 1  # which Dynamo takes from the optimizer
