"""Modules and callbacks that write down which of their hooks are called, when and with what; one that is named fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.utils.data import DataLoader

from tests.helpers.small import Checked
from tests.helpers.training import loader


def hooks_of(*owners: type) -> tuple[str, ...]:
    return tuple(n for owner in owners for n, value in vars(owner).items() if inspect.isfunction(value) and n[0] != "_")


OPTIMIZATION = (
    "configure_callbacks",
    "configure_optimizers",
    "configure_gradient_clipping",
    "clip_gradients",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)
LEGACY = "configure_sharded_model"  # may not stand beside configure_model
OF_MODULES = (*(n for n in hooks_of(ModelHooks, DataHooks, CheckpointHooks) if n != LEGACY), *OPTIMIZATION)
OF_CALLBACKS = hooks_of(pl.Callback)


def fact(value: Any, nested: bool = False) -> Any:
    """What two runs must have in common of an argument: numbers and texts as they are, a tensor's sum, else the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad, value.detach().double().sum().item()
    if isinstance(value, (list, tuple)):
        return [fact(item) for item in value]
    if isinstance(value, Mapping) and not nested:
        return [(key, fact(item, nested=True)) for key, item in value.items()]
    return type(value).__name__


def moment(runner: pl.Trainer | None) -> Any:
    """Where in a run a hook is called."""
    module = runner.lightning_module if runner is not None else None
    if runner is None or module is None:
        return None
    return runner.state.stage, runner.global_step, runner.current_epoch, module.training, torch.is_grad_enabled()


Failure = tuple[str, str, int]
"""Whose hook fails, which, and at which of its calls."""


class Journal:
    """Calls of hooks, in their order; one that is named fails."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.trainer: pl.Trainer | None = None
        self.fails: Failure | None = None
        self.error: BaseException = RuntimeError("the user's own")

    def write(self, owner: str, hook: str, arguments: Any) -> None:
        self.calls.append((owner, hook, moment(self.trainer), fact(arguments)))
        if self.fails is not None and self.fails[:2] == (owner, hook):
            left = self.fails[2] - 1
            self.fails = (owner, hook, left) if left else None
            if not left:
                raise self.error

    @property
    def hooks(self) -> list[str]:
        return [hook for _, hook, *_ in self.calls]


def recording(base: type, hooks: Sequence[str]) -> Any:
    """A subclass whose hooks are written down, and do what they did."""

    def recorded(hook: str) -> Callable[..., Any]:
        original = getattr(base, hook)

        @functools.wraps(original)
        def write_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            told = [value for value in (*args, *kwargs.values()) if not isinstance(value, (pl.Trainer, Module))]
            self.journal.write(self.owner, hook, told)
            return original(self, *args, **kwargs)

        del write_and_call.__wrapped__  # Lightning would look through it, and see a hook that nobody overrides
        write_and_call.__signature__ = inspect.signature(original)
        return write_and_call

    return type(f"Recording{base.__name__}", (base,), {hook: recorded(hook) for hook in hooks})


class Module(Checked):
    """With loaders, a scheduler and steps of its own."""

    owner = "module"
    samples = 16

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def train_dataloader(self) -> Any:
        return loader(self.samples)

    def val_dataloader(self) -> Any:
        return DataLoader(loader(12).dataset, batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Listener(pl.Callback):
    def __init__(self, journal: Journal, owner: str = "callback") -> None:
        self.journal, self.owner = journal, owner

    @property
    def state_key(self) -> str:
        return self.owner


RecordingModule = recording(Module, OF_MODULES)
RecordingCallback = recording(Listener, OF_CALLBACKS)
