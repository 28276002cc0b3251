"""Comparing eager mode, a second run of eager mode, and the planned step, each run from the same state."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_remat.exactness._advice import Settings, advice
from lightning_remat.exactness._outcome import Kind, Outcome, Results, named_tensors, results
from lightning_remat.exactness._report import CheckReport, Verdict
from lightning_remat.exactness._state import State
from lightning_remat.exactness._trace import FirstDifference, Record, eager_recorded, first_difference
from lightning_remat.planner import Plan
from lightning_remat.runtime import ScheduledStep

log = logging.getLogger(__name__)

MOST_RUNS = 5
"""Runs of the planned step, at most: if it has several graphs or counts its steps, it is planned again after one."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """One step, as eager mode runs it and as it was planned.

    Attributes:
        eager, planned: run the step, forward and backward, from the present state; gradients are left in ``.grad`` of
            the parameters, and the step's output is returned.
        scheduled: the step that ``planned`` runs.
        modules: the modules whose parameters and buffers are compared, by the prefix of their names.
        state: the state that every run begins with; it is put back in the end.
        progress: called with a text about the work in progress.
    """

    eager: Callable[[], Any]
    planned: Callable[[], Any]
    scheduled: ScheduledStep
    modules: Mapping[str, torch.nn.Module]
    state: State
    progress: Callable[[str], None] = lambda _words: None


class _OutOfMemory(Exception):
    pass


def compare(runs: Runs) -> CheckReport:
    """Run a step both ways and compare; everything is as before in the end.

    Where bits differ, two more runs are recorded op by op, to find the first op that returns other bits.

    Returns:
        A report; if eager mode or the planned step runs out of memory, one that says so.

    Raises:
        Exception: what the step or its planning raises; the state is put back then too.
    """
    try:
        return _compared(runs)
    except _OutOfMemory as error:
        eager = str(error) == "eager"
        words = "eager mode runs" if eager else "the planned step runs"
        return CheckReport(Verdict.UNCHECKED, notes=(f"{words} out of memory on this batch",), out_of_memory=eager)
    finally:
        runs.state.restore()
        runs.scheduled.begin_anew()


def _compared(runs: Runs) -> CheckReport:
    runs.progress("checking: eager mode")
    with _reporting_memory("eager"):
        outcome = Outcome(_results(runs, runs.eager))
        again = outcome.differences(_results(runs, runs.eager))
    differences = again
    notes: list[str] = []
    if not again:
        runs.progress("checking: the planned step")
        before = -1
        for _ in range(MOST_RUNS):
            if differences or len(runs.scheduled.plans) == before:
                break
            before = len(runs.scheduled.plans)
            with _reporting_memory("planned"):
                differences = outcome.differences(_results(runs, runs.planned))
        if not runs.scheduled.plans and not differences:
            reason = "; ".join(runs.scheduled.failures) or "it has nothing that needs gradients"
            return CheckReport(Verdict.UNCHECKED, notes=(f"nothing is captured, and all runs as before: {reason}",))
        notes += [f"not captured, and run as before: {reason}" for reason in runs.scheduled.failures]
    plans = [plan for plan, count in zip(runs.scheduled.plans, runs.scheduled.runs, strict=True) if count]
    report = CheckReport(
        Verdict.UNREPEATABLE if again else Verdict.DIFFERENT if differences else Verdict.EQUAL,
        outputs=tuple(outcome.names(Kind.OUTPUT)),
        gradients=len(outcome.names(Kind.GRADIENT)),
        buffers=len(outcome.names(Kind.BUFFER)),
        differences=differences,
        notes=(*notes, *_what_ran(plans)),
        plans=(len(plans), sum(plan.rematerializes for plan in plans)),
    )
    if not differences:
        return report
    runs.progress("checking: looking for the first operation that differs")
    first, words = _first(runs, bool(again))
    cuda = any(p.is_cuda for module in runs.modules.values() for p in module.parameters())
    found = advice(first, not again, Settings.now(cuda))
    return dataclasses.replace(report, first=first, advice=found, notes=(*report.notes, *words))


def _what_ran(plans: list[Plan]) -> list[str]:
    if plans and not any(plan.rematerializes or plan.copies for plan in plans):
        return ["the plan evaluates nothing again: the step fits as it is"]
    return []


def _results(runs: Runs, run: Callable[[], Any]) -> Results:
    """The results of a run from the saved state."""
    runs.state.begin()
    output = run()
    yield from results(output, runs.modules)


def _first(runs: Runs, repeat: bool) -> tuple[FirstDifference | None, list[str]]:
    """The first op with other bits (``repeat``: in eager mode's own second run), or notes on why it is not known."""
    reference, other = Record(), Record()
    try:
        runs.state.begin()
        with eager_recorded(reference, runs.modules):
            output = runs.eager()
        reference.end(_tensors(runs, output))
        runs.state.begin()
        with eager_recorded(other, runs.modules) if repeat else runs.scheduled.observed(other.call):
            output = runs.eager() if repeat else runs.planned()
        other.end(_tensors(runs, output))
        found = first_difference(reference, other)
    except Exception as error:
        log.info("the ops of the step cannot be written down", exc_info=error)
        return None, [
            f"which operation differs first is not known: {type(error).__name__}: {str(error).splitlines()[0]}"
        ]
    return found, [] if found is not None else ["which operation differs first could not be found"]


def _tensors(runs: Runs, output: Any) -> Iterator[torch.Tensor]:
    return (value for _, _, value in results(output, runs.modules) if value is not None)


@contextlib.contextmanager
def _reporting_memory(who: str) -> Iterator[None]:
    failed = False
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failed = True  # raised below: the frames of this error refer to tensors, which are freed with it
    if failed:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise _OutOfMemory(who)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def cut(value: Any, size: int, samples: int) -> Any:
    """A batch of ``size`` cut to its first ``samples``: every tensor in it, also in containers, of ``size`` rows."""
    if isinstance(value, torch.Tensor):
        return value[:samples].clone() if value.dim() and value.shape[0] == size else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut(one, size, samples) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)([cut(one, size, samples) for one in value])
    if isinstance(value, Mapping):
        made = {key: cut(one, size, samples) for key, one in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    return value


def size_of(value: Any) -> int:
    """The number of samples of a batch: the first dimension of the first tensor in it that has one, else 0."""
    return next((tensor.shape[0] for _, tensor in named_tensors(value) if tensor.dim()), 0)
