"""What differs in each step and must be known while it is traced (a box, a rate): the network is planned without it."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat.planner import RematWarning
from tests.helpers.training import Run, assert_same, callback, fit, loader
from tests.models.wild import STEPS, Wild, model_name, tight

EPOCHS = 8


class Varies(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), nn.Identity()


class CutMix(Varies):
    """Columns of each row come from another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        begin, end = sorted(random.sample(range(17), 2))
        others = torch.randperm(len(x))
        x = x.clone()
        x[:, begin:end] = x[others, begin:end]
        share, scores = 1 - (end - begin) / 16, self.head(self.features(x))
        loss = share * functional.cross_entropy(scores, y) + (1 - share) * functional.cross_entropy(scores, y[others])
        self.log("loss", loss, batch_size=1)
        return loss


class CutMixInAFunction(CutMix):
    """As of steps that share one for training and validation."""

    def step(self, batch: Any) -> torch.Tensor:
        return CutMix.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)


class SmoothsLess(Varies):
    """What torch wants to know of a label's smoothing while it traces is another number in each step."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.head(self.features(x)), y, label_smoothing=0.1 / (1 + self.global_step))


def fit_seeded(*args: Any, **options: Any) -> Run:
    random.seed(3)
    return fit(*args, **options)


@pytest.mark.parametrize(
    "make", [CutMix, pytest.param(CutMixInAFunction, marks=pytest.mark.slow), SmoothsLess], ids=model_name
)
def test_the_network_is_planned_in_every_step(make: type[Wild]) -> None:
    options = {"train": make.train_loader, "max_epochs": EPOCHS}
    plain, remat = fit_seeded(make, **options), tight()
    with pytest.warns(RematWarning, match="what it calls is planned in parts") as told:
        run = fit_seeded(make, remat, **options)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == len([one for one in told if one.category is RematWarning]) == 1
    assert sum(remat.runs) == len(run.recorder.outputs) == EPOCHS * STEPS
    for plan in remat.plans:
        assert plan.rematerializes and sum(tensor.role.value == "parameter" for tensor in plan.graph.tensors) == 4


class HoldsMore(Wild):
    """What the step itself keeps for its backward is computed again where it is planned as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 4)), nn.Identity()
        self.scale = nn.Parameter(torch.ones(128))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        begin, end = sorted(random.sample(range(17), 2))
        x = x.clone()
        x[:, begin:end] = x[torch.randperm(len(x)), begin:end]
        wide = (x.repeat(1, 8) * self.scale).exp()
        return functional.cross_entropy(self.head(self.features(x)), y) + wide.sin().mean()


def test_a_size_that_is_too_little_in_parts_ends_no_training() -> None:
    """The part that runs as before takes memory beside the plans, so that the smallest peak is a larger one."""
    options = {"train": HoldsMore.train_loader, "max_epochs": EPOCHS}
    fit_seeded(HoldsMore, smallest := tight(), max_epochs=1, train=HoldsMore.train_loader)
    assert smallest.plan is not None
    size = smallest.plan.predicted_peak_bytes
    plain, remat = fit_seeded(HoldsMore, **options), callback(size, solver="greedy", time_limit=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit_seeded(HoldsMore, remat, **options)
    told = [str(one.message) for one in caught if one.category is RematWarning]
    says = (
        "what it calls is planned in parts",
        "what is done with scale runs as before",
        "The smallest plans run from now on",
    )
    assert len(told) == 3 and all(words in one for words, one in zip(says, told, strict=True))
    assert_same(plain.results, run.results)
    assert sum(remat.runs) == EPOCHS * STEPS and remat.plan is not None and remat.plan.budget_bytes > size


class CutMixOfEachProcess(CutMix):
    """The processes draw other boxes, and come to leave the step alone in other steps."""

    def on_fit_start(self) -> None:
        random.seed(self.global_rank)


@pytest.mark.slow
def test_of_two_processes() -> None:
    options = {"train": lambda: loader(64 * 24, 64), "strategy": "ddp_spawn", "devices": 2}
    plain = fit(CutMixOfEachProcess, **options)
    scheduled = fit(CutMixOfEachProcess, tight(), **options)
    assert_same(plain.module.state_dict(), scheduled.module.state_dict())
    assert_same(dict(plain.trainer.callback_metrics), dict(scheduled.trainer.callback_metrics))
