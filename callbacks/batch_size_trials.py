"""Training steps at a batch size that is tried: captured only, or planned and run, and nothing of them stays."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error

from lightning_remat.callbacks.config import RematCallbackConfig
from lightning_remat.callbacks.distributed import held_on_device, unsynchronized
from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.callbacks.training_data import TrainingData
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.measure import held_bytes, track_peak
from lightning_remat.planner import AtHand, BatchSizes, Plan, RematConfig

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Trials:
    """Steps at batch sizes that are tried. All processes try the same one at the same time.

    Args:
        trainer, module: of the fit that is about to begin.
        config: how its steps will be planned.
        data: gives batches of any size.
        progress: told what is being done.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        config: RematCallbackConfig,
        data: TrainingData,
        progress: PlanningProgress,
    ) -> None:
        self._trainer, self._module = trainer, module
        # In one form at all sizes: what is known of one size holds for the others.
        self._config = dataclasses.replace(
            config,
            background=False,
            cuda_graphs=False,
            tiling="off" if config.tiling == "off" else "losses",
            fuse="off",
            offload="off",
        )
        self._data, self._progress = data, progress

    def capture(self, size: int) -> Plan | str:
        """The plan of the step without rematerialization, or why there is none: in all processes one or the other."""
        plain = dataclasses.replace(self._config, budget=1.0, solver="no_remat", solver_options={})
        say = self._within(f"predicting from a batch size of {size}")

        def capture() -> Plan | str:
            step = self._step(plain, say)
            self._forward(step, self._data.batch(size))
            plans, failures = step.scheduled.plans, step.scheduled.failures
            if len(plans) != 1 or failures:
                return failures[0] if failures else f"the step is captured as {len(plans)} graphs"
            return plans[0]

        found = self._surviving(size, capture) or f"a batch size of {size} runs out of memory"
        everywhere = self._trainer.strategy.reduce_boolean_decision(not isinstance(found, str), all=True)
        return found if everywhere or isinstance(found, str) else "it fails in another process"

    def confirm(self, size: int, sizes: BatchSizes, doing: str) -> tuple[Plan | None, int | None]:
        """Plan a batch size, and run the planned step: returns its plan, and its measured peak in bytes where it ran.

        A schedule that the search has met is taken where one fits; otherwise one is solved for.
        """
        say = self._within(doing)
        plan: Plan | None = None

        def confirm() -> int | None:
            nonlocal plan
            step = self._step(self._config, say, AtHand(sizes.allowed, suffices=True))
            batch = self._data.batch(size)
            known = -1
            while len(step.scheduled.plans) > known and not step.scheduled.failures:
                # A step that changes its own counters is captured twice: not while its peak is tracked.
                known = len(step.scheduled.plans)
                self._forward(step, batch)
            plan = step.scheduled.last_plan
            for parameter in self._module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # in the place of the previous step's gradients
            # There is no optimizer state yet. (The optimizer takes no step: parameters stay as they are.)
            optimizers, device = self._trainer.optimizers, self._trainer.strategy.root_device
            missing = optimizer_state_bytes(optimizers, device) - held_bytes(*optimizers, device=device)
            held = held_on_device(self._trainer, self._module, batch) + missing
            say("running the step")
            with track_peak(device) as peak:
                self._run(step, batch)
            plan = step.scheduled.last_plan
            if step.scheduled.failures or peak.peak_bytes is None:
                return None
            if peak.allocated_bytes is not None:  # on CUDA all allocated memory counts, as in the plan
                return peak.allocated_bytes + missing
            return held + peak.peak_bytes

        measured = self._surviving(size, confirm)
        return plan, measured

    def _surviving(self, size: int, attempt: Callable[[], _T]) -> _T | None:
        """What ``attempt`` returns, or ``None`` where the batch size does not fit; it leaves nothing on the device."""
        try:
            return attempt()
        except InfeasibleBudgetError:
            log.info("a batch size of %d does not fit after all", size)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not is_oom_error(error):
                raise
            log.info("a batch size of %d ran out of memory: %s", size, error)
        finally:  # nothing refers to what the attempt held any more, not even the traceback
            self._module.zero_grad()
            garbage_collection_cuda()
        return None

    def _within(self, doing: str) -> Callable[[str], None]:
        """Report ``doing`` as progress; returns what reports its parts."""
        self._progress(doing)
        return lambda words: self._progress(f"{doing}: {words}")

    def _step(self, config: RematConfig, say: Callable[[str], None], at_hand: AtHand | None = None) -> TrainingStep:
        return TrainingStep(
            self._trainer,
            self._module,
            config,
            reserve=self._config.reserve,
            progress=say,
            leave_alone=False,
            at_hand=at_hand,
        )

    def _forward(self, step: TrainingStep, batch: Any) -> torch.Tensor:
        output = step.rehearse(batch)
        loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def _run(self, step: TrainingStep, batch: Any) -> None:
        """Forward and backward, in the order in which Lightning runs them."""
        with unsynchronized(self._trainer.strategy.model):
            loss = self._forward(step, batch)
            if self._trainer.accumulate_grad_batches == 1:
                self._module.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
