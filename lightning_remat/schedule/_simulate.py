"""What a schedule holds and asks for, step by step: its memory timeline, and its requests to an allocator."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule._clocks import Clocks
from lightning_remat.schedule._memory import Event, Memory
from lightning_remat.schedule._schedule import Compute, Free, Schedule


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory and time of a schedule.

    Attributes:
        during: bytes held while each step runs (workspace and outputs of a running op included), one a step.
        after: bytes held when each step is done.
        seconds_after: seconds passed when each step is done.
        peak_bytes: the largest of ``during`` while an op or a copy runs; what is resident at the start without any.
        peak_step: index of the first step at which the peak occurs (-1 when no op runs).
        peak_op: name of the op computed there, or that made what is fetched there ("" when no op runs).
        peak_module: that op's module path.
        seconds: time of all evaluations, and of what they wait for: copies from and to the host.
        saved_bytes: bytes held when the forward ends, its outputs included, beyond inputs and what is resident.
        host_bytes: bytes that lie on the host in the end.
    """

    during: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    seconds_after: npt.NDArray[np.float64]
    peak_bytes: int
    peak_step: int
    peak_op: str
    peak_module: str
    seconds: float
    saved_bytes: int
    host_bytes: int = 0


def simulate(graph: ComputationGraph, schedule: Schedule) -> Timeline:
    """The memory timeline of ``schedule`` on ``graph``.

    Storages are what takes memory: a view takes none, and a storage is released when the last present tensor on it is
    given up. The caller holds inputs throughout, and forward outputs from the boundary on.

    Copies run beside the ops (`Clocks`). What is fetched takes memory from the step on with which its copy begins.

    Raises:
        ScheduleError: when a step needs a tensor that is not present. (`verify` checks all the rules.)
    """
    memory, clocks = Memory(graph), Clocks(graph)
    count = len(schedule.steps)
    during = np.zeros(count, dtype=np.int64)
    after = np.zeros(count, dtype=np.int64)
    seconds_after = np.zeros(count, dtype=np.float64)
    saved = 0
    peak, peak_step = memory.held, -1
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            saved = memory.cross_boundary()
        if isinstance(step, Free):
            during[index] = memory.held
            memory.free(step.tensor)
        else:
            if isinstance(step, Compute):
                during[index] = memory.compute(step.op, step.over)
            else:
                memory.copy(step)
                during[index] = memory.held
            clocks.pass_step(step)
            if peak_step < 0 or during[index] > peak:
                peak, peak_step = int(during[index]), index
        after[index] = memory.held
        seconds_after[index] = clocks.seconds
    if schedule.boundary == count:
        saved = memory.cross_boundary()
    highest = schedule.steps[peak_step] if peak_step >= 0 else None
    made = highest.op if isinstance(highest, Compute) else graph.producer[highest.tensor] if highest else -1
    op = graph.ops[made] if made >= 0 else None
    return Timeline(
        during=during,
        after=after,
        seconds_after=seconds_after,
        peak_bytes=peak,
        peak_step=peak_step,
        peak_op=op.name if op else "",
        peak_module=op.module if op else "",
        seconds=clocks.seconds,
        saved_bytes=saved,
        host_bytes=sum(graph.storages[graph.tensors[t].storage] for t in memory.on_host),
    )


class Allocations(NamedTuple):
    """What a schedule allocates and frees, in order. Inputs, and what is resident, are not among it.

    Attributes:
        forward: events until the loss is handed to the caller.
        backward: events from there on; they begin with the gradient of the loss.
        gradients: the blocks in which the backward outputs lie at the end. Others that were not freed are the caller's.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    gradients: tuple[int, ...]


def allocations(graph: ComputationGraph, schedule: Schedule) -> Allocations:
    """The requests that an allocator gets when ``schedule`` runs.

    An op's outputs are allocated before its workspace, and a result that is written over an input takes that input's block.

    Raises:
        ScheduleError: when a step needs a tensor that is not present.
    """
    memory = Memory(graph)
    boundary = 0
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            boundary = len(memory.events)
            memory.cross_boundary()
        if isinstance(step, Compute):
            memory.compute(step.op, step.over)
        elif isinstance(step, Free):
            memory.free(step.tensor)
        else:
            memory.copy(step)
    if schedule.boundary == len(schedule.steps):
        boundary = len(memory.events)
        memory.cross_boundary()
    lie = {memory.instance[t] for t in graph.backward_outputs if t in memory.instance}
    gradients = tuple(sorted({memory.block[instance] for instance in lie if memory.bytes[instance]}))
    return Allocations(tuple(memory.events[:boundary]), tuple(memory.events[boundary:]), gradients)
