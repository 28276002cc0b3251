"""Steps in which tensors are made on another device where none is named: nothing of the step's own is made there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from lightning_remat import rematerialize
from tests.helpers.cases import slow_but


class Words(nn.Module):
    """A language model of one block, with attention over what is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.15, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
        hidden = self.norm(self.block(self.words(ids), src_key_padding_mask=~mask))
        loss = functional.cross_entropy((hidden @ self.words.weight.mT).flatten(0, 1), ids.flatten())
        return loss / mask.sum().item(), float(mask.sum())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.15), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )

    def forward(self, images: Tensor, chosen: Tensor) -> tuple[Tensor, bool]:
        found = self.layers(images)
        return found[chosen].square().mean(), bool(chosen.all())


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        found, _ = rnn.pad_packed_sequence(self.layer(packed)[0])
        return functional.dropout(found, 0.3).square().mean(), len(found)


class Groups(nn.Module):
    """The nearest neighbours of points, within a distance: in-place writes to what has gaps between its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, points: Tensor, chosen: Tensor) -> tuple[Tensor, int]:
        distances, nearest = torch.cdist(points, points).sort(-1)
        nearest = nearest[:, :, :4]
        far = distances[:, :, :4] > 1
        nearest[far] = nearest[:, :, :1].expand_as(nearest)[far]
        found = self.layer(points)[chosen.view(-1, 1, 1), nearest]
        return functional.gelu(found).amax(2).square().mean(), len(found)


class OfLengths(Sequences):
    """The lengths are numbers of Python's."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
        packed = rnn.pack_padded_sequence(x, lengths.tolist(), enforce_sorted=False)
        return self.layer(packed)[0].data.square().mean(), len(x)


def words() -> tuple[Tensor, Tensor]:
    lengths = torch.randint(2, 13, (4, 1))
    return torch.randint(50, (4, 12)), torch.arange(12) < lengths


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 12, 12), torch.rand(6) < 0.7


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 5, 4), torch.randint(1, 10, (5,))


def points() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 10, 3), torch.randperm(3)


USES = [(Words, words), (Images, images), (Sequences, sequences), (OfLengths, sequences), (Groups, points)]


def check(
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple[Tensor, ...]],
    budget: float | str,
    device: str,
    default: str,
) -> None:
    torch.manual_seed(0)
    eager = make().to(device)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget, time_limit=0.5)
    results: list[list[Any]] = [[], []]
    for number in range(4):
        torch.manual_seed(number)
        given = [one.to(device) for one in batch()]
        for one, call, found in zip((eager, module), (eager, step), results, strict=True):
            torch.manual_seed(100 + number)
            one.zero_grad()
            with torch.device(default):
                loss, beside = call(*given)
                loss.backward()
            found += [loss.item(), beside, torch.get_rng_state(), *(p.grad for p in one.parameters()), *one.buffers()]
            found[:] = [each.tolist() if isinstance(each, Tensor) else each for each in found]
    assert results[0] == results[1] and step.plans and not step.failures


@pytest.mark.filterwarnings("ignore:only a part of:lightning_remat.planner.RematWarning")
@pytest.mark.parametrize("budget", slow_but({"min"}, [1.0, "min"]))
@pytest.mark.parametrize(("make", "batch"), USES)
def test_bits(make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], budget: float | str) -> None:
    check(make, batch, budget, "cpu", "meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("default", ["cpu", "cuda"])
@pytest.mark.parametrize(("make", "batch"), [(Words, words), (Groups, points)])
def test_on_a_gpu(make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], default: str) -> None:
    check(make, batch, "min", "cuda", default)
