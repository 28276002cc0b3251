"""Lightning's private names, each behind a public one: no other file of the package uses them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.parsing import _lightning_get_all_attr_holders

StrategyRegistry: TypeAlias = _StrategyRegistry

STEP_COUNTERS = r"\._trainer\.fit_loop\..*(completed|processed|ready|started|total_batch_idx)"
"""Pattern of the Dynamo source names from which ``global_step`` and ``current_epoch`` are read."""

MODULE_OWN = frozenset({"_trainer", "_fabric"})
"""Attributes of a LightningModule that refer to its Trainer or Fabric."""

CONNECTOR = "_logger_connector"
"""The Trainer's attribute that its ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics`` are read from."""


def steps_logged(trainer: pl.Trainer) -> int:
    """The step that Lightning's own scalars are logged at."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether the current batch ends without an optimizer's step."""
    return trainer.fit_loop._should_accumulate()


def names_modules(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's profiler puts hooks on all modules, to record their names."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    return isinstance(profiler, PyTorchProfiler) and profiler._record_module_names


def wrapped_optimizers(trainer: pl.Trainer) -> Iterable[Any]:
    """The wrappers that ``self.optimizers()`` gives the user."""
    return trainer.strategy._lightning_optimizers


def training_source(trainer: pl.Trainer) -> Any:
    """Where the training loader comes from: the module, a datamodule, or what was given to ``fit``."""
    return trainer.fit_loop._data_source


def forget_loaders(trainer: pl.Trainer) -> None:
    """Drop the loaders for training and validation: they are made again when they are needed."""
    loop = trainer.fit_loop
    loop._combined_loader = None
    loop.epoch_loop.val_loop._combined_loader = None


def holders_of(module: pl.LightningModule, name: str) -> list[Any]:
    """The objects that have an attribute, among the module, its datamodule, and the ``hparams`` of both."""
    return _lightning_get_all_attr_holders(module, name)


def to_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """The batch on the module's device, passed through the hooks that Lightning calls on the way."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
