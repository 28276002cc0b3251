"""From which step to which each piece of memory of a schedule is held."""

from __future__ import annotations

from typing import NamedTuple

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule._memory import Memory
from lightning_remat.schedule._schedule import Compute, Free, Schedule


class Life(NamedTuple):
    """A storage that lies in memory for a while; one that is computed again lives again.

    Attributes:
        tensor: a tensor that lies on it, the first that did; -1 for a result that is given up at once.
        op: the op that made it, or what was fetched back from the host; -1 for a gradient that the caller hands in.
        nbytes: its size.
        begin: the first step at which it is held.
        end: the last one; the number of steps for what is held when the last one is done.
    """

    tensor: int
    op: int
    nbytes: int
    begin: int
    end: int


def lives(graph: ComputationGraph, schedule: Schedule) -> tuple[Life, ...]:
    """The lives of all storages but those of inputs, in the order in which they begin; those without bytes are left out.

    Held at a step are what is resident, the workspace of its op, and all that begin at or before it and end at or after it:
    ``simulate(graph, schedule).during``.

    Raises:
        ScheduleError: when a step needs a tensor that is not present.
    """
    memory = _Watched(graph)
    for index, step in enumerate(schedule.steps):
        memory.step = index
        if index == schedule.boundary:
            memory.cross_boundary()
        if isinstance(step, Compute):
            memory.op = step.op
            memory.compute(step.op, step.over)
        elif isinstance(step, Free):
            memory.free(step.tensor)
        else:
            memory.op = graph.producer[step.tensor]
            memory.copy(step)
        memory.op = -1
    count = len(schedule.steps)
    memory.step = count
    if schedule.boundary == count:
        memory.cross_boundary()
    found = zip(memory.bytes, memory.made, memory.lies, memory.begins, memory.ends, strict=True)
    return tuple(Life(t, op, n, begin, count if end is None else end) for n, op, t, begin, end in found if n)


class _Watched(Memory):
    """Notes when each storage instance begins and ends."""

    def __init__(self, graph: ComputationGraph) -> None:
        self.step, self.op = 0, -1
        self.made: list[int] = []
        self.lies: list[int] = []
        self.begins: list[int] = []
        self.ends: list[int | None] = []
        super().__init__(graph)

    def _new(self, nbytes: int, op: str = "", block: int = -1) -> int:
        instance = super()._new(nbytes, op, block)
        self.made.append(self.op)
        self.lies.append(-1)
        self.begins.append(self.step)
        self.ends.append(None)
        return instance

    def _hold(self, tensor: int, instance: int) -> None:
        super()._hold(tensor, instance)
        if self.lies[instance] < 0:
            self.lies[instance] = tensor

    def _drop(self, instance: int, *, taken: bool = False) -> None:
        super()._drop(instance, taken=taken)
        if self.references[instance] == 0:  # what is taken over is gone before the step that takes it
            self.ends[instance] = self.step - taken
