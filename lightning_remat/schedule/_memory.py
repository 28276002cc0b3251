"""What is held while a schedule runs: present tensors, the storages they lie on, and what an allocator was asked for."""

from __future__ import annotations

from typing import NamedTuple

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule._schedule import Copy


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


class Memory:
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
