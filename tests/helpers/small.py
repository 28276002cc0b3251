"""A module that is quick to capture, data for one plan, and a callback that plans at once."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_remat.callbacks import RematCallback
from tests.helpers.training import Classifier, Validated, callback, loader

ONE = {"train": lambda: loader(16), "plans": 1}  # two batches of one size: one plan, half the time


def two() -> Any:
    """Two batches of one size: one plan."""
    return loader(16)


def quick(budget: Any = 0.9, **options: Any) -> RematCallback:
    """A callback that plans at once: what it plans is not at issue here."""
    return callback(budget, **{"solver": "greedy", **options})


class Small(Classifier):
    """Quick to capture, and with something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4))


class Checked(Small, Validated):
    """With validation, test and prediction."""


class NoBatchIdx(Classifier):
    def training_step(self, batch):
        return self.loss(batch)


def saving(folder: Any, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **options)
