"""The smallest peak: descents as far as they go, from schedules of several methods, in two orders of the backward.

On networks descents often end at the largest working set of a single op, below which no schedule exists, or at what the
backward's own values take in the order that `reorder` finds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import finish, required
from lightning_remat.solvers.common._registry import Answer, solution_of
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.common._working_set import largest_bytes
from lightning_remat.solvers.heuristics._descent import beginnings
from lightning_remat.solvers.heuristics._greedy import smallest
from lightning_remat.solvers.heuristics._large_neighbourhood_search import improve
from lightning_remat.solvers.heuristics._reorder import Reordered, backward_memory, reorder
from lightning_remat.solvers.hiremate._rotor import around, chains

NEARLY = 0.005
"""Share of the smallest peak by which a cheaper schedule's may be above it, unless no smaller peak is possible."""

WORTH = 40.0
"""How many times as much a share of the smallest peak counts in that choice as the same share of the step's time."""

BLOCKWISE = 0.6
"""Share of the time that is left for schedules of chains of blocks."""

SMALL = 200
"""Nodes up to which the schedule of "greedy" is lowered first of all."""

SLOTS = 400
"""Steps in which the recurrence of "rotor" counts memory."""


def find_smallest_sequence(problem: PlainProblem, deadline: float) -> NodeSequence:
    """A sequence of the smallest peak found, or a cheaper one of nearly that peak, after `keep_longer` within it."""
    span = max(0.0, deadline - clock())
    first, sequence = smallest(problem, clock() + span / 4)
    found = [(first.peak_bytes, first.seconds, sequence)]
    other = reorder(problem, clock() + span / 10)
    order = other.order[problem.boundary :] if other else range(problem.boundary, len(problem))
    backward = max(backward_memory(problem, order), default=0)
    handed_out = sum([problem.nbytes[v] for v in problem.forward_outputs])
    least = max(largest_bytes(problem)[0], problem.base_bytes + handed_out + backward)  # no less in these orders

    lowered_from: set[tuple[bool, NodeSequence]] = set()

    def lower(one: PlainProblem, start: NodeSequence, until: float) -> None:
        if (one is problem, start) in lowered_from:
            return
        lowered_from.add((one is problem, start))
        lowered = lower_peak(one, start, least, until)
        original = one.original(lowered) if isinstance(one, Reordered) else lowered
        evaluation = problem.evaluate(original)
        found.append((evaluation.peak_bytes, evaluation.seconds, original))

    def lowest() -> int:
        return min([peak for peak, _, _ in found])

    if len(problem) <= SMALL:  # a moment, and all that a short time allows
        lower(problem, sequence, deadline)
    orders = [one for one in (other, problem) if one is not None]
    until = clock() + BLOCKWISE * (deadline - clock())
    for one in orders:
        for start in blockwise(one, lowest(), least, until):
            if clock() < until:
                lower(one, start, until)
    others = ((one, start) for one in orders for start in beginnings(one, deadline))
    for one, begin in itertools.chain([] if len(problem) <= SMALL else [(problem, sequence)], others):
        if clock() > deadline or lowest() <= least:
            break
        lower(one, begin, deadline)
    peak = limit = lowest()
    if peak > least:
        step = sum([problem.seconds[node] for node in required(problem)])
        near = [one for one in found if one[0] <= (1 + NEARLY) * peak]
        limit = min(near, key=lambda one: one[1] + WORTH * (one[0] / peak - 1) * step)[0]
    fits = list(dict.fromkeys(one for held, _, one in found if held <= limit))
    filled = finish(problem, fits, limit, max(deadline, clock() + 0.5))
    assert filled is not None
    return filled


def blockwise(problem: PlainProblem, known_bytes: int, least_bytes: int, deadline: float) -> Iterator[NodeSequence]:
    """Schedules of chains of blocks near a budget halfway between two, or near the larger; the smallest peaks first."""
    for chain in chains(problem, deadline) if problem.boundary else ():
        budget = (known_bytes + least_bytes) // 2
        near = around(chain, budget, SLOTS, deadline) or around(chain, known_bytes, SLOTS, deadline)
        for _, sequence in sorted(near, key=lambda one: one[0]):
            yield sequence


def improving_seconds(problem: Problem) -> float:
    """Seconds that improving gets on a graph of this size: two, and one more for each 400 nodes."""
    return 2.0 + len(problem) / 400


def find_smallest(graph: ComputationGraph, time_limit: float = 30.0, *, work_limit: float | None = None) -> Solution:
    """The schedule of the smallest peak that is found, improved at that peak: what ``budget="min"`` means.

    The solution always has a schedule.

    Args:
        graph: the problem.
        time_limit: seconds it may take.
        work_limit: seconds of counted work, beside it (see `solve`).

    Returns:
        A `Solution` whose ``peak_bytes`` is the smallest feasible budget found. Its notes name the op whose own working set
        no schedule can go below.

    Raises:
        BudgetError: for a limit that is not positive.
        GraphError: for a graph whose forward outputs are produced in the backward.
    """
    started = time.monotonic()
    with _clock.limited(time_limit, work_limit) as deadline:
        problem = Problem(graph)
        sequence = find_smallest_sequence(problem, deadline)
        peak = problem.evaluate(sequence).peak_bytes
        sequence, _ = improve(problem, sequence, peak, min(deadline, clock() + improving_seconds(problem)))
    notes: tuple[str, ...] = ("the smallest peak found; a smaller one may exist",)
    floor, worst = largest_bytes(problem)
    if worst is not None:
        reached = problem.evaluate(sequence).peak_bytes <= floor
        first = f"no schedule needs less than the {floor:,} bytes of {problem.name(worst)} alone"
        notes = (first,) if reached else (first, *notes)
    return solution_of(
        graph, problem, Answer(sequence, Status.FEASIBLE, notes=notes), math.inf, "smallest", {}, started
    )
