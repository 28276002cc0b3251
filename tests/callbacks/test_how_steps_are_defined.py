"""Training steps that are no plain methods: decorated ones are planned once for all batches, properties run as before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat import RematWarning
from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks.own_state import _names


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        self.seen = 0

    def loss(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen += 1
        return self.net(batch).square().mean() * (1 + number + self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def decorated(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(step)
    def wrapper(module: Net, *given: Any) -> torch.Tensor:
        return step(module, *given)

    return wrapper


class Method(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, batch_idx)


class OtherNames(Net):
    def training_step(me, x: torch.Tensor, number: int) -> torch.Tensor:  # noqa: N805
        return me.loss(x, number)


class Decorated(Net):
    @decorated
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, batch_idx)


class Property(Net):
    @property
    def training_step(self) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        return self._step

    def _step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, batch_idx)


def fit(kind: type[Net], *callbacks: pl.Callback) -> Net:
    torch.manual_seed(0)
    module = kind()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), 8))
    return module


def assert_alike(one: Net, other: Net) -> None:
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values())) and one.seen == other.seen


@pytest.mark.parametrize("kind", [Method, OtherNames, Decorated])
def test_what_varies_is_known_whatever_its_name(kind: type[Net]) -> None:
    remat = RematCallback("min", time_limit=0.3, artifacts=False, measure=False)
    assert_alike(fit(kind, remat), fit(kind))
    assert sum(remat.runs) == 16 and not remat.failures


def test_a_property_runs_as_before() -> None:
    remat = RematCallback("min", time_limit=0.3, artifacts=False, measure=False)
    with pytest.warns(RematWarning, match="training_step is a property"):
        module = fit(Property, remat)
    assert_alike(module, fit(Property))
    assert not remat.plans


def test_a_function_that_is_assigned_has_no_module_among_its_arguments() -> None:
    assert _names(lambda batch, number: None) == ["L['self']", "L['batch']", "L['number']"]
    assert _names(lambda *given: None) == ["L['self']", "L['given'][0]", "L['given'][1]"]
    assert _names(Decorated().training_step) == ["L['module']", "L['given'][0]", "L['given'][1]"]
