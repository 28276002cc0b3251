"""Schedules of a rewritten problem from those of the plain one, or of one that is rewritten for fewer tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.offload._rewriting import Rewritten

Part = tuple[int, int]
"""An op of the plain graph and -1, or -1 and the tensor that is fetched: a node in whatever way the graph is rewritten."""


class Numbers:
    """The nodes and values of a rewritten problem by what they are in the plain one.

    Attributes:
        parts: of each node.
        node: of each part.
        fetches: by plain op, the nodes that fetch what it makes.
        value: the value of each plain value.
        notes: values that are kept in any case.
        notes_only: plain ops that make nothing but notes: they run once.
    """

    def __init__(self, rewritten: Rewritten, plain: Problem, problem: Problem) -> None:
        self.parts: list[Part] = [(rewritten.op[op], rewritten.fetches[op]) for op in problem.ops]
        self.node = {part: node for node, part in enumerate(self.parts)}
        self.fetches: dict[int, list[int]] = {}
        for node, (_, t) in enumerate(self.parts):
            if t >= 0:
                self.fetches.setdefault(rewritten.plain.producer[t], []).append(node)
        value_of = {storage: v for v, storage in enumerate(problem.storage)}
        self.value = [value_of[storage] for storage in plain.storage]
        known = len(rewritten.plain.storages)
        self.notes = frozenset(v for v, storage in enumerate(problem.storage) if storage >= known)
        self.notes_only = frozenset(
            op for op in self.fetches if self.notes.issuperset(problem.writes[self.node[op, -1]])
        )

    def values(self, values: Iterable[int]) -> frozenset[int]:
        """Plain values as those of this problem, and all notes."""
        return frozenset(self.value[v] for v in values) | self.notes


def fetched_instead(numbers: Numbers, problem: Problem, parts: Sequence[Part], boundary: int) -> NodeSequence:
    """A sequence with what may be fetched fetched, where it is computed again.

    Args:
        numbers: those of ``problem``.
        problem: a rewritten one.
        parts: what the sequence evaluates.
        boundary: how many of them in the forward.
    """
    nodes: list[int] = []
    crossing = 0
    ran: set[int] = set()
    for position, part in enumerate(parts):
        if position == boundary:
            crossing = len(nodes)
        op = part[0]
        if op not in ran or op not in numbers.notes_only:
            nodes.append(numbers.node[part])
        if op >= 0:
            ran.add(op)
            nodes += numbers.fetches.get(op, ())
    if boundary == len(parts):
        crossing = len(nodes)
    return drop_unused(problem, NodeSequence(tuple(nodes), crossing))


def gains(problem: PlainProblem, sequence: NodeSequence, values: Iterable[int]) -> dict[int, float]:
    """By value, seconds of the evaluations that a sequence could do without if that value were there once computed."""
    counted: dict[int, int] = {}
    for node in sequence.nodes:
        counted[node] = counted.get(node, 0) + 1
    found = {}
    for value in values:
        if counted.get(problem.producer[value], 0) > 1:
            found[value] = _gain(problem, sequence, value)
    return found


def _gain(problem: PlainProblem, sequence: NodeSequence, value: int) -> float:
    """As `drop_unused`, for evaluations of one value but the first."""
    reads, writes, outputs = problem.reads, problem.writes, frozenset(problem.forward_outputs)
    producer = problem.producer[value]
    first: dict[int, int] = {}
    for position, node in enumerate(sequence.nodes):
        first.setdefault(node, position)
    needed = bytearray(len(problem.nbytes))
    for v in problem.finals:
        needed[v] = 1
    saved = 0.0
    for position in range(len(sequence.nodes) - 1, -1, -1):
        if position == sequence.boundary - 1:
            for v in (*problem.forward_outputs, *problem.forward_transient):
                needed[v] = 1
        node = sequence.nodes[position]
        at_first = first[node] == position
        keep = at_first
        for v in writes[node] if not keep else ():
            if needed[v] and (v != value or node != producer) and (position < sequence.boundary or v not in outputs):
                keep = True
                break
        if not keep:
            saved += problem.seconds[node]
            continue
        for v in writes[node]:
            if v != value or at_first:
                needed[v] = 0
        for v in reads[node]:
            needed[v] = 1
    return saved
