"""The problem as the solvers see it: views contracted away, storages instead of tensors, and schedules as plain sequences.

A **node** is an op that allocates or computes something; views are evaluated again wherever they are used, at no cost.
A **value** is a storage that some node writes (or a tangent that the caller hands in). A schedule is then just a sequence
of nodes: with the sequence fixed, freeing every value after its last use before it is computed again is optimal
(Kumar et al. 2019, section 2.1, ``prev`` and ``U_i``), so `Problem.evaluate` and `Problem.expand` derive the frees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lightning_remat.errors import GraphError
from lightning_remat.graph import ComputationGraph, Phase, TensorRole
from lightning_remat.schedule import Compute, Free, Schedule, Step


@dataclasses.dataclass(frozen=True)
class NodeSequence:
    """Nodes in the order in which they are evaluated, the first ``boundary`` of them in the forward."""

    nodes: tuple[int, ...]
    boundary: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Peak in bytes, time in seconds, and the first position in the sequence with that peak (-1: no node runs)."""

    peak_bytes: int
    seconds: float
    peak_position: int


@dataclasses.dataclass(eq=False, repr=False)
class PlainProblem:
    """Nodes and values as plain data: all that a solver needs, with no graph behind it (a coarser problem has none).

    Attributes:
        reads: value indices that each node reads (what the caller holds all through the step is left out).
        writes: value indices that each node allocates.
        seconds: time of one evaluation of each node.
        workspace: bytes that each node holds while it runs, beside its reads and writes.
        is_backward: whether each node belongs to the backward.
        recomputable: whether each node may be evaluated more than once.
        random: whether each node draws random numbers.
        nbytes: bytes of each value.
        producer: node that writes each value; -1 for tangents.
        tangents: values that the caller hands in when the backward begins.
        consumers: nodes that read each value, in order.
        boundary: number of forward nodes; in the captured order they come first.
        forward_outputs: values the caller keeps from the boundary on.
        forward_transient: values that must exist at the boundary only.
        finals: values that must exist at the end (gradients).
        base_bytes: bytes held all through the step.
        forward_extra_bytes: bytes held until the boundary, beside ``base_bytes``.
        overwrites: values whose memory the first result of each node may take if they die there (an empty list: of
            none).
    """

    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    seconds: list[float]
    workspace: list[int]
    is_backward: list[bool]
    recomputable: list[bool]
    random: list[bool]
    nbytes: list[int]
    producer: list[int]
    tangents: list[int]
    boundary: int
    forward_outputs: tuple[int, ...]
    forward_transient: tuple[int, ...]
    finals: tuple[int, ...]
    base_bytes: int
    forward_extra_bytes: int
    overwrites: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.reads)

    @cached_property
    def consumers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.nbytes]
        for node, values in enumerate(self.reads):
            for v in values:
                found[v].append(node)
        return found

    @cached_property
    def predecessors(self) -> list[tuple[int, ...]]:
        """Producing nodes of each node's reads."""
        return [
            tuple(dict.fromkeys(self.producer[v] for v in values if self.producer[v] >= 0)) for values in self.reads
        ]

    @cached_property
    def once_only(self) -> list[bool]:
        """Whether the first evaluation of each node may have an effect: it draws random numbers, or may run only once."""
        return [drawn or not again for drawn, again in zip(self.random, self.recomputable, strict=True)]

    def name(self, node: int) -> str:
        return f"node {node}"

    def value_name(self, value: int) -> str:
        return f"value {value}"

    @cached_property
    def captured(self) -> NodeSequence:
        """Every node once, in the captured order: no rematerialization."""
        return NodeSequence(tuple(range(len(self))), self.boundary)

    # -- what a sequence costs ----------------------------------------------------------------------------------------

    def last_uses(self, sequence: NodeSequence) -> list[list[int]]:
        """Values freed after each position of ``sequence`` (one list a position, and one for the moment before all).

        Entry ``i + 1`` belongs to position ``i``. Values that the caller holds or that must exist at the end are
        absent, but for surplus copies that are made while the caller holds one. Linear in the reads and writes of the
        sequence.

        Raises:
            GraphError: when a value is read, handed out, or needed at the end, and was never computed before.
        """
        count = len(sequence.nodes)
        frees: list[list[int]] = [[] for _ in range(count + 1)]
        last = [-1] * len(self.nbytes)  # position of the last use of the present copy; -1: none was made
        forever = count + 1
        reads, writes = self.reads, self.writes
        for position, node in enumerate(sequence.nodes):
            if position == sequence.boundary:
                self._cross(last, position, forever)
            for v in reads[node]:
                use = last[v]
                if use < 0:
                    raise GraphError(f"{self.name(node)} reads {self.value_name(v)} before it is computed")
                if use != forever:
                    last[v] = position
            for v in writes[node]:
                use = last[v]
                if use == forever:  # the caller holds the copy that exists: the new one is surplus
                    frees[position + 1].append(v)
                    continue
                if use >= 0:
                    frees[use + 1].append(v)
                last[v] = position
        if sequence.boundary == count:
            self._cross(last, count, forever)
        for v in self.finals:
            if last[v] < 0:
                raise GraphError(f"{self.value_name(v)} must exist at the end and is never computed")
            last[v] = forever
        for v, use in enumerate(last):
            if 0 <= use < count:
                frees[use + 1].append(v)
        return frees

    def _cross(self, last: list[int], position: int, forever: int) -> None:
        for v in self.forward_transient:
            if last[v] < 0:
                raise GraphError(f"{self.value_name(v)} must exist when the forward ends and is never computed")
            last[v] = max(last[v], position - 1)
        for v in self.forward_outputs:
            if last[v] < 0:
                raise GraphError(f"{self.value_name(v)} must exist when the forward ends and is never computed")
            last[v] = forever
        for v in self.tangents:
            last[v] = max(position - 1, 0)  # a tangent that nobody reads is freed at once

    def taken(self, sequence: NodeSequence, frees: list[list[int]]) -> dict[int, int]:
        """By position, the value whose memory the result there takes: it dies there, and was made on the same side.

        Args:
            sequence: the sequence.
            frees: its `last_uses`.
        """
        found: dict[int, int] = {}
        overwrites, writes, boundary = self.overwrites, self.writes, sequence.boundary
        if not any(overwrites):
            return found
        made = [-1] * len(self.nbytes)
        for position, node in enumerate(sequence.nodes):
            if overwrites[node]:
                since = boundary if position >= boundary else 0
                for v in overwrites[node]:
                    if made[v] >= since and v in frees[position + 1]:
                        if position + 1 == boundary and v in self.forward_transient:
                            continue  # it is needed at the crossing itself
                        found[position] = v
                        break
            for v in writes[node]:
                made[v] = position
        return found

    def evaluate(self, sequence: NodeSequence) -> Evaluation:
        """Peak and time of ``sequence`` with every value freed after its last use.

        Raises:
            GraphError: as `last_uses`.
        """
        memory = self.memory(sequence)
        peak = max(memory, default=max(self.at_start_bytes, self.base_bytes + self.tangent_bytes))
        seconds = self.seconds
        return Evaluation(peak, sum([seconds[n] for n in sequence.nodes]), memory.index(peak) if memory else -1)

    @property
    def at_start_bytes(self) -> int:
        """Bytes held before anything has run."""
        return self.base_bytes + self.forward_extra_bytes

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the tangents, which the caller hands in when the backward begins."""
        return sum([self.nbytes[v] for v in self.tangents])

    def memory(
        self, sequence: NodeSequence, frees: list[list[int]] | None = None, taken: dict[int, int] | None = None
    ) -> list[int]:
        """Bytes held while the node at each position runs; `last_uses` and `taken` are computed unless they are given.

        A forward or a backward of views alone has no position: what is held there counts at the position next to it.
        """
        frees = self.last_uses(sequence) if frees is None else frees
        taken = self.taken(sequence, frees) if taken is None else taken
        nbytes, writes, workspace = self.nbytes, self.writes, self.workspace
        held = self.at_start_bytes
        profile: list[int] = []
        for position, node in enumerate(sequence.nodes):
            if position == sequence.boundary:
                held += self.tangent_bytes - self.forward_extra_bytes
            for v in writes[node]:
                held += nbytes[v]
            now = held + workspace[node]
            profile.append(now - nbytes[taken[position]] if position in taken else now)
            for v in frees[position + 1]:
                held -= nbytes[v]
        if profile and sequence.boundary == 0:
            profile[0] = max(profile[0], self.at_start_bytes)
        if profile and sequence.boundary == len(profile):
            profile[-1] = max(profile[-1], held + self.tangent_bytes - self.forward_extra_bytes)
        return profile


class Problem(PlainProblem):
    """A computation graph with its views contracted: the problem that `solve` hands to a method.

    Attributes:
        graph: the graph.
        ops: op index of each node; nodes keep the captured order.
        storage: storage index of each value.

    Raises:
        GraphError: on construction, when a forward output is produced in the backward.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        vars(self).update(graph.derived(_contracted))
        self.graph = graph
        self.base_bytes = graph.input_bytes + graph.resident_bytes
        self.forward_extra_bytes = graph.forward_resident_bytes

    def _contract(self, graph: ComputationGraph) -> None:
        """Find all that goes by the ops, tensors and storages of the graph."""
        held, lies_on, is_view = graph.input_storages, [tensor.storage for tensor in graph.tensors], graph.is_view
        value_of: dict[int, int] = {}  # storage -> value
        self.nbytes: list[int] = []
        self.producer: list[int] = []
        self.storage: list[int] = []

        def value(storage: int, producer: int) -> int:
            value_of[storage] = len(self.nbytes)
            self.nbytes.append(graph.storages[storage])
            self.producer.append(producer)
            self.storage.append(storage)
            return value_of[storage]

        self.tangents: list[int] = []
        for t in graph.inputs:
            tensor = graph.tensors[t]
            if tensor.role is TensorRole.TANGENT and tensor.storage not in value_of:
                self.tangents.append(value(tensor.storage, -1))
        self.ops: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        for index, op in enumerate(graph.ops):
            if is_view[index]:
                continue
            node = len(self.ops)
            self.ops.append(index)
            read = [value_of[s] for t in op.inputs if (s := lies_on[t]) not in held]
            self.reads.append(tuple(dict.fromkeys(read)))
            fresh = dict.fromkeys([lies_on[t] for t in op.outputs])
            self.writes.append(tuple([value(s, node) for s in fresh if s not in value_of and s not in held]))
        ops = [graph.ops[i] for i in self.ops]
        self.overwrites: list[tuple[int, ...]] = [
            tuple([value_of[s] for t in op.overwritable if (s := lies_on[t]) not in held]) for op in ops
        ]
        self.seconds = [op.seconds for op in ops]
        self.workspace = [op.workspace_bytes for op in ops]
        self.random = [op.random for op in ops]
        self.recomputable = [op.recomputable and not op.mutates for op in ops]
        self.is_backward = [op.phase is Phase.BACKWARD for op in ops]
        self.boundary = self.is_backward.count(False)
        self._pin_mutated(graph)

        def values_of(tensors: Sequence[int]) -> tuple[int, ...]:
            return tuple(
                dict.fromkeys(
                    value_of[graph.tensors[t].storage] for t in tensors if graph.tensors[t].storage not in held
                )
            )

        self.forward_outputs = values_of(graph.forward_outputs)
        self.forward_transient = values_of(graph.forward_transient)
        self.finals = values_of(graph.backward_outputs)
        for v in (*self.forward_outputs, *self.forward_transient):
            if self.producer[v] >= self.boundary or self.producer[v] < 0:
                name = next(t.name for t in graph.tensors if t.storage == self.storage[v])
                raise GraphError(f"forward output {name} is produced in the backward")
        self._pin_effects(graph)

    def _pin_effects(self, graph: ComputationGraph) -> None:
        """Ops of which nothing is wanted but what they make of an input (a batch norm that nobody reads) run once."""
        handed_out = (*graph.forward_outputs, *graph.forward_transient, *graph.backward_outputs)
        changed = {graph.tensors[t].storage for t in handed_out} & graph.input_storages
        wanted = {
            *self.forward_outputs,
            *self.forward_transient,
            *self.finals,
            *(v for read in self.reads for v in read),
        }
        for node, index in enumerate(self.ops):
            made = {graph.tensors[t].storage for t in graph.ops[index].outputs}
            if made & changed and wanted.isdisjoint(self.writes[node]):
                self.recomputable[node] = False

    def _pin_mutated(self, graph: ComputationGraph) -> None:
        """Ops that touch a storage that is overwritten in place run once: the value before is gone afterwards."""
        mutated = {graph.tensors[t].storage for op in graph.ops for t in op.mutates}
        if mutated:
            for node, index in enumerate(self.ops):
                touched = {graph.tensors[t].storage for t in (*graph.ops[index].inputs, *graph.ops[index].outputs)}
                if touched & mutated:
                    self.recomputable[node] = False

    def name(self, node: int) -> str:
        return self.graph.ops[self.ops[node]].name

    def module(self, node: int) -> str:
        return self.graph.ops[self.ops[node]].module

    def value_name(self, value: int) -> str:
        return next(t.name for t in self.graph.tensors if t.storage == self.storage[value])

    # -- back to ops and tensors --------------------------------------------------------------------------------------

    @cached_property
    def _base_tensors(self) -> list[list[int]]:
        """Tensors that the producer of each value writes on it."""
        value_at = {storage: v for v, storage in enumerate(self.storage)}
        found: list[list[int]] = [[] for _ in self.nbytes]
        for v in self.tangents:
            found[v] = [t for t in self.graph.inputs if self.graph.tensors[t].storage == self.storage[v]]
        for index in self.ops:
            for t in self.graph.ops[index].outputs:
                value = value_at.get(self.graph.tensors[t].storage)
                if value is not None:
                    found[value].append(t)
        return found

    @cached_property
    def _tensors_on(self) -> list[list[int]]:
        """Tensors of each storage."""
        found: list[list[int]] = [[] for _ in self.graph.storages]
        for t, tensor in enumerate(self.graph.tensors):
            found[tensor.storage].append(t)
        return found

    def contract(self, schedule: Schedule) -> NodeSequence:
        """The nodes that a schedule of the graph evaluates: the inverse of `expand`."""
        node_of = {index: node for node, index in enumerate(self.ops)}
        ran = [
            (position, node_of[step.op])
            for position, step in enumerate(schedule.steps)
            if isinstance(step, Compute) and step.op in node_of
        ]
        return NodeSequence(tuple(node for _, node in ran), sum([at < schedule.boundary for at, _ in ran]))

    def expand(self, sequence: NodeSequence) -> Schedule:
        """The schedule over ops and tensors: views where they are used, frees as early as they can be.

        Raises:
            GraphError: when the sequence reads what is not there.
        """
        graph = self.graph
        frees = self.last_uses(sequence)
        taken = self.taken(sequence, frees)
        steps: list[Step] = []
        present: set[int] = {t for t in graph.inputs if graph.tensors[t].role is not TensorRole.TANGENT}
        kept_by_caller = set(self.forward_outputs)
        at_boundary = {*self.forward_transient, *self.tangents}

        def show(t: int) -> list[int]:
            """Evaluate the views that lead to ``t``; returns the tensors that became present."""
            if t in present:
                return []
            op = graph.producer[t]
            if op < 0 or not graph.is_view[op]:
                raise GraphError(f"{graph.tensors[t].name} is needed and not present: the sequence is wrong")
            made = [m for source in graph.ops[op].inputs for m in show(source)]
            steps.append(Compute(op))
            fresh = [o for o in graph.ops[op].outputs if o not in present]
            present.update(fresh)
            return made + fresh

        def give_up(tensors: Sequence[int]) -> None:
            for t in tensors:
                if t in present:
                    present.discard(t)
                    steps.append(Free(t))

        def give_up_values(values: Sequence[int]) -> None:
            for v in values:
                give_up(self._base_tensors[v])

        def cross() -> int:
            made = [m for t in (*graph.forward_outputs, *graph.forward_transient) for m in show(t)]
            crossing = len(steps)
            present.update(t for v in self.tangents for t in self._base_tensors[v])
            give_up(made)
            give_up_values([v for v in frees[sequence.boundary] if v in at_boundary])
            return crossing

        boundary = -1
        for position, node in enumerate(sequence.nodes):
            if position == sequence.boundary:
                boundary = cross()
            op = graph.ops[self.ops[node]]
            made = [m for t in op.inputs for m in show(t)]
            over = -1
            if position in taken:
                storage = self.storage[taken[position]]
                over = next(t for t in op.overwritable if graph.tensors[t].storage == storage)
                present -= {t for t in self._tensors_on[storage] if t in present}
            steps.append(Compute(self.ops[node], over))
            present.update(op.outputs)
            give_up(made)
            gone = frees[position + 1]
            if position + 1 == sequence.boundary:  # needed at the boundary itself
                gone = [v for v in gone if v not in at_boundary]
            elif position >= sequence.boundary:  # a surplus copy of what the caller holds gives itself up
                gone = [v for v in gone if v not in kept_by_caller]
            give_up_values(gone)
        if boundary < 0:
            boundary = cross()
        for t in graph.backward_outputs:
            show(t)
        ends = {*graph.backward_outputs, *graph.inputs}
        give_up([t for t in sorted(present) if t not in ends])
        return Schedule(tuple(steps), boundary)


def _contracted(graph: ComputationGraph) -> dict[str, Any]:
    """The attributes of a graph's problem that do not go by what lies beside its ops; nothing changes them later."""
    made = object.__new__(Problem)
    made._contract(graph)
    return vars(made)
