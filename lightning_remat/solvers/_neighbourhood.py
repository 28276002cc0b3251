"""Give up what a schedule holds between two uses, and compute it again: the step of `_improve` and of `_descent`."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_remat.solvers._problem import NodeSequence, PlainProblem
from lightning_remat.solvers._prune import drop_unused

Gap = tuple[int, int, int]
"""A value, the position of one use or of its making, and that of the next use."""

LONGEST = 6
"""Evaluations a node after which a schedule is not looked at."""


def gaps(problem: PlainProblem, sequence: NodeSequence) -> list[Gap]:
    """Where values of the forward are held that could be given up and computed again."""
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

    What is computed again reads what the sequence holds at that moment, and beyond that is computed again itself, for this
    one use. ``None`` where a value would have to be that may not be.
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
        again: list[int] = []  # values that are here for this node only
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
