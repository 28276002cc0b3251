"""`RematCallback`: makes the training step of a Trainer fit a memory budget, with the same results bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
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
    worth_showing,
    write_plan,
)
from lightning_remat.callbacks.distributed import held_on_device, steps_before_buckets
from lightning_remat.callbacks.lightning_internals import accumulates, names_modules, steps_logged
from lightning_remat.callbacks.module_state import ModuleState
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.callbacks.training_data import TrainingData
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.errors import ConfigError, InfeasibleBudgetError, listed
from lightning_remat.exactness import CheckReport
from lightning_remat.measure import PeakMemory, track_peak
from lightning_remat.planner import AtHand, Plan, RematWarning
from lightning_remat.runtime import ScheduledStep, is_compiled, unknown_torch

FIRST_STEPS = 3
"""Steps that are measured after each new plan on CUDA, where that costs nothing: the allocator keeps its peak."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What is read of a step after its fit; the attributes are those of `ScheduledStep`."""

    last_plan: Plan | None = None
    plans: Sequence[Plan] = ()
    runs: Sequence[int] = ()
    failures: Sequence[str] = ()


class RematCallback(Callback):
    """Train within a memory budget by rematerialization, with bit for bit the same results.

    The training step is captured with the first batch, every operation is measured on the device, and the cheapest
    schedule found within the budget runs from then on; new input shapes get a plan of their own. Where the step fits
    without rematerialization, with room to spare, it runs unchanged. What cannot be captured trains as before, with one
    warning that names the reason.

    Args:
        budget: ``"auto"`` (what this device has), ``"min"`` (the smallest feasible), bytes, a size such as ``"8GiB"``, or a
            share in (0, 1] of what rematerialization can save: ``floor + share * (baseline peak - floor)``, where the floor
            is what is held under every schedule. A budget counts everything on the device: parameters, buffers,
            gradients, optimizer state, batch, activations and workspaces.
        solver: one of `lightning_remat.solvers.available()`.
        time_limit: seconds that the solver may take for one plan.
        cost_model: ``"profile"`` measures each operation on the device; ``"roofline"``, ``"flops"`` and ``"unit"`` do not.
        margin: share of the device that ``"auto"`` leaves unused, in [0, 1).
        background: begin to train on the first plan, made in about two seconds, while another process searches on for
            ``time_limit``; a cheaper plan is swapped in between two steps, with the same results.
        allocator: ``"auto"`` switches expandable segments on (or reserves memory in one piece) during the fit, where a CUDA
            device's caching allocator would reserve more otherwise; ``"leave"`` leaves it alone.
        tiling: ``"exact"`` computes losses over classes in slices of rows, with the same bits, where the step is over its
            budget otherwise (`RematConfig`); ``"off"`` does not.
        cuda_graphs: record forward and backward as CUDA graphs after a few steps, and replay them: small and medium steps take
            less time. What cannot be recorded runs as before, and a warning says why.
        fuse: ``"exact"`` has runs of elementwise ops compiled into one kernel each where that has the same bits and the step
            costs less so (`RematConfig`); ``"fast"`` takes other bits too; ``"off"`` does not.
        offload: ``"host"`` may have tensors wait in the host's memory for the backward, where that costs less than to compute
            them again (`RematConfig`); ``"off"`` does not. (``tiling``, ``fuse`` and ``offload`` may be ``False``, which is
            what YAML makes of ``off``.)
        host_budget: the most that may lie there, for one process: bytes, a size, or a share in (0, 1] of what is free;
            ``None`` for a quarter of that, divided among the processes of a machine.
        reserve: bytes that something else will need on the device during a step (an EMA copy, say), or a size such as
            ``"2GiB"``.
        solver_options: the solver's own options, see `lightning_remat.solvers.options_of`.
        measure: measure the peak of the step after each new plan, and at every logging interval. On the CPU the measured
            steps run under torch's profiler.
        artifacts: save each plan that is shown (JSON), a page about it (HTML, with the extra ``[report]``) and its memory
            timeline (PNG) in the log directory, and hand plan and timeline to the loggers.
        plan_only: plan the first batch, print and save the plan, and train nothing.
        check: run the first step in eager mode too, from the same state, compare loss, gradients and buffers bit for bit, and
            log the result: that all are equal, or, as a warning, what differs first, why, and what to do. Training then
            goes on from where it was, as without the check.

    Attributes:
        config: the options, as a `RematCallbackConfig`.
        plan: the plan that ran last; ``None`` before the first batch.
        plans: all plans of this fit.
        measured_peak_bytes: the largest measured peak of a step of this fit, in bytes, everything counted; ``None`` if
            none was measured.
        check_report: the report of this fit's check (``check=True``); ``None`` without one.
        training_step: the planned step, which the strategy runs during a fit; ``None`` before and after, and where
            nothing can be scheduled.
        at_hand: schedules that `RematBatchSizeFinder` met in this fit: where one fits, no dearer plan is taken.

    Raises:
        ConfigError: for an option that cannot be used, or (in ``setup``) for a strategy or a device that is not
            supported, or a second `RematCallback`.
        BudgetError: for a budget that cannot be understood, or (on the first batch) is over what the device has.
        InfeasibleBudgetError: on the first batch of a shape, when no schedule fits; it names the smallest feasible
            budget.

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
        tiling: str | bool = "exact",
        cuda_graphs: bool = False,
        fuse: str | bool = "off",
        offload: str | bool = "off",
        host_budget: Any = None,
        reserve: int | str = 0,
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
                "tiling": tiling,
                "cuda_graphs": cuda_graphs,
                "fuse": fuse,
                "offload": offload,
                "host_budget": host_budget,
                "reserve": reserve,
                "solver_options": solver_options,
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
        self._step: ScheduledStep | None = None  # of the present fit
        self._found = Found()  # in the fit before
        self._announced, self._shown = 0, 0  # how many plans were looked at, and shown
        self._batches = 0
        self._went_back = False  # whether a backward of the present batch has begun
        self._uncounted = False  # whether it met gradients that no plan counts
        self._measure_next = 0  # steps
        self._over = False  # a warning was given that a step took more than predicted
        self._limit: int | float | None = None  # the Trainer's `limit_train_batches`, while `plan_only` has set it to 0
        self._tracker = contextlib.ExitStack()
        self._tracked: tuple[PeakMemory, int, int] | None = None  # with the bytes held, and how often plans had run

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
        return self._read.last_plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans of this fit, in order; usually one for each captured graph and set of input shapes."""
        return tuple(self._read.plans)

    @property
    def runs(self) -> tuple[int, ...]:
        """How often the forward of each of `plans` has run."""
        return tuple(self._read.runs)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why something could not be captured; empty where all of it was."""
        return tuple(self._read.failures)

    @property
    def _read(self) -> ScheduledStep | Found:
        return self._found if self._step is None else self._step

    # -- hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._undo(trainer)  # after a fit that ended in another callback's `on_exception`
        if sum(isinstance(one, RematCallback) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError(
                "this Trainer has more than one RematCallback: give one, only one of them can run the step"
            )
        strategy = trainer.strategy
        supported = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
        if not supported or isinstance(strategy, DeepSpeedStrategy):
            raise ConfigError(
                f"RematCallback works on one device, with DDP and with FSDP2, and this Trainer uses {type(strategy).__name__}: "
                "use Trainer(strategy='auto') or Trainer(strategy='ddp'), or shard the model by fully_shard in its "
                "configure_model and use Trainer(strategy=ModelParallelStrategy(...)), or take the callback out."
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
                batch = TrainingData(trainer, pl_module).first()
                step.rehearse(batch)
                if step.scheduled.waits:
                    step.rehearse(batch)
            finally:
                state.restore()
                progress.stop()
            self._announce(trainer)
        self._limit = trainer.limit_train_batches
        trainer.limit_train_batches = 0  # `should_stop` would not end a fit with `min_epochs`

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        progress = PlanningProgress()

        def planning(words: str) -> None:
            self._stop_tracking()  # what planning allocates is no part of the step's peak
            progress(words)

        step = self._scheduled(trainer, pl_module, planning)
        if step is not None:
            self.training_step = step
            step.install(after=progress.stop)

    def _scheduled(
        self, trainer: pl.Trainer, module: pl.LightningModule, progress: Callable[[str], None]
    ) -> TrainingStep | None:
        """The planned step of a new fit; ``None``, with a warning, where nothing can be scheduled."""
        self._step, self._found = None, Found()
        self._measure_next, self.measured_peak_bytes = 0, None
        self._announced, self._shown = 0, 0
        self._over = False
        self._batches, self.check_report = 0, None
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
        if isinstance(inspect.getattr_static(type(module), "training_step"), property):
            rank_zero_warn(
                "training_step is a property: no other step can stand in its place, and it runs as before, without "
                "rematerialization; make it a method that calls the one of the moment",
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
        if names_modules(trainer):
            rank_zero_warn(
                "Lightning's PyTorchProfiler puts hooks on all modules, and each ends a captured graph: the step is planned in "
                "many parts, which saves little. Give Trainer(profiler=PyTorchProfiler(record_module_names=False))",
                category=RematWarning,
            )
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
        self._stop_tracking()  # left open by a batch that another hook has skipped
        self._batches += 1
        self._went_back = self._uncounted = False
        if self._step is None or not self.config.measure:
            return
        steps = steps_before_buckets(trainer)
        if steps and self._batches <= 1 + trainer.accumulate_grad_batches * steps:
            return
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = interval > 0 and (steps_logged(trainer) + 1) % interval == 0
        due = due and not accumulates(trainer)
        if self._step.to_be_measured and trainer.strategy.root_device.type == "cpu":
            return  # there is one profiler, and the memory beside the step's graphs is not known yet
        if not (self._measure_next or (due and self._step.plans)):
            return
        device = trainer.strategy.root_device
        held = held_on_device(trainer, pl_module, batch)
        peak = self._tracker.enter_context(track_peak(device))
        self._tracked = peak, held, sum(self._step.runs)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.training_step is None:
            return
        first, self._went_back = not self._went_back, True
        if self.training_step.notice_gradients(first):
            self._uncounted = True
            rank_zero_info("gradients of earlier steps are there in a backward: the next step is planned with them")

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
        if self._step is not None and self._announced < len(self._step.plans) and trainer.is_global_zero:
            self._step.tell_left_out(self._step.left_out(pl_module))
        self._announce(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, InfeasibleBudgetError) and self._step is not None:
            unread = self._step.not_captured_yet(pl_module)
            if unread:
                exception.add_note(
                    f"What was captured does not read {listed(unread)}: where that is used, the step runs as before, and a "
                    "share as budget is one of the rest (TORCH_LOGS=graph_breaks says why)."
                )
        self._undo(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo(trainer)

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
        """Print, log and save the plans that are new."""
        if self._step is None:
            return
        found = self._step.plans[self._announced :]
        self._announced += len(found)
        if not found:
            return
        # Measure a later step, since planning has disturbed this one; where that costs nothing, a few of them.
        self._measure_next = FIRST_STEPS if trainer.strategy.root_device.type == "cuda" else 1
        shown = worth_showing(found)
        for plan in shown:
            self._shown += 1
            if self._shown == 1:
                show_plan(trainer, plan)
            else:
                rank_zero_info(f"{plan.graph.name}: {plan.summary()}")
            log_metrics(trainer, plan_metrics(plan))
            if self.config.artifacts:
                write_plan(trainer, plan, self._shown, self._folder)
        if shown and shown[0].whole is None and len(shown) < len(found):
            rank_zero_info(f"{shown[0].graph.name}: {len(found)} plans in all, for its parts")

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
        # A plan has run, and not the unchanged step, nor, in the end, what is computed once more.
        scheduled = sum(self._step.runs) > runs and not self._step.gave_up
        over = over_prediction(plan, peak, measured, self._step.recorded) if scheduled else ""
        if over and not self._over and not self._uncounted:
            self._over = True
            warnings.warn(over, RematWarning, stacklevel=2)

    def _stop_tracking(self) -> None:
        self._tracked = None
        self._tracker.close()

    def _undo(self, trainer: pl.Trainer) -> None:
        if self._limit is not None:
            trainer.limit_train_batches, self._limit = self._limit, None
        self._stop_tracking()
        self.at_hand = None
        if self.training_step is not None:
            self.training_step.remove()
            self.training_step = None
        if (step := self._step) is not None:  # it holds the module, and what was captured
            self._found = Found(step.last_plan, tuple(step.plans), tuple(step.runs), tuple(step.failures))
            self._step = None
