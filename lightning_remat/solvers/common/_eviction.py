"""A schedule's peak lowered moment by moment: idle values are given up, and computed again for their next use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import LONGEST
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused

Gap = tuple[int, int, int]
"""A value, the position of one use or of its making, and that of the next use."""

SINGLE = 60
"""How many values, the largest first, are tried one by one at one moment."""


def gaps(problem: PlainProblem, sequence: NodeSequence) -> list[Gap]:
    """Stretches of two evaluations or more in which a forward value that may run again is only held for a later use."""
    may = [
        0 <= made < problem.boundary and problem.recomputable[made] and problem.nbytes[v] > 0
        for v, made in enumerate(problem.producer)
    ]
    for v in problem.forward_outputs:
        may[v] = False
    last: dict[int, int] = {}
    found: list[Gap] = []
    for position, node in enumerate(sequence.nodes):
        for v in problem.reads[node]:
            if may[v]:
                if position > last[v] + 2:
                    found.append((v, last[v], position))
                last[v] = position
        for v in problem.writes[node]:
            last[v] = position
    return found


def evict(problem: PlainProblem, sequence: NodeSequence, given_up: Iterable[Gap]) -> NodeSequence | None:
    """The sequence with values given up in some of its `gaps`, and computed again just in time for the next use.

    What is computed again reads what the sequence holds at that moment; what is missing there is computed again too,
    for this one use. ``None`` where a node would have to run again that may not, or the sequence would grow beyond
    `LONGEST`.
    """
    reads, writes, producer = problem.reads, problem.writes, problem.producer
    frees = problem.last_uses(sequence)
    given: dict[int, list[int]] = {}
    for v, position, _ in given_up:
        given.setdefault(position, []).append(v)
    held = bytearray(len(problem.nbytes))
    for v in problem.tangents:
        held[v] = 1
    nodes: list[int] = []
    boundary = -1
    for position, node in enumerate(sequence.nodes):
        if position == sequence.boundary:
            boundary = len(nodes)
        again: list[int] = []  # values that are computed again for this node only
        stack = [node]
        while stack:
            now = stack[-1]
            missing = [producer[v] for v in reads[now] if not held[v]]
            if missing:
                if not all([problem.recomputable[made] for made in missing]):
                    return None
                stack.extend(missing)
                continue
            stack.pop()
            if now == node:
                break
            if all([held[v] for v in writes[now]]):
                continue  # two readers asked for it
            nodes.append(now)
            for v in writes[now]:
                held[v] = 1
                again.append(v)
        nodes.append(node)
        if len(nodes) > LONGEST * len(problem):
            return None
        wanted = set(reads[node])
        for v in again:
            if v not in wanted:
                held[v] = 0
        for v in writes[node]:
            held[v] = 1
        for v in (*frees[position + 1], *given.get(position, ())):
            held[v] = 0
    if boundary < 0:
        boundary = len(nodes)
    return drop_unused(problem, NodeSequence(tuple(nodes), boundary))


def lower_peak(problem: PlainProblem, sequence: NodeSequence, target_bytes: int, deadline: float) -> NodeSequence:
    """The sequence with its peak lowered step by step, to ``target_bytes`` or as far as single steps go.

    A step gives up what is idle at the first moment of the peak (`evict`): all of it, or else the largest value whose
    loss lowers the peak or makes it occur less often. It evaluates up to `SINGLE` + 1 sequences.

    Args:
        problem: the problem.
        sequence: the sequence to begin with.
        target_bytes: the peak at which to stop.
        deadline: `clock` at which to stop.
    """

    def profile(of: NodeSequence) -> tuple[tuple[int, int], list[int]]:
        memory = problem.memory(of)
        peak = max(memory, default=0)
        return (peak, memory.count(peak)), memory

    height, memory = profile(sequence)
    while height[0] > target_bytes and clock() < deadline:
        moment = memory.index(height[0])
        node = sequence.nodes[moment]
        busy = {*problem.reads[node], *problem.writes[node]}
        idle = [gap for gap in gaps(problem, sequence) if gap[1] < moment < gap[2] and gap[0] not in busy]
        idle.sort(key=lambda gap: -problem.nbytes[gap[0]])
        for given_up in (idle, *([gap] for gap in idle[:SINGLE])):
            other = evict(problem, sequence, given_up) if given_up else None
            if other is not None:
                lower, there = profile(other)
                if lower < height:
                    sequence, height, memory = other, lower, there
                    break
        else:
            break
    return sequence


def lower_all(
    problem: PlainProblem, sequences: Sequence[NodeSequence], budget_bytes: int, deadline: float, enough: int = 4
) -> list[NodeSequence]:
    """Those of some sequences that `lower_peak` brings within a budget, the cheapest first, at most ``enough``."""
    found: list[NodeSequence] = []
    distinct = {sequence.nodes: sequence for sequence in sequences}
    ranked = sorted(distinct.values(), key=lambda sequence: problem.evaluate(sequence).seconds)
    for index, sequence in enumerate(ranked):
        left = deadline - clock()
        if len(found) >= enough or left <= 0:
            break
        until = clock() + 2 * left / (len(ranked) - index + 1)
        lowered = lower_peak(problem, sequence, budget_bytes, until)
        if problem.evaluate(lowered).peak_bytes <= budget_bytes:
            found.append(lowered)
    return found
