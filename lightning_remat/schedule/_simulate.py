"""What a schedule holds and asks for, step by step: its memory timeline, and its requests to an allocator."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule._clocks import Clocks
from lightning_remat.schedule._schedule import Compute, Copy, Free, Schedule


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
    memory, clocks = _Memory(graph), Clocks(graph)
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


class Event(NamedTuple):
    """One request to an allocator: a block of memory is allocated, or freed.

    Attributes:
        block: number of the block; numbers are not used again.
        nbytes: its size; 0 where it is freed.
        op: name of the op that runs, "" between two.
    """

    block: int
    nbytes: int
    op: str


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
    memory = _Memory(graph)
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


class _Memory:
    """Present tensors, the storage instances they lie on, the bytes held, and what was asked of an allocator for them.

    A storage that is computed again lies in a new instance, beside or after the one before.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        self.graph = graph
        self.events: list[Event] = []
        self.block: list[int] = []  # storage instance -> its block
        self.blocks = 0
        self.base = graph.input_bytes + graph.resident_bytes
        self.held = self.base + graph.forward_resident_bytes
        self.instance: dict[int, int] = {}  # present tensor -> storage instance
        self.references: list[int] = []  # storage instance -> present tensors and other holders
        self.bytes: list[int] = []
        self.on_host: set[int] = set()
        self.fetched: dict[int, int] = {}  # tensor on its way to the device -> storage instance
        by_storage: dict[int, int] = {}
        for t in graph.inputs:
            tensor = graph.tensors[t]
            if tensor.role is not TensorRole.TANGENT:
                if tensor.storage not in by_storage:
                    by_storage[tensor.storage] = self._new(0)
                self._hold(t, by_storage[tensor.storage])
                self.references[by_storage[tensor.storage]] += 1  # the caller's

    def _new(self, nbytes: int, op: str = "", block: int = -1) -> int:
        """A storage instance on a new block, or on one that is taken over."""
        self.references.append(0)
        self.bytes.append(nbytes)
        self.block.append(self._allocate(nbytes, op) if block < 0 else block)
        self.held += nbytes
        return len(self.bytes) - 1

    def _allocate(self, nbytes: int, op: str) -> int:
        self.blocks += 1
        if nbytes:
            self.events.append(Event(self.blocks - 1, nbytes, op))
        return self.blocks - 1

    def _hold(self, tensor: int, instance: int) -> None:
        self.instance[tensor] = instance
        self.references[instance] += 1

    def _drop(self, instance: int, *, taken: bool = False) -> None:
        self.references[instance] -= 1
        if self.references[instance] == 0:
            self.held -= self.bytes[instance]
            if self.bytes[instance] and not taken:
                self.events.append(Event(self.block[instance], 0, ""))

    def _take(self, tensor: int) -> int:
        """Everything that lies where ``tensor`` does is gone, and its bytes with it; returns the block."""
        instance = self.instance[tensor]
        gone = [t for t, other in self.instance.items() if other == instance]
        if self.references[instance] != len(gone):
            raise ScheduleError(f"{self.graph.tensors[tensor].name} is overwritten while the caller holds it")
        for t in gone:
            self._drop(self.instance.pop(t), taken=True)
        return self.block[instance]

    def compute(self, index: int, over: int) -> int:
        """Evaluate an op, on the storage of tensor ``over`` unless that is -1; returns the bytes held while it runs."""
        graph, op = self.graph, self.graph.ops[index]
        lies_on: dict[int, int] = {}
        for t in op.inputs:
            if t not in self.instance:
                raise ScheduleError(f"{op.name} reads {graph.tensors[t].name}, which is not present")
            lies_on[graph.tensors[t].storage] = self.instance[t]
        taken = self._take(over) if over >= 0 else -1
        surplus: list[int] = []
        for t in op.outputs:
            storage = graph.tensors[t].storage
            if storage not in lies_on:
                lies_on[storage] = self._new(graph.storages[storage], op.name, taken)
                taken = -1
                surplus.append(lies_on[storage])
                self.references[lies_on[storage]] += 1
            if t not in self.instance:
                self._hold(t, lies_on[storage])
        held = self.held + op.workspace_bytes
        if op.workspace_bytes:
            workspace = self._allocate(op.workspace_bytes, op.name)
            self.events.append(Event(workspace, 0, op.name))
        for instance in surplus:
            self._drop(instance)
        return held

    def free(self, tensor: int) -> None:
        """Give a tensor up."""
        if tensor not in self.instance:
            raise ScheduleError(f"{self.graph.tensors[tensor].name} is freed while it is not present")
        self._drop(self.instance.pop(tensor))

    def copy(self, step: Copy) -> None:
        """Begin or end a copy; the memory of what is fetched is held by the copy until it has ended."""
        t, name = step.tensor, self.graph.tensors[step.tensor].name
        if not step.to_device:
            if t not in self.instance:
                raise ScheduleError(f"{name} is copied to the host while it is not present")
            self.on_host.add(t)
        elif not step.ended:
            if t not in self.on_host or t in self.fetched:
                raise ScheduleError(f"{name} is fetched, and is not on the host, or on its way already")
            self.fetched[t] = self._new(self.graph.storages[self.graph.tensors[t].storage])
            self.references[self.fetched[t]] += 1
        else:
            if t not in self.fetched or t in self.instance:
                raise ScheduleError(f"a fetch of {name} ends that has not begun, or while it is present")
            self.instance[t] = self.fetched.pop(t)

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
