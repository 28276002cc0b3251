"""What the models of the wild have in common: the module that they change, its batches, and what is asserted of its runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback
from lightning_remat.planner import RematWarning
from tests.helpers.training import Classifier, Run, assert_same, callback, compare, fit, loader

ROWS = 64
STEPS = 2
OLD = torch.__version__.startswith("2.11.")  # without inference mode, autograd in a backward, and Dynamo's reasons


def vectors() -> DataLoader[Any]:
    """Batches of 64 vectors of 16 numbers, each of one of four classes."""
    return loader(STEPS * ROWS, ROWS)


class Wild(Classifier):
    """Two layers, from 16 numbers to 16 with 32 in between, and a head; subclasses change what they are about."""

    train_loader: Any = staticmethod(vectors)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).tanh()

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.head(self.features(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class GraphTuple(NamedTuple):
    """A graph of a batch, in a tuple."""

    x: torch.Tensor
    edges: torch.Tensor
    y: torch.Tensor


def graphs(kind: Any, *sizes: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    made = []
    for size in sizes:
        x = torch.randn(size, 16, generator=numbers)
        edges = torch.randint(size, (2, 3 * size), generator=numbers)
        made.append(kind(x, edges, torch.randint(4, (size,), generator=numbers)))
    return DataLoader(made, batch_size=None)


def tight() -> RematCallback:
    """The smallest peak that is quickly found: much is evaluated again."""
    return callback("min", solver="greedy", time_limit=0.1)


def train(make: type[Wild], **options: Any) -> tuple[Run, RematCallback]:
    """Train without and with the callback, with the same results, everything captured and something rematerialized."""
    _, run, remat = compare(make, plans=None, remat=tight(), **{"train": make.train_loader, **options})
    return run, remat


def graphs_a_step(run: Run, remat: RematCallback) -> float:
    return sum(remat.runs) / len(run.recorder.outputs)


def share_of_weights(run: Run, remat: RematCallback) -> float:
    """How many parameters the graphs of a step have, of those that got gradients."""
    trained = sum(p.grad is not None for p in run.module.parameters())
    in_graphs = [sum(t.role.value == "parameter" for t in plan.graph.tensors) for plan in remat.plans]
    steps = len(run.recorder.outputs)
    return sum(runs * weights for runs, weights in zip(remat.runs, in_graphs, strict=True)) / steps / trained


def model_name(value: Any) -> str:
    """Of a case: the name of its model; numbers, options and reasons are left out."""
    return getattr(value, "__name__", "")


def assert_whole(make: type[Wild]) -> None:
    """The whole step is one graph."""
    run, remat = train(make)
    assert len(remat.plans) == graphs_a_step(run, remat) == 1
    assert share_of_weights(run, remat) >= 1


def assert_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    """Each step is one graph, of which there are several, or under other options of the run."""
    run, remat = train(make, **options)
    assert graphs_a_step(run, remat) == 1
    assert len(remat.plans) == plans


def assert_in_parts(make: type[Wild]) -> None:
    """A step is several graphs."""
    run, remat = train(make)
    assert len(remat.plans) > 1 < graphs_a_step(run, remat)


def assert_not_captured(make: type[Wild], reason: str) -> None:
    """The run is as it was before, and says why."""
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match=f"runs as before.*{reason}"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and not remat.plans


def assert_only_a_rest(make: type[Wild]) -> None:
    """Dynamo leaves the function alone that does it; the rest of the step is captured, and that is said."""
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match="only a part of .*training_step could be captured: .*(weight|bias)"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert 0 < share_of_weights(run, remat) < 1
