"""Checkpoints at the ends of segments: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

"chen_sqrt" (section 4.1) cuts the forward into about √n segments of about √n nodes. What crosses a segment's end is kept;
everything else is given up and computed again, a segment at a time, when the backward first needs a value of that segment. On
a chain of n unit layers the memory is of the order of √n and at most one extra forward is run. "chen_greedy" (section 4.3,
Algorithm 3) ends a segment where more than b bytes have been written in it, and searches b.

Chen et al. state it for a chain, where one value crosses each end. Here the nodes are taken in the captured order, a
topological one, as in Checkmate's "linearized √n" (Jain et al. 2020, Table 1), and *all* values that cross an end are kept
(Checkmate's variant keeps the single node at the end, which cannot restart a graph with skip connections from there).
The segments of "chen_sqrt" have equal numbers of nodes, not of bytes or seconds, and the budget is not used to choose them: it
either fits the budget or it does not. "chen_greedy" takes the fastest that fits over all b tried. Nothing here is optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._solution import Status


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


def greedy_ends(problem: PlainProblem, candidates: Sequence[int], b: float) -> list[int]:
    """Algorithm 3: the candidates at which more than ``b`` bytes were written since the one before, the last node left out.

    Args:
        problem: the problem.
        candidates: forward positions, in order.
        b: bytes.
    """
    ends: list[int] = []
    written, following = 0, 0
    for node in range(problem.boundary - 1):
        written += sum([problem.nbytes[v] for v in problem.writes[node]])
        if following < len(candidates) and candidates[following] == node:
            following += 1
            if written > b:
                ends.append(node)
                written = 0
    return ends


def greedy_segmentations(problem: PlainProblem, candidates: Sequence[int], sizes: int) -> Iterator[list[int]]:
    """What `greedy_ends` gives for ``sizes`` values of b from nothing to the whole forward, each result once."""
    total = sum([problem.nbytes[v] for node in range(problem.boundary) for v in problem.writes[node]])
    seen: set[tuple[int, ...]] = set()
    for i in range(sizes):
        b = total ** (i / max(1, sizes - 1)) - 1 if total else 0  # evenly spaced in the logarithm
        ends = greedy_ends(problem, candidates, b)
        if tuple(ends) not in seen:
            seen.add(tuple(ends))
            yield ends


def fastest_fitting(problem: Problem, budget_bytes: int, sequences: Iterable[NodeSequence], deadline: float) -> Answer:
    """The fastest of ``sequences`` within the budget; those not reached before the deadline are left out."""
    best: tuple[float, NodeSequence] | None = None
    tried, smallest, late = 0, -1, False
    for sequence in sequences:
        evaluation = problem.evaluate(sequence)
        smallest = evaluation.peak_bytes if not tried else min(smallest, evaluation.peak_bytes)
        tried += 1
        if evaluation.peak_bytes <= budget_bytes and (best is None or evaluation.seconds < best[0]):
            best = (evaluation.seconds, sequence)
        if late := time.monotonic() > deadline:
            break
    notes = (f"{tried} schedules tried, the smallest peaks at {smallest:,} bytes",)
    if best is not None:
        return Answer(best[1], Status.FEASIBLE, notes=notes)
    return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, notes=notes)


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


@register("chen_greedy")
def chen_greedy(problem: Problem, budget_bytes: int, *, deadline: float, sizes: int = 64) -> Answer:
    """Keep what crosses the ends of segments of about b bytes; the fastest that fits, over b.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        sizes: how many values of b are tried.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    segmentations = greedy_segmentations(problem, range(problem.boundary), sizes)
    sequences = (drop_unused(problem, rollout(problem, crossing(problem, ends))) for ends in segmentations)
    return fastest_fitting(problem, budget_bytes, sequences, deadline)
