"""Checkpoints every square root of n: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1.

The forward is cut into about √n segments of about √n nodes. What crosses a segment's end is kept; everything else is given
up and computed again, a segment at a time, when the backward first needs a value of that segment. On a chain of n unit
layers the memory is of the order of √n and at most one extra forward is run.

Chen et al. state it for a chain, where one value crosses each end. Here the nodes are taken in the captured order, a
topological one, as in Checkmate's "linearized √n" (Jain et al. 2020, Table 1), and *all* values that cross an end are kept
(Checkmate's variant keeps the single node at the end, which cannot restart a graph with skip connections from there).
Segments have equal numbers of nodes, not of bytes or seconds, and the budget is not used to choose them: nothing here is
optimal. The method either fits the budget or it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_remat.solvers._problem import PlainProblem, Problem
from lightning_remat.solvers._prune import drop_unused, once
from lightning_remat.solvers._registry import Answer, register
from lightning_remat.solvers._rollout import rollout
from lightning_remat.solvers._solution import Status


def crossing(problem: PlainProblem, ends: Iterable[int]) -> frozenset[int]:
    """Values written at or before one of the forward positions ``ends`` and read by a later forward node."""
    last_read = [-1] * len(problem.nbytes)
    for node in range(problem.boundary):
        for v in problem.reads[node]:
            last_read[v] = node
    found: set[int] = set()
    for end in ends:
        found.update(v for v, writer in enumerate(problem.producer) if 0 <= writer <= end < last_read[v])
    return frozenset(found)


def segment_ends(count: int, segments: int) -> list[int]:
    """Last position of each of ``segments`` near-equal runs of ``count`` positions, the last run's left out."""
    return sorted({round(count * i / segments) - 1 for i in range(1, segments)} - {-1, count - 1})


@register("chen_sqrt")
def chen_sqrt(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
    """Keep what crosses the ends of √n segments of the forward.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: not used, this is one pass.
    """
    del deadline
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    ends = segment_ends(problem.boundary, max(1, math.isqrt(problem.boundary)))
    sequence = drop_unused(problem, rollout(problem, crossing(problem, ends)))
    peak = problem.evaluate(sequence).peak_bytes
    if peak > budget_bytes:
        return Answer(None, Status.INFEASIBLE, notes=(f"{len(ends) + 1} segments peak at {peak:,} bytes",))
    return Answer(sequence, Status.FEASIBLE, notes=(f"{len(ends) + 1} segments of the forward",))
