"""Gradients of earlier steps that are still there in a backward: noticed, and counted from the next step on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_remat.callbacks import RematCallback
from tests.helpers.training import assert_ran, assert_same, fit, loader


def net(layers: int, width: int = 4) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(16, width))


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(8), []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Zeroes(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Accumulates(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Usual(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Toggles(Manual):
    """A generator and a discriminator, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.net = net(6, 16), net(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = nn.functional.softplus(-self.net(self.made(x))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (
            nn.functional.softplus(-self.net(x)).mean() + nn.functional.softplus(self.net(self.made(x).detach())).mean()
        )
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), 0.1) for one in (self.made, self.net)]


class Later(pl.Callback):
    """Forgets the peak that was measured in the first steps."""

    def __init__(self, remat: RematCallback) -> None:
        self.remat = remat

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            self.remat.measured_peak_bytes = None


def trained(make: Any) -> RematCallback:
    options: dict[str, Any] = {"train": lambda: loader(64), "max_epochs": 2, "log_every_n_steps": 1}
    remat = RematCallback("min", solver="greedy", cost_model="profile", artifacts=False)
    scheduled = fit(make, Later(remat), remat, **options)
    assert_same(fit(make, **options).results, scheduled.results)
    return remat


@pytest.mark.parametrize("make", [Zeroes, Accumulates])
def test_they_are_counted(make: Any) -> None:
    remat = trained(make)
    assert_ran(remat, None)
    first, last = remat.plans[0], remat.plans[-1]
    assert remat.runs[-1] > 0 and last.predicted_peak_bytes > first.predicted_peak_bytes
    assert remat.measured_peak_bytes == pytest.approx(last.predicted_peak_bytes, rel=0.01)


@pytest.mark.parametrize("make", [Plain, Usual])
def test_nothing_is_planned_twice_where_there_are_none(make: Any) -> None:
    remat = trained(make)
    assert_ran(remat, 1)
    assert remat.measured_peak_bytes == pytest.approx(remat.plan.predicted_peak_bytes, rel=0.01)


def test_those_of_a_network_that_is_frozen_meanwhile() -> None:
    remat = trained(Toggles)
    assert_ran(remat, None)
    assert max(p.predicted_peak_bytes for p in remat.plans[-2:]) > max(p.predicted_peak_bytes for p in remat.plans[:2])
    assert remat.measured_peak_bytes <= 1.05 * remat.plan.budget_bytes
