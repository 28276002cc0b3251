"""Checkpoints at the ends of segments: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

Both keep what crosses a segment's end; everything else is given up and computed again, a segment at a time, when the
backward first needs a value of that segment (section 4.1). "chen_sqrt" (section 4.3, eq. 1) cuts the forward into about
√n segments of about √n nodes. On a chain of n unit layers the memory is of the order of √n and at most one extra
forward is run. "chen_greedy" (section 4.3, Algorithm 3) ends a segment where more than b bytes have been written in it,
and searches b.

Chen et al. state it for a chain, where one value crosses each end. Here the nodes are taken in the captured order, a
topological one, as in Checkmate's "linearized √n" (Jain et al. 2020, Table 1), and *all* values that cross an end are
kept (Checkmate's variant keeps the single node at the end, from which alone a graph with skip connections cannot be
restarted). The segments of "chen_sqrt" have equal numbers of nodes, not of bytes or seconds, and the budget is not used
to choose them: its one schedule fits the budget or does not. "chen_greedy" takes the fastest that fits over all b
tried. Nothing here is optimal.
"""

from __future__ import annotations

import math

from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._segments import crossing, fastest_fitting, greedy_segmentations, segment_ends
from lightning_remat.solvers.common._solution import Status


@register("chen_sqrt")
def chen_sqrt(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
    """Keep what crosses the ends of √n segments of the forward (section 4.3, eq. 1).

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


@register("chen_greedy")
def chen_greedy(problem: Problem, budget_bytes: int, *, deadline: float, sizes: int = 64) -> Answer:
    """Keep what crosses the ends of segments of about b bytes; the fastest that fits, over b (Algorithm 3).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        sizes: how many values of b are tried.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    segmentations = greedy_segmentations(problem, range(problem.boundary), sizes)
    sequences = (drop_unused(problem, rollout(problem, crossing(problem, ends))) for ends in segmentations)
    return fastest_fitting(problem, budget_bytes, sequences, deadline)
