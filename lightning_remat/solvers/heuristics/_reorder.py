"""The backward in another order, in which the memory that no choice of kept values can save peaks lower.

Whatever is kept of the forward, or computed again, the backward needs its own values: gradients that wait to be read,
and what an op takes while it runs. Where branches join, their order matters. A gradient of one branch waits while the
other runs, and the branch with the largest working set had better run while the least waits (Sethi and Ullman 1970, on
trees). The captured order is autograd's, which does not look at memory, and methods that keep to it cannot go below
what it takes.

`backward_memory` is the memory of a backward in which values of the forward are held only while they are read. At its
largest moments, in order, single nodes are moved: the node that runs there back to where its inputs are ready or less
waits, or the producer of a value that waits there forward to the first use of the value. A move that lowers a sum over
all moments, in which the largest count most, stays. Results do not change: each op reads what it read before. Random
ops, and those that may run only once, stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem

NEAR = 0.8
"""Moments at which less than this share of the largest memory is held are not looked at."""

SHARPNESS = 12
"""The power of the memory at each moment whose sum is lowered: so high that the largest moments count most."""

WAITING = 6
"""How many of the values that wait at a moment, the largest first, moves are made for."""

LEAST_GAIN = 1e-9
"""Share by which a move must lower this sum."""


class Reordered(PlainProblem):
    """A problem with its nodes in another order; values keep their numbers.

    Args:
        problem: the problem.
        order: its nodes, those of the forward first, each after those that it depends on.
    """

    def __init__(self, problem: PlainProblem, order: Sequence[int]) -> None:
        place = {node: position for position, node in enumerate(order)}
        self.plain, self.order = problem, tuple(order)
        super().__init__(
            reads=[problem.reads[node] for node in order],
            writes=[problem.writes[node] for node in order],
            seconds=[problem.seconds[node] for node in order],
            workspace=[problem.workspace[node] for node in order],
            is_backward=[problem.is_backward[node] for node in order],
            recomputable=[problem.recomputable[node] for node in order],
            random=[problem.random[node] for node in order],
            nbytes=problem.nbytes,
            producer=[place[made] if made >= 0 else -1 for made in problem.producer],
            tangents=problem.tangents,
            boundary=problem.boundary,
            forward_outputs=problem.forward_outputs,
            forward_transient=problem.forward_transient,
            finals=problem.finals,
            base_bytes=problem.base_bytes,
            forward_extra_bytes=problem.forward_extra_bytes,
            overwrites=[problem.overwrites[node] for node in order] if problem.overwrites else [],
        )

    def name(self, node: int) -> str:
        return self.plain.name(self.order[node])

    def value_name(self, value: int) -> str:
        return self.plain.value_name(value)

    def original(self, sequence: NodeSequence) -> NodeSequence:
        """The same sequence in the nodes of the problem that this one was made from."""
        return NodeSequence(tuple(self.order[node] for node in sequence.nodes), sequence.boundary)


def reorder(problem: PlainProblem, deadline: float) -> Reordered | None:
    """The problem with its backward in an order that takes less memory; ``None`` where none is found.

    Args:
        problem: the problem.
        deadline: `clock` at which to stop.
    """
    order = list(range(problem.boundary, len(problem)))
    memory = backward_memory(problem, order)
    largest = max(memory, default=0) or 1

    def weight(of: Sequence[int]) -> float:
        return sum([(nbytes / largest) ** SHARPNESS for nbytes in of])

    def better(least: float) -> tuple[list[int], list[int]] | None:
        for moment in sorted(range(len(memory)), key=lambda at: -memory[at]):
            if memory[moment] < NEAR * largest:
                break
            for other in _moves(problem, order, moment):
                there = backward_memory(problem, other)
                if weight(there) < least * (1 - LEAST_GAIN):
                    return other, there
                if clock() > deadline:
                    return None
        return None

    moved = False
    while clock() < deadline and (found := better(weight(memory))) is not None:
        order, memory = found
        moved = True
    return Reordered(problem, [*range(problem.boundary), *order]) if moved else None


def backward_memory(problem: PlainProblem, order: Sequence[int]) -> list[int]:
    """Bytes beside what is held all through the step while each node of an order of the backward runs.

    Values of the forward count while a node reads them, and at no other moment.
    """
    last = {v: position for position, node in enumerate(order) for v in problem.reads[node]}
    last |= dict.fromkeys(problem.finals, len(order))
    held = sum([problem.nbytes[v] for v in problem.tangents if v in last])
    found: list[int] = []
    for position, node in enumerate(order):
        own = [v for v in problem.reads[node] if 0 <= problem.producer[v] < problem.boundary]
        over = problem.overwrites[node] if problem.overwrites else ()
        dying = [v for v in over if v in own or last[v] == position]  # one of the forward may be, if computed again
        held += sum([problem.nbytes[v] for v in problem.writes[node]])
        extra = sum([problem.nbytes[v] for v in own]) - max([problem.nbytes[v] for v in dying], default=0)
        found.append(held + extra + problem.workspace[node])
        for v in {*problem.reads[node], *problem.writes[node]}.difference(own):
            if last.get(v, position) == position:
                held -= problem.nbytes[v]
    return found


def _moves(problem: PlainProblem, order: list[int], moment: int) -> Iterator[list[int]]:
    """Orders in which one node runs elsewhere: that of a moment earlier, or the producer of a waiting value later."""
    made: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(order):
        for v in problem.reads[node]:
            first.setdefault(v, position)
            last[v] = position
        made.update(dict.fromkeys(problem.writes[node], position))
    last |= dict.fromkeys(problem.finals, len(order))
    node = order[moment]
    idle = [v for v, at in made.items() if at < moment < last.get(v, at) and v not in problem.reads[node]]
    idle = sorted(idle, key=lambda v: -problem.nbytes[v])[:WAITING]
    if _is_movable(problem, node):
        ready = max([made[v] + 1 for v in problem.reads[node] if v in made], default=0)
        for to in dict.fromkeys([*(made[v] for v in idle if made[v] >= ready), ready]):
            if to < moment:
                yield [*order[:to], node, *order[to:moment], *order[moment + 1 :]]
    for v in idle:
        at, maker = made[v], problem.producer[v]
        end = min([first.get(w, len(order)) for w in problem.writes[maker]])
        if _is_movable(problem, maker) and end > moment:
            yield [*order[:at], *order[at + 1 : end], maker, *order[end:]]


def _is_movable(problem: PlainProblem, node: int) -> bool:
    return problem.recomputable[node] and not problem.random[node]
