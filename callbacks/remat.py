"""The callback: a training step that fits its device, with the same numbers as before."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_remat.callbacks.dashboard import log_metrics, measured_metrics, plan_metrics, write_plan
from lightning_remat.callbacks.deferred import Deferred
from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.callbacks.own_state import OwnState
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.errors import ConfigError
from lightning_remat.measure import PeakMemory, held_bytes, track_peak
from lightning_remat.planner import Plan, RematConfig, RematWarning, ScheduledStep, Surroundings


class RematCallback(Callback):
    """Train within a memory budget by rematerialization, with bit for bit the same results.

    The first batch is captured, every operation is measured on the device, and the cheapest schedule found within the
    budget runs from then on; new input shapes get a plan of their own. Where the plain step fits anyway, it is left alone.
    What cannot be captured trains as before, with one warning that names the reason.

    Args:
        budget: ``"auto"`` (what this device has), ``"min"`` (the smallest feasible), bytes, a size such as ``"8GiB"``, or a
            share in (0, 1] of what rematerialization can save: ``floor + share * (baseline peak - floor)``, where the floor
            is what is held whatever the schedule. A budget counts everything on the device: parameters, buffers,
            gradients, optimizer state, batch, activations and workspaces.
        solver: one of `lightning_remat.solvers.available()`.
        time_limit: seconds that the solver may take for one plan.
        cost_model: ``"profile"`` measures each operation on the device; ``"roofline"``, ``"flops"`` and ``"unit"`` do not.
        margin: share of the device that ``"auto"`` leaves unused.
        background: begin to train on the first plan, made in about two seconds, while a process of its own searches on for
            the rest of ``time_limit``; a cheaper plan is swapped in between two steps, with the same results.
        reserve: bytes that something else will need on the device during a step (an EMA copy, say).
        solver_options: options of the solver.
        measure: measure the peak of the step after each new plan, and at every logging interval. On the CPU the measured
            steps run under torch's profiler.
        artifacts: save each plan (JSON) and its memory timeline (PNG) in the log directory.

    Attributes:
        plan: the plan that ran last; ``None`` before the first batch.
        plans: all plans of this fit.
        measured_peak_bytes: the largest measured peak of a step under ``plan``, everything counted; ``None`` if unmeasured.

    Raises:
        ConfigError: for an option that cannot be used, or (in ``setup``) for a strategy or a compiled module that is not
            supported.
        BudgetError: for a budget that cannot be understood, or is over what the device has.
        InfeasibleBudgetError: on the first batch, when no schedule fits; it names the smallest feasible budget.

    Example:
        >>> import lightning as L
        >>> from lightning_remat.callbacks import RematCallback
        >>> trainer = L.Trainer(callbacks=[RematCallback(budget="8GiB")], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        budget: Any = "auto",
        *,
        solver: str = "auto",
        time_limit: float = 30.0,
        cost_model: str = "profile",
        margin: float = 0.05,
        background: bool = False,
        reserve: int = 0,
        solver_options: Mapping[str, Any] | None = None,
        measure: bool = True,
        artifacts: bool = True,
    ) -> None:
        super().__init__()
        self.config = RematConfig.from_mapping(
            {
                "budget": budget,
                "solver": solver,
                "time_limit": time_limit,
                "cost_model": cost_model,
                "margin": margin,
                "background": background,
                "solver_options": dict(solver_options or {}),
            }
        )
        if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
            raise ConfigError(f"reserve={reserve!r}: give a number of bytes, 0 or more")
        self.reserve = reserve
        self.measure = measure
        self.artifacts = artifacts
        self.measured_peak_bytes: int | None = None
        self._step: ScheduledStep | None = None
        self._announced = 0
        self._measure_next = False
        self._tracker = contextlib.ExitStack()
        self._tracked: tuple[PeakMemory, int] | None = None

    # -- what a user reads --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that ran last; ``None`` before the first batch, and where nothing could be captured."""
        return self._step.last_plan if self._step is not None else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans of this fit: one a captured graph and set of shapes."""
        return tuple(self._step.plans) if self._step is not None else ()

    @property
    def runs(self) -> tuple[int, ...]:
        """How often the forward of each plan has run."""
        return tuple(self._step.runs) if self._step is not None else ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Why something could not be captured; empty where all of it was."""
        return tuple(self._step.failures) if self._step is not None else ()

    # -- hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy) or trainer.world_size > 1:
            raise ConfigError(
                f"RematCallback trains on one device so far, and this Trainer uses {type(strategy).__name__} on "
                f"{trainer.world_size}: use Trainer(devices=1, strategy='auto'), or take the callback out."
            )
        device = strategy.root_device
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"RematCallback supports CPU and CUDA devices, not {device.type!r}")
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ConfigError(
                "the module given to fit() was compiled with torch.compile, whose graph cannot be scheduled: give the "
                "plain module, RematCallback captures it itself"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = inspect.signature(pl_module.training_step).parameters
        if "dataloader_iter" in parameters:
            rank_zero_warn(
                "training_step takes a dataloader_iter: the step is not one function of a batch, and runs as before, "
                "without rematerialization",
                category=RematWarning,
            )
            return
        progress = PlanningProgress()

        def planning(words: str) -> None:
            self._stop_tracking()  # what planning allocates is not the step's
            progress(words)

        deferred, own_state = Deferred(pl_module), OwnState(pl_module)
        step = ScheduledStep(
            pl_module.training_step,
            self.config,
            surroundings=partial(self._surroundings, trainer, pl_module),
            name=f"{type(pl_module).__name__}.training_step",
            progress=planning,
            dynamic_sources=lambda: own_state.sources,
            leave_alone=True,
        )
        self._step, self._announced, self._measure_next, self.measured_peak_bytes = step, 0, False, None
        strategy = trainer.strategy

        def training_step(*args: Any, **kwargs: Any) -> Any:
            try:
                with strategy.precision_plugin.train_step_context():
                    with own_state.watched(), deferred.active():
                        output = step(*args, **kwargs)
                    for name in own_state.lists:
                        deferred.stand_in_for(name)
                    return deferred.settle(output)
            finally:
                progress.stop()

        # The strategy, not the module, is patched: copies, checkpoints and pickles of the module are what they were.
        strategy.training_step = training_step  # type: ignore[method-assign]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_tracking()  # of a batch that another hook has skipped
        if self._step is None or not self.measure:
            return
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = interval > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0
        due = due and not trainer.fit_loop._should_accumulate()
        if not (self._measure_next or (due and self._step.plans)):
            return
        device = trainer.strategy.root_device
        held = held_bytes(pl_module, trainer.optimizers, batch, gradients=True, device=device)
        peak = self._tracker.enter_context(track_peak(device))
        self._tracked = (peak, held)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_tracking(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_tracking(trainer)
        if self._step is None:
            return
        for number, plan in enumerate(self._step.plans[self._announced :], start=self._announced + 1):
            self._measure_next = True  # the next step of this kind: this one was disturbed by planning
            rank_zero_info(f"{plan.graph.name}: {plan.summary()}")
            log_metrics(trainer, plan_metrics(plan))
            if self.artifacts:
                write_plan(trainer, plan, number)
        self._announced = len(self._step.plans)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo(trainer)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end_tracking(self, trainer: pl.Trainer) -> None:
        if self._tracked is None or self._step is None:
            return
        peak, held = self._tracked
        self._stop_tracking()
        plan = self._step.last_plan
        if peak.peak_bytes is None or plan is None:
            return
        self._measure_next = False
        measured = held + peak.peak_bytes
        self.measured_peak_bytes = max(measured, self.measured_peak_bytes or 0)
        log_metrics(trainer, measured_metrics(plan, measured))

    def _surroundings(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Surroundings:
        """What the device holds: the module, its gradients, and the optimizers' state."""
        device = trainer.strategy.root_device
        return Surroundings(
            module_bytes=held_bytes(pl_module, device=device),
            trainable_bytes=held_bytes([p for p in pl_module.parameters() if p.requires_grad], device=device),
            resident_bytes=optimizer_state_bytes(trainer.optimizers, device) + self.reserve,
            accumulating=_accumulates(trainer),
            held_bytes=held_bytes(pl_module, trainer.optimizers, gradients=True, device=device),
        )

    def _stop_tracking(self) -> None:
        self._tracked = None
        self._tracker.close()

    def _undo(self, trainer: pl.Trainer) -> None:
        self._stop_tracking()
        if self._step is not None:
            self._step.close()
        strategy = getattr(trainer, "strategy", None)
        if strategy is not None:
            strategy.__dict__.pop("training_step", None)


def _accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients are accumulated over batches, now or in an epoch to come."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches > 1 or any(max(s.scheduling.values()) > 1 for s in schedulers)
