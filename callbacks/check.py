"""``RematCallback(check=True)``: compares the planned first training step with eager mode, and changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.exactness import CheckReport, Runs, State, Verdict, compare, cut, size_of
from lightning_remat.planner import Plan, RematWarning

MANUAL = (
    "with manual optimization the step itself changes parameters and optimizers, and cannot be run again; "
    "lightning_remat.check(module, *batch) compares a forward and the backward of its loss"
)

Progress = Callable[[str], None]


def check_step(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    step: TrainingStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    progress: Progress,
) -> CheckReport:
    """Compare the planned step with eager mode on one batch, in this process alone.

    Nothing is logged, and afterwards everything is as before: parameters, buffers, gradients, random generators,
    metrics, the module's own attributes and the batch. Where eager mode runs out of memory, fewer samples are taken.

    Args:
        trainer: the Trainer, in a fit that has begun.
        module: the module that is trained.
        step: the planned training step.
        args: positional arguments of the training step.
        kwargs: keyword arguments of the training step.
        progress: called with a text about the work in progress.

    Returns:
        The report. An exception of the step is not raised, but named in the report's notes.
    """
    if not module.automatic_optimization:
        return _unchecked(MANUAL)
    try:
        state = State(module, args, kwargs)
        report = compare(_runs(trainer, module, step, state, args, kwargs, progress))
        if report.out_of_memory:
            report = _on_fewer_samples(trainer, module, step, state, args, kwargs, progress)
    except Exception as error:  # noqa: BLE001 - a check does not end the training
        return _unchecked(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return report


def tell_check(trainer: pl.Trainer, name: str, report: CheckReport, folder: Path | None) -> None:
    """Log a check's report, as a warning in each process whose bits were not equal, and save it in ``folder``."""
    text = f"{name}, {report.summary()}"
    if report.equal:
        rank_zero_info(text)
    else:
        where = f"process {trainer.global_rank}: " if trainer.world_size > 1 else ""
        warnings.warn(f"{where}{text}", RematWarning, stacklevel=2)
    if folder is None or not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.save(folder / "check.json")
    except OSError as error:
        warnings.warn(f"the check was not saved in {folder}: {error}", RematWarning, stacklevel=2)


def _unchecked(reason: str) -> CheckReport:
    return CheckReport(Verdict.UNCHECKED, notes=(reason,))


def _runs(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    step: TrainingStep,
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    progress: Progress,
) -> Runs:
    # Where gradients are accumulated, those of a second backward are added to those of the first.
    times = 2 if trainer.accumulate_grad_batches > 1 else 1

    def run(forward: Callable[..., Any]) -> Any:
        for _ in range(times):
            with torch.enable_grad():
                output = forward(*args, **kwargs)
                loss = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches).closure_loss
                if loss is not None:
                    _backward(trainer, module, loss)
        return output

    return Runs(
        eager=functools.partial(run, step.eager),
        planned=functools.partial(run, step.unlogged),
        scheduled=step.scheduled,
        modules={"": module},
        state=state,
        progress=progress,
    )


def _backward(trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
    """Run the module's own backward; only compute the gradients where accumulating them would have other effects.

    DDP would reduce them, and a hook on a parameter may run an optimizer's step.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        loss = loss * scaler.get_scale()
    parameters = [p for p in module.parameters() if p.requires_grad]
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
    if not hooked and not isinstance(trainer.strategy.model, DistributedDataParallel):
        module.backward(loss)
        return
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _on_fewer_samples(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    step: TrainingStep,
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    progress: Progress,
) -> CheckReport:
    """The same check with half of the batch, a quarter, ..., planned at the budget share of the whole batch's plan."""
    size = size_of((*args, kwargs))
    progress("checking: planning the whole batch")
    state.begin()
    try:
        step.unlogged(*args, **kwargs)
    finally:
        state.restore()
        step.scheduled.begin_anew()
    plan, samples = step.scheduled.last_plan, size // 2
    if plan is None:
        return _unchecked("; ".join(step.scheduled.failures) or "nothing is captured")
    while samples:
        smaller = TrainingStep(
            trainer,
            module,
            dataclasses.replace(step.config, budget=_share(plan), background=False),
            progress=progress,
            leave_alone=False,
            alone=True,
        )
        few, named = cut((args, kwargs), size, samples)
        report = compare(_runs(trainer, module, smaller, State(module, few, named), few, named, progress))
        smaller.scheduled.close()
        if not report.out_of_memory:
            note = f"eager mode runs out of memory on {size} samples: {samples} of them were taken, at the same share"
            return dataclasses.replace(report, samples=samples, notes=(*report.notes, note))
        samples //= 2
    return _unchecked("eager mode runs out of memory, on a single sample too: there is nothing to compare with")


def _share(plan: Plan) -> float:
    """A plan's peak as a share of what rematerialization can save: a budget that saves something at other sizes too."""
    floor = plan.graph.floor_bytes
    between = max(1, plan.baseline_peak_bytes - floor)
    return min(1.0, max(0.01, (plan.predicted_peak_bytes - floor) / between))
