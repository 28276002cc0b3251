"""The memory timeline of a schedule, step by step, by storage."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule._schedule import Compute, Schedule


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory and time of a schedule.

    Attributes:
        during: bytes held while each step runs (workspace and outputs of a running op included), one a step.
        after: bytes held when each step is done.
        seconds_after: time passed when each step is done.
        peak_bytes: the largest of ``during``; what is resident when there are no steps.
        peak_step: index of the first step at which the peak occurs (-1 when there are no steps).
        peak_op: name of the op computed there ("" for a step that computes none).
        peak_module: that op's module path.
        seconds: time of all evaluations.
        saved_bytes: what the forward leaves behind for the backward, beyond inputs and what is resident.
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


def simulate(graph: ComputationGraph, schedule: Schedule) -> Timeline:
    """The memory timeline of ``schedule`` on ``graph``.

    Storages are what takes memory: a view takes none, and a storage is released when the last present tensor on it is
    given up. The caller holds inputs throughout, and forward outputs from the boundary on.

    Raises:
        ScheduleError: when a step needs a tensor that is not present. (`verify` checks all the rules.)
    """
    memory = _Memory(graph)
    count = len(schedule.steps)
    during = np.zeros(count, dtype=np.int64)
    after = np.zeros(count, dtype=np.int64)
    seconds_after = np.zeros(count, dtype=np.float64)
    seconds, saved = 0.0, 0
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            saved = memory.cross_boundary()
        if isinstance(step, Compute):
            during[index] = memory.compute(step.op, step.over)
            seconds += graph.ops[step.op].seconds
        else:
            during[index] = memory.held
            memory.free(step.tensor)
        after[index] = memory.held
        seconds_after[index] = seconds
    if schedule.boundary == count:
        saved = memory.cross_boundary()
    peak_step = int(during.argmax()) if count else -1
    peak = schedule.steps[peak_step] if count else None
    op = graph.ops[peak.op] if isinstance(peak, Compute) else None
    return Timeline(
        during=during,
        after=after,
        seconds_after=seconds_after,
        peak_bytes=int(during[peak_step]) if count else memory.held,
        peak_step=peak_step,
        peak_op=op.name if op else "",
        peak_module=op.module if op else "",
        seconds=seconds,
        saved_bytes=saved,
    )


class _Memory:
    """Present tensors, the storage instances they lie on, and the bytes held."""

    def __init__(self, graph: ComputationGraph) -> None:
        self.graph = graph
        self.base = graph.input_bytes + graph.resident_bytes
        self.held = self.base + graph.forward_resident_bytes
        self.instance: dict[int, int] = {}  # present tensor -> storage instance
        self.references: list[int] = []  # storage instance -> present tensors and other holders
        self.bytes: list[int] = []
        by_storage: dict[int, int] = {}
        for t in graph.inputs:
            tensor = graph.tensors[t]
            if tensor.role is not TensorRole.TANGENT:
                if tensor.storage not in by_storage:
                    by_storage[tensor.storage] = self._new(0)
                self._hold(t, by_storage[tensor.storage])
                self.references[by_storage[tensor.storage]] += 1  # the caller's

    def _new(self, nbytes: int) -> int:
        self.references.append(0)
        self.bytes.append(nbytes)
        self.held += nbytes
        return len(self.bytes) - 1

    def _hold(self, tensor: int, instance: int) -> None:
        self.instance[tensor] = instance
        self.references[instance] += 1

    def _drop(self, instance: int) -> None:
        self.references[instance] -= 1
        if self.references[instance] == 0:
            self.held -= self.bytes[instance]

    def _take(self, tensor: int) -> None:
        """Everything that lies where ``tensor`` does is gone, and its bytes with it."""
        instance = self.instance[tensor]
        gone = [t for t, other in self.instance.items() if other == instance]
        if self.references[instance] != len(gone):
            raise ScheduleError(f"{self.graph.tensors[tensor].name} is overwritten while the caller holds it")
        for t in gone:
            self._drop(self.instance.pop(t))

    def compute(self, index: int, over: int) -> int:
        """Evaluate an op, on the storage of tensor ``over`` unless that is -1; returns the bytes held while it runs."""
        graph, op = self.graph, self.graph.ops[index]
        lies_on: dict[int, int] = {}
        for t in op.inputs:
            if t not in self.instance:
                raise ScheduleError(f"{op.name} reads {graph.tensors[t].name}, which is not present")
            lies_on[graph.tensors[t].storage] = self.instance[t]
        if over >= 0:
            self._take(over)
        surplus: list[int] = []
        for t in op.outputs:
            storage = graph.tensors[t].storage
            if storage not in lies_on:
                lies_on[storage] = self._new(graph.storages[storage])
                surplus.append(lies_on[storage])
                self.references[lies_on[storage]] += 1
            if t not in self.instance:
                self._hold(t, lies_on[storage])
        held = self.held + op.workspace_bytes
        for instance in surplus:
            self._drop(instance)
        return held

    def free(self, tensor: int) -> None:
        """Give a tensor up."""
        if tensor not in self.instance:
            raise ScheduleError(f"{self.graph.tensors[tensor].name} is freed while it is not present")
        self._drop(self.instance.pop(tensor))

    def cross_boundary(self) -> int:
        """Hand the forward outputs to the caller and take the tangents; returns the bytes kept for the backward."""
        graph = self.graph
        self.held -= graph.forward_resident_bytes
        for t in graph.forward_outputs:
            if t not in self.instance:
                raise ScheduleError(f"forward output {graph.tensors[t].name} is not present when the forward ends")
            self.references[self.instance[t]] += 1
        saved = self.held - self.base
        by_storage: dict[int, int] = {}
        for t in graph.inputs:
            tensor = graph.tensors[t]
            if tensor.role is TensorRole.TANGENT:
                if tensor.storage not in by_storage:
                    by_storage[tensor.storage] = self._new(graph.storages[tensor.storage])
                self._hold(t, by_storage[tensor.storage])
        return saved
