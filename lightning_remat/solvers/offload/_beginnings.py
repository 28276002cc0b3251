"""Schedules of the rewritten problem from those of the plain one."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.offload._rewriting import Rewritten


class Numbers:
    """The nodes and values of a rewritten problem by those of the plain one.

    Attributes:
        node: the node of each plain node.
        fetch: by plain node, the nodes that fetch what it makes.
        value: the value of each plain value.
        notes: values that are kept in any case.
        notes_only: nodes that make nothing but notes: they run once.
    """

    def __init__(self, rewritten: Rewritten, plain: Problem, problem: Problem) -> None:
        node_of = {op: node for node, op in enumerate(plain.ops)}
        self.node = [0] * len(plain)
        self.fetch: dict[int, list[int]] = {}
        for node, op in enumerate(problem.ops):
            if (t := rewritten.fetches[op]) >= 0:
                self.fetch.setdefault(node_of[rewritten.plain.producer[t]], []).append(node)
            else:
                self.node[node_of[rewritten.op[op]]] = node
        value_of = {storage: v for v, storage in enumerate(problem.storage)}
        self.value = [value_of[storage] for storage in plain.storage]
        known = len(rewritten.plain.storages)
        self.notes = frozenset(v for v, storage in enumerate(problem.storage) if storage >= known)
        self.notes_only = frozenset(
            node for node in self.fetch if self.notes.issuperset(problem.writes[self.node[node]])
        )


def fetched_instead(numbers: Numbers, problem: Problem, sequence: NodeSequence) -> NodeSequence:
    """A sequence of the plain problem with what may be fetched fetched, where it is computed again."""
    nodes: list[int] = []
    boundary = 0
    ran: set[int] = set()
    for position, node in enumerate(sequence.nodes):
        if position == sequence.boundary:
            boundary = len(nodes)
        if node not in ran or node not in numbers.notes_only:
            nodes.append(numbers.node[node])
        ran.add(node)
        nodes += numbers.fetch.get(node, ())
    if sequence.boundary == len(sequence.nodes):
        boundary = len(nodes)
    return drop_unused(problem, NodeSequence(tuple(nodes), boundary))


def values_of(numbers: Numbers, values: Iterable[int]) -> frozenset[int]:
    """Plain values as those of the rewritten problem, and all notes."""
    return frozenset(numbers.value[v] for v in values) | numbers.notes
