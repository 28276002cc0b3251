"""The callback: a training step that fits its device, with the same numbers as before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_remat.callbacks.check import check_step, tell_check
from lightning_remat.callbacks.config import RematCallbackConfig
from lightning_remat.callbacks.dashboard import (
    log_metrics,
    measured_metrics,
    over_prediction,
    plan_folder,
    plan_metrics,
    show_plan,
    write_plan,
)
from lightning_remat.callbacks.distributed import bucket_bytes, held_on_device
from lightning_remat.callbacks.lightning_internals import accumulates, steps_logged
from lightning_remat.callbacks.module_state import ModuleState
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.callbacks.training_data import TrainingData
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.errors import ConfigError
from lightning_remat.exactness import CheckReport
from lightning_remat.measure import PeakMemory, track_peak
from lightning_remat.planner import AtHand, Plan, RematWarning
from lightning_remat.runtime import ScheduledStep, is_compiled, unknown_torch

DDP_SETTLES = 2
"""Steps after which DDP has made its buckets anew, in the order in which gradients come: not steps like the others."""

FIRST_STEPS = 3
"""Steps that are measured after each new plan, on CUDA: there the allocator itself keeps its peaks."""

SHOWN = 3
"""Parameters that a warning names."""


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
        allocator: ``"auto"`` switches expandable segments on (or reserves memory in one piece) during the fit, where a CUDA
            device's caching allocator would reserve more otherwise; ``"leave"`` leaves it alone.
        reserve: bytes that something else will need on the device during a step (an EMA copy, say).
        solver_options: options of the solver.
        measure: measure the peak of the step after each new plan, and at every logging interval. On the CPU the measured
            steps run under torch's profiler.
        artifacts: save each plan (JSON) and its memory timeline (PNG) in the log directory.
        plan_only: plan the first batch, say and save what was found, and stop before anything is trained.
        check: run the first step in eager mode too, from the same state, compare loss, gradients and buffers bit for bit, and
            say what was found: that all are equal, or, as a warning, what differs first, why, and what to do. Training then
            goes on from where it was, as without the check.

    Attributes:
        plan: the plan that ran last; ``None`` before the first batch.
        plans: all plans of this fit.
        measured_peak_bytes: the largest measured peak of a step under ``plan``, everything counted; ``None`` if unmeasured.
        check_report: what the check of this fit has found; ``None`` without one.
        training_step: what the strategy runs during a fit; ``None`` before and after, and where nothing can be scheduled.
        at_hand: schedules that `RematBatchSizeFinder` met in this fit; no plan that they fit is dearer.

    Raises:
        ConfigError: for an option that cannot be used, or (in ``setup``) for a strategy that is not supported.
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
        allocator: str = "auto",
        reserve: int = 0,
        solver_options: Mapping[str, Any] | None = None,
        measure: bool = True,
        artifacts: bool = True,
        plan_only: bool = False,
        check: bool = False,
    ) -> None:
        super().__init__()
        self.config = RematCallbackConfig.from_mapping(
            {
                "budget": budget,
                "solver": solver,
                "time_limit": time_limit,
                "cost_model": cost_model,
                "margin": margin,
                "background": background,
                "allocator": allocator,
                "reserve": reserve,
                "solver_options": dict(solver_options or {}),
                "measure": measure,
                "artifacts": artifacts,
                "plan_only": plan_only,
                "check": check,
            }
        )
        self.measured_peak_bytes: int | None = None
        self.check_report: CheckReport | None = None
        self.training_step: TrainingStep | None = None
        self.at_hand: AtHand | None = None
        self._step: ScheduledStep | None = None  # kept after the fit: its plans can be read
        self._announced = 0
        self._batches, self._told = 0, False
        self._measure_next = 0  # steps
        self._over = False  # it was said that a step took more than predicted
        self._limit: int | float | None = None  # `limit_train_batches`, while nothing is trained
        self._tracker = contextlib.ExitStack()
        self._tracked: tuple[PeakMemory, int, int] | None = None  # with what is held, and how often plans had run

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> RematCallback:
        """A callback from a mapping, an OmegaConf node, or a YAML file, whose keys are the options of `RematCallbackConfig`.

        Raises:
            ConfigError: for a file that cannot be read, and for an unknown or malformed option, naming the accepted ones.
            BudgetError: for a budget that cannot be understood.

        Example:
            >>> RematCallback.from_config({"budget": "8GiB", "solver": "auto"}).config.budget
            '8GiB'
        """
        config = RematCallbackConfig.load(source)
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

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
        self._undo()  # of a fit that ended in another callback's `on_exception`
        if sum(isinstance(one, RematCallback) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError(
                "this Trainer has more than one RematCallback: give one, only one of them can run the step"
            )
        strategy = trainer.strategy
        supported = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
        if not supported or isinstance(strategy, DeepSpeedStrategy):
            raise ConfigError(
                f"RematCallback works on one device and with DDP so far, and this Trainer uses {type(strategy).__name__}: use "
                "Trainer(strategy='auto') or Trainer(strategy='ddp'), or take the callback out."
            )
        device = strategy.root_device
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"RematCallback supports CPU and CUDA devices, not {device.type!r}")

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.config.plan_only:
            return
        progress = PlanningProgress()
        step = self._scheduled(trainer, pl_module, progress)
        if step is not None:
            state = ModuleState(pl_module, trainer.strategy.root_device)
            try:
                step.rehearse(TrainingData(trainer, pl_module).first())
            finally:
                state.restore()
                progress.stop()
            self._announce(trainer)
        self._limit = trainer.limit_train_batches
        trainer.limit_train_batches = 0  # what `should_stop` does not do where `min_epochs` is set

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        progress = PlanningProgress()

        def planning(words: str) -> None:
            self._stop_tracking()  # what planning allocates is not the step's
            progress(words)

        step = self._scheduled(trainer, pl_module, planning)
        if step is not None:
            self.training_step = step
            step.install(after=progress.stop)

    def _scheduled(
        self, trainer: pl.Trainer, module: pl.LightningModule, progress: Callable[[str], None]
    ) -> TrainingStep | None:
        """The step of a new fit; ``None``, with a warning, where it cannot be scheduled."""
        self._step, self._announced, self._measure_next, self.measured_peak_bytes = None, 0, 0, None
        self._over = False
        self._batches, self._told, self.check_report = 0, False, None
        self._folder = plan_folder(trainer)
        if why := unknown_torch():
            rank_zero_warn(why, category=RematWarning)
            return None
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            rank_zero_warn(
                "training_step takes a dataloader_iter: the step is not one function of a batch, and runs as before, "
                "without rematerialization",
                category=RematWarning,
            )
            return None
        if is_compiled(module.training_step):
            rank_zero_warn(
                "the training step was compiled with torch.compile: it runs as your compiler has made it, without "
                "rematerialization; give fit() the plain module to have its step planned",
                category=RematWarning,
            )
            return None
        step = TrainingStep(
            trainer, module, self.config, reserve=self.config.reserve, progress=progress, at_hand=self.at_hand
        )
        self._step = step.scheduled
        if self.config.check:
            step.first = functools.partial(self._check, trainer, module, step, progress)
        return step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_tracking()  # of a batch that another hook has skipped
        self._batches += 1
        if self._step is None or not self.config.measure:
            return
        if self._batches <= DDP_SETTLES and bucket_bytes(trainer):
            return
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = interval > 0 and (steps_logged(trainer) + 1) % interval == 0
        due = due and not accumulates(trainer)
        if not (self._measure_next or (due and self._step.plans)):
            return
        device = trainer.strategy.root_device
        held = held_on_device(trainer, pl_module, batch)
        peak = self._tracker.enter_context(track_peak(device))
        self._tracked = peak, held, sum(self._step.runs)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_tracking(trainer)
        if self._step is not None:
            self._step.end_measured()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_tracking(trainer)
        if self._step is not None and self._announced < len(self._step.plans):
            self._tell_what_is_left_out(pl_module, self._step)
        self._announce(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()
        if self._limit is not None:
            trainer.limit_train_batches, self._limit = self._limit, None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        step: TrainingStep,
        progress: Callable[[str], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.check_report = check_step(trainer, module, step, args, kwargs, progress)
        folder = self._folder if self.config.artifacts else None
        tell_check(trainer, step.scheduled.name, self.check_report, folder)

    def _announce(self, trainer: pl.Trainer) -> None:
        """Say, log and save the plans that are new."""
        if self._step is None:
            return
        for number, plan in enumerate(self._step.plans[self._announced :], start=self._announced + 1):
            # The next step of this kind: this one was disturbed by planning. Where it costs nothing, a few of them.
            self._measure_next = FIRST_STEPS if trainer.strategy.root_device.type == "cuda" else 1
            if number == 1:
                show_plan(trainer, plan)
            else:
                rank_zero_info(f"{plan.graph.name}: {plan.summary()}")
            log_metrics(trainer, plan_metrics(plan))
            if self.config.artifacts:
                write_plan(trainer, plan, number, self._folder)
        self._announced = len(self._step.plans)

    def _tell_what_is_left_out(self, module: pl.LightningModule, step: ScheduledStep) -> None:
        names = step.left_out(module.named_parameters())
        if not names or self._told:
            return
        self._told = True
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        rank_zero_warn(
            f"only a part of {step.name} could be captured: what is done with {shown} runs as before, without "
            "rematerialization and outside the budget (packed sequences, nn.LSTM, nn.GRU and nn.RNN on CUDA, and backward "
            "hooks on modules are known to be left out; TORCH_LOGS=graph_breaks says more)",
            category=RematWarning,
        )

    def _end_tracking(self, trainer: pl.Trainer) -> None:
        if self._tracked is None or self._step is None:
            return
        peak, held, runs = self._tracked
        self._stop_tracking()
        plan = self._step.last_plan
        if peak.peak_bytes is None or plan is None:
            return
        self._measure_next = max(0, self._measure_next - 1)
        measured = held + peak.peak_bytes if peak.allocated_bytes is None else peak.allocated_bytes
        self.measured_peak_bytes = max(measured, self.measured_peak_bytes or 0)
        log_metrics(trainer, measured_metrics(plan, measured, peak.reserved_bytes))
        scheduled = sum(self._step.runs) > runs  # not the plain step, where that fits
        over = over_prediction(plan, peak, measured) if scheduled else ""
        if over and not self._over:
            self._over = True
            warnings.warn(over, RematWarning, stacklevel=2)

    def _stop_tracking(self) -> None:
        self._tracked = None
        self._tracker.close()

    def _undo(self) -> None:
        self._stop_tracking()
        self.at_hand = None
        if self.training_step is not None:
            self.training_step.remove()
            self.training_step = None
