"""A module's training step, run as scheduled where the strategy would run it plain."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.callbacks.deferred import Deferred
from lightning_remat.callbacks.distributed import (
    agreed_config,
    agreement,
    bucket_bytes,
    gradients_in_buckets,
    held_on_device,
    unsynchronized,
)
from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.callbacks.own_state import OwnState
from lightning_remat.measure import held_bytes
from lightning_remat.planner import AtHand, RematConfig, Surroundings
from lightning_remat.runtime import ScheduledStep


class TrainingStep:
    """Called as ``training_step``, with what a captured step cannot hold (``self.log``, metrics, own state) around it.

    Args:
        trainer: of a fit that has begun: strategy and optimizers are there.
        module: whose ``training_step`` it is.
        config: how to plan; the same in all processes.
        reserve: bytes that something else will need on the device.
        progress: told in words what is being done.
        leave_alone, at_hand: see `ScheduledStep`.
        alone: plan in this process only, with ``config`` as it is.

    Attributes:
        scheduled: what is captured, planned and run.
        config: with what all processes have agreed on.
        guard: calls the step; a strategy may put in one that calls it again when it fails.
        rehearsal: while this is set, what the step logs and gives to metrics is dropped.
        first: called with the arguments of the first step, before it runs.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        config: RematConfig,
        *,
        reserve: int = 0,
        progress: Callable[[str], None] | None = None,
        leave_alone: bool = True,
        alone: bool = False,
        at_hand: AtHand | None = None,
    ) -> None:
        self.rehearsal, self._logs = False, True
        self.first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.guard: Callable[[functools.partial[Any]], Any] = _unguarded
        self._module, self._strategy = module, trainer.strategy
        self._deferred, self._own_state = Deferred(module), OwnState(module)
        self.config = config if alone else agreed_config(trainer, module, config)

        def beside() -> Surroundings:  # a strategy may come to keep more than it did at first
            return surroundings(trainer, module, reserve + getattr(trainer.strategy, "reserved_bytes", 0))

        self.scheduled = ScheduledStep(
            module.training_step,
            self.config,
            surroundings=beside,
            name=f"{type(module).__name__}.training_step",
            progress=progress,
            dynamic_sources=lambda: self._own_state.sources,
            leave_alone=leave_alone,
            several_backwards=not module.automatic_optimization,
            agreement=None if alone else agreement(trainer),
            reserved=parse_budget(config.budget).kind is BudgetKind.AUTO,  # also where all processes agreed on a size
            accumulates=lambda: self.guard is _unguarded and _adds_gradients_alone(trainer, module),
            at_hand=at_hand,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own ``training_step`` returns."""
        return self.guard(functools.partial(self._run, *args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_state.watched(), self._deferred.active():
            output = self.scheduled(*args, **kwargs)
        for name in self._own_state.lists:
            self._deferred.stand_in_for(name)
        if self.rehearsal:
            self._deferred.drop()
            return output
        return self._deferred.settle(output, log=self._logs)

    def install(self, after: Callable[[], None] = lambda: None) -> None:
        """From now on the strategy runs this; ``after`` is called when a step has run, however it ended."""
        unpatched = self._strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            first, self.first = self.first, None
            if first is not None:
                first(args, kwargs)
            # On the module for as long as it runs: copies, checkpoints and pickles of the module are what they were.
            with standing_in(self._module, "training_step", self):
                try:
                    return unpatched(*args, **kwargs)
                finally:
                    after()

        self._strategy.training_step = training_step  # type: ignore[method-assign]

    def rehearse(self, batch: Any) -> Any:
        """Run once outside of training: nothing is logged, and no other process takes part. Returns what the step does."""
        numbered = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
        self.rehearsal = True
        self.install()
        try:
            with torch.enable_grad(), unsynchronized(self._strategy.model):
                return self._strategy.training_step(batch, *[0] * numbered)
        finally:
            self.rehearsal = False
            self.remove()

    def unlogged(self, *args: Any, **kwargs: Any) -> Any:
        """Run once outside of training, in this process alone: metrics are given what is theirs, and nothing is logged."""
        self._logs = False
        try:
            with standing_in(self._module, "training_step", self), self._strategy.precision_plugin.train_step_context():
                return self._run(*args, **kwargs)
        finally:
            self._logs = True

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same, of the module's own ``training_step``."""
        with contextlib.ExitStack() as stack:
            for name in ("log", "log_dict"):
                stack.enter_context(standing_in(self._module, name, _ignored))
            stack.enter_context(self._strategy.precision_plugin.train_step_context())
            return self.scheduled.function(*args, **kwargs)

    def remove(self) -> None:
        """The strategy runs the plain step again."""
        self.scheduled.close()
        vars(self._strategy).pop("training_step", None)


def _ignored(*_args: Any, **_kwargs: Any) -> None:
    """In the place of ``log``."""


def _unguarded(run: functools.partial[Any]) -> Any:
    return run()


def surroundings(trainer: pl.Trainer, module: pl.LightningModule, reserve: int = 0) -> Surroundings:
    """What the device holds: the module, its gradients, what reduces them, and the optimizers' state."""
    device = trainer.strategy.root_device
    in_buckets = gradients_in_buckets(trainer)  # gradients take nothing beside the buckets then
    state = optimizer_state_bytes(trainer.optimizers, device)
    return Surroundings(
        module_bytes=held_bytes(module, device=device),
        trainable_bytes=held_bytes([p for p in module.parameters() if p.requires_grad], device=device),
        resident_bytes=state + bucket_bytes(trainer) + reserve,
        old_gradients=not in_buckets,
        accumulating=_accumulates(trainer) and not in_buckets,
        held_bytes=held_on_device(trainer, module),
        state_bytes=max(0, state - held_bytes(trainer.optimizers, device=device)),
        kept_free_bytes=reserve,
    )


def _accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients are accumulated over batches, now or in an epoch to come."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches > 1 or any(max(s.scheduling.values()) > 1 for s in schedulers)


def _adds_gradients_alone(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether each backward does nothing but add the step's gradients to those at hand, and is never repeated."""
    own = "backward" in vars(module) or type(module).backward is not pl.LightningModule.backward
    plain = type(trainer.precision_plugin).backward is Precision.backward
    single = isinstance(trainer.strategy, SingleDeviceStrategy) and not hasattr(trainer.strategy, "recover_with")
    return module.automatic_optimization and not own and plain and single and _accumulates(trainer)


_NOTHING = object()


@contextlib.contextmanager
def standing_in(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """``stand_in`` as an attribute of the object itself, in front of its class's."""
    attributes = vars(owner)
    before = attributes.get(name, _NOTHING)
    attributes[name] = stand_in
    try:
        yield
    finally:
        if before is _NOTHING:
            attributes.pop(name, None)
        else:
            attributes[name] = before
