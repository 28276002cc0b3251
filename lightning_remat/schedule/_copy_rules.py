"""The part of `verify` that is about copies: its rules 11 to 13."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule._schedule import Copy


class CopyRules:
    """What is under way to the host and back, and what lies there.

    Attributes:
        sending: tensors on their way to the host, each with the place in the device's memory where it lies meanwhile.
        fetching: tensors on their way back, each with the place that it takes.
        sent: tensors that lie on the host.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        self.graph = graph
        self.sending: dict[int, tuple[int, int]] = {}
        self.fetching: dict[int, tuple[int, int]] = {}
        self.sent: set[int] = set()

    def bytes_of(self, tensors: Collection[int]) -> int:
        return sum(self.graph.storages[self.graph.tensors[t].storage] for t in tensors)

    def begin(self, number: int, step: Copy, where: Mapping[int, tuple[int, int]]) -> None:
        """Take step ``number``, with which a copy begins, where tensors are present at the places ``where``."""
        t, host = step.tensor, self.graph.host
        label = f"step {number}: the copy of {self.graph.tensors[t].name}"
        if host is None:
            raise ScheduleError(f"{label} needs host memory, and the graph has none")
        if t in (self.fetching if step.to_device else self.sending):
            raise ScheduleError(f"{label} is under way already")
        if step.to_device:
            if t not in self.sent:
                raise ScheduleError(f"{label} cannot be fetched: it does not lie on the host")
            if t in where:
                raise ScheduleError(f"{label} is not to be fetched: it is present")
            self.fetching[t] = (self.graph.tensors[t].storage, number)
            return
        if t not in where:
            raise ScheduleError(f"{label} cannot begin: it is not present")
        if t in self.sent:
            raise ScheduleError(f"{label} lies on the host already")
        if not self.graph.copyable[t]:
            raise ScheduleError(f"{label} cannot begin: it does not alone fill its storage, or is written to")
        self.sending[t] = where[t]
        there = self.bytes_of([*self.sent, *self.sending])
        if there > host.bytes:
            raise ScheduleError(f"{label} makes {there:,} bytes on the host, which has {host.bytes:,} for the step")

    def end(self, number: int, step: Copy) -> tuple[int, int] | None:
        """Take step ``number``, with which a copy has ended; returns where what was fetched lies."""
        t = step.tensor
        label = f"step {number}: the copy of {self.graph.tensors[t].name}"
        if t not in (self.fetching if step.to_device else self.sending):
            raise ScheduleError(f"{label} ends, and has not begun")
        if step.to_device:
            return self.fetching.pop(t)
        del self.sending[t]
        self.sent.add(t)
        return None

    def ended(self, when: str) -> None:
        """All copies have ended."""
        for t in (*self.sending, *self.fetching):
            raise ScheduleError(f"the copy of {self.graph.tensors[t].name} has not ended when {when}")

    def not_read(self, number: int, op: str, t: int) -> None:
        """An op reads, or computes, a tensor."""
        if t in self.fetching:
            name = self.graph.tensors[t].name
            raise ScheduleError(f"step {number}: {op} reads or computes {name}, whose fetch has not ended")

    def not_taken(self, number: int, tensor: int, place: tuple[int, int] | None = None) -> None:
        """A tensor is freed, or, with ``place``, where it lies is written to."""
        if tensor in self.sending or place in self.sending.values():
            name = self.graph.tensors[tensor].name
            raise ScheduleError(f"step {number} frees or overwrites {name}, whose copy has not ended")
