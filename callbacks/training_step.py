"""A module's ``training_step``, run by its plan in place of the plain one that the strategy would run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.callbacks.deferred import Deferred
from lightning_remat.callbacks.distributed import (
    agreed_config,
    agreement,
    bucket_bytes,
    gradients_in_buckets,
    held_on_device,
    own_gradients,
    reduces_gradients,
    unsynchronized,
)
from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.callbacks.own_state import OwnState
from lightning_remat.measure import held_bytes
from lightning_remat.planner import AtHand, RematConfig, RematWarning, Surroundings, with_shards
from lightning_remat.runtime import ScheduledStep


class TrainingStep:
    """A planned ``training_step``, with what cannot be captured (``self.log``, metrics, own state) done around it.

    Args:
        trainer: the Trainer, in a fit that has begun: strategy and optimizers are set up.
        module: the module of the ``training_step``.
        config: how to plan; the same in all processes.
        reserve: bytes that something else will need on the device.
        progress: called with a text about the work in progress.
        leave_alone, at_hand: see `ScheduledStep`.
        alone: plan in this process only, with ``config`` as it is.

    Attributes:
        scheduled: the step that is captured, planned and run.
        config: the options that all processes have agreed on.
        guard: calls the step, which it is given as a function; a strategy may set one that repeats the step when it
            fails.
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
        self.rehearsal, self._logs, self._keeps_gradients = False, True, False
        self._installed = contextlib.ExitStack()
        self.first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.guard: Callable[[functools.partial[Any]], Any] = _unguarded
        self._module, self._strategy, self._trainer = module, trainer.strategy, trainer
        self._progress, self._updated, self._state_bytes = progress, _parameters_of(trainer.optimizers), 0
        self._untried: list[torch.optim.Optimizer] = []  # whose state is not known before it is there
        self._untried_bytes = self._looks = 0
        self._frozen_gradients: dict[frozenset[int], int] = {}  # bytes at a backward, by the ids of what is frozen then
        self._deferred, self._own_state = Deferred(module), OwnState(module)
        self._captured = -1  # graphs, before the last step
        self.config = config if alone else agreed_config(trainer, module, config)

        def beside() -> Surroundings:  # asked for each plan: a strategy may keep more than it did at first
            self._state_bytes = state = self._count_state()
            reserved = reserve + getattr(trainer.strategy, "reserved_bytes", 0)
            around = surroundings(trainer, module, state, reserved, self._accumulates())
            frozen = _ids(p for p in module.parameters() if not p.requires_grad)
            more = self._frozen_gradients.get(frozen, 0)
            return dataclasses.replace(around, resident_bytes=around.resident_bytes + more)

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
            reduces=lambda: self._is_left_alone(trainer) and reduces_gradients(trainer.strategy.model),
            accumulates=lambda: self._is_left_alone(trainer) and self._takes_gradients(),
            at_hand=at_hand,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own ``training_step`` returns."""
        return self.guard(functools.partial(self._run, *args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._make_room_for_new_state()
        captured, closely = self.scheduled.captured, self._captured != self.scheduled.captured
        with self._own_state.watched(closely), self._deferred.active(log=self._logs and not self.rehearsal):
            output = self.scheduled(*args, **kwargs)
        self._captured = captured
        for place in self._own_state.lists:
            self._deferred.stand_in_for(place)
        if self.rehearsal:
            self._deferred.drop()
            return output
        return self._deferred.settle(output, log=self._logs)

    def _count_state(self) -> int:
        """Bytes of the optimizers' state, so far as it is known."""
        device = self._strategy.root_device
        self._untried.clear()
        counted = optimizer_state_bytes(self._trainer.optimizers, device, self._untried)
        self._untried_bytes = held_bytes(self._untried, device=device)
        return counted

    def _make_room_for_new_state(self) -> None:
        """Have the plans that there are count the state that was not known of before the last calls."""
        if (updated := _parameters_of(self._trainer.optimizers)) != self._updated:
            if self._progress is not None:
                self._progress("counting the state of added parameters")
            self._updated, before = updated, self._state_bytes
            self._state_bytes = self._count_state()
            self._make_room(self._state_bytes - before, "parameters were added to an optimizer")
        elif self._untried and self.scheduled.plans:
            self._looks += 1
            if self._looks & (self._looks - 1) == 0:  # state may grow: after 1, 2, 4, 8 ... calls
                held = held_bytes(self._untried, device=self._strategy.root_device)
                missing, self._untried_bytes = held - self._untried_bytes, held
                self._state_bytes += missing
                names = " and ".join(dict.fromkeys(type(one).__name__ for one in self._untried))
                self._make_room(missing, f"the state of {names} was not known before its first step")

    def _make_room(self, missing: int, reason: str) -> None:
        if missing > 0 and self.scheduled.plans and not self.scheduled.make_room(missing):
            rank_zero_warn(
                f"{reason}, and there is no room for the {missing:,} bytes of state within the budget: steps that "
                "were planned before may be over it by as much. Give a larger budget",
                category=RematWarning,
            )

    def notice_gradients(self, first: bool) -> bool:
        """To be called before a backward: from the next step on, gradients that are there then are counted.

        Args:
            first: whether it is the step's first backward.

        Returns:
            Whether there are any that no plan has counted.
        """
        if not isinstance(self._strategy, (SingleDeviceStrategy, DDPStrategy)):
            return False
        noticed = False
        if first and not self._accumulates():
            trained = (p for p in self._module.parameters() if p.requires_grad)
            noticed = bool(own_gradients(self._trainer, trained))
            self._keeps_gradients = noticed
        if not self._module.automatic_optimization:  # where optimizers are toggled
            frozen = [p for p in self._module.parameters() if not p.requires_grad]
            nbytes = held_bytes(own_gradients(self._trainer, frozen), device=self._strategy.root_device)
            if nbytes > self._frozen_gradients.get(key := _ids(frozen), 0):
                self._frozen_gradients[key] = nbytes
                noticed = True
        if noticed:
            self.scheduled.capture_anew()
        return noticed

    def _accumulates(self) -> bool:
        """Whether gradients of earlier batches are there when a backward begins, in this epoch or in another."""
        return self._keeps_gradients or _accumulates(self._trainer)

    def _takes_gradients(self) -> bool:
        """Whether gradients that leave a backward while it runs take no memory of their own from then on: they are added to
        those at hand, or to DDP's buckets.
        """
        known = isinstance(self._strategy, (SingleDeviceStrategy, DDPStrategy))
        return known and (self._accumulates() or gradients_in_buckets(self._trainer))

    def _is_left_alone(self, trainer: pl.Trainer) -> bool:
        """Whether nothing but ``Tensor.backward`` of the step's loss follows it."""
        module = self._module
        own = "backward" in vars(module) or type(module).backward is not pl.LightningModule.backward
        plain = type(trainer.precision_plugin).backward is Precision.backward
        return module.automatic_optimization and not own and plain

    def install(self, after: Callable[[], None] = lambda: None) -> None:
        """Make the strategy run this step; ``after`` is called after each run, also when it raises."""
        unpatched = self._strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            first, self.first = self.first, None
            if first is not None:
                first(args, kwargs)
            # Only while it runs, so that copies, checkpoints and pickles of the module do not have it.
            with standing_in(self._module, "training_step", self):
                try:
                    return unpatched(*args, **kwargs)
                finally:
                    after()

        self._installed.enter_context(standing_in(self._strategy, "training_step", training_step))

    def rehearse(self, batch: Any) -> Any:
        """Run the step on a batch outside of training, in this process alone, and return its output; log nothing."""
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
        """Run once outside of training, in this process alone: metrics are updated, and nothing is logged."""
        self._logs = False
        try:
            with standing_in(self._module, "training_step", self), self._strategy.precision_plugin.train_step_context():
                return self._run(*args, **kwargs)
        finally:
            self._logs = True

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``training_step`` in eager mode, in the way of `unlogged`."""
        with contextlib.ExitStack() as stack:
            for name in ("log", "log_dict"):
                stack.enter_context(standing_in(self._module, name, _ignored))
            stack.enter_context(self._strategy.precision_plugin.train_step_context())
            return self.scheduled.function(*args, **kwargs)

    def remove(self) -> None:
        """Make the strategy run the plain step again, and close the planned one."""
        self.scheduled.close()
        self._installed.close()


def _ignored(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``log`` and ``log_dict``."""


def _unguarded(run: functools.partial[Any]) -> Any:
    return run()


def surroundings(
    trainer: pl.Trainer, module: pl.LightningModule, state: int, reserve: int, accumulating: bool
) -> Surroundings:
    """What the device holds in a training step: the module, its gradients, DDP's buckets, and the optimizers' state.

    Of that state there are ``state`` bytes, and something else will need ``reserve``. While gradients are ``accumulating``,
    the old ones are there in a backward as well.
    """
    device = trainer.strategy.root_device
    around = Surroundings(
        module_bytes=held_bytes(module, device=device),
        trainable_bytes=held_bytes([p for p in module.parameters() if p.requires_grad], device=device),
        resident_bytes=state + bucket_bytes(trainer) + reserve,
        old_gradients=accumulating or not gradients_in_buckets(trainer),
        accumulating=accumulating,
        held_bytes=held_on_device(trainer, module),
        state_bytes=max(0, state - held_bytes(trainer.optimizers, device=device)),
        kept_free_bytes=reserve,
    )
    return with_shards(around, [module], device)


def _accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients are accumulated over batches, now or in an epoch to come."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches > 1 or any(max(s.scheduling.values()) > 1 for s in schedulers)


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """How many parameters some optimizers update."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def _ids(parameters: Iterable[torch.nn.Parameter]) -> frozenset[int]:
    return frozenset(map(id, parameters))


_NOTHING = object()


@contextlib.contextmanager
def standing_in(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """While open, the instance ``owner`` has ``stand_in`` as its attribute ``name``, in front of its class's."""
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
