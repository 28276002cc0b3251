"""Segments of the forward, and the values that cross from one to the next (Chen et al. 2016, section 4).

Chen et al. state them for a chain, where one value crosses the end of a segment. Here the nodes are taken in the
captured order, and all values that a later forward node reads cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._registry import Answer
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
    """Segment ends by Algorithm 3 of Chen et al.: candidates with over ``b`` bytes written since the end before.

    The last forward node never is one.

    Args:
        problem: the problem.
        candidates: forward positions, in order.
        b: bytes of a segment, about.
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
        if late := clock() > deadline:
            break
    notes = (f"{tried} schedules tried, the smallest peaks at {smallest:,} bytes",)
    if best is not None:
        return Answer(best[1], Status.FEASIBLE, notes=notes)
    return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, notes=notes)


def crossing_values(problem: PlainProblem) -> list[list[int]]:
    """For each forward position, the values written up to it that a later forward node reads or the caller is handed.

    That is what the forward must hold in any case after that node has run: block boundaries are where it is small.
    """
    boundary = problem.boundary
    last_read = [-1] * len(problem.nbytes)
    for node in range(boundary):
        for v in problem.reads[node]:
            last_read[v] = node
    for v in problem.forward_outputs:
        last_read[v] = boundary
    alive: dict[int, None] = {}
    result = []
    for node in range(boundary):
        for v in problem.writes[node]:
            alive[v] = None
        for v in [v for v in alive if last_read[v] <= node]:
            del alive[v]
        result.append(list(alive))
    return result
