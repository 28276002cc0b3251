"""`find_smallest`: the smallest peak that is found, with host memory as a third choice where that is asked for."""

from __future__ import annotations

import dataclasses
import time

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.offload._rewriting import host_of
from lightning_remat.solvers.offload._search import Search, Trial
from lightning_remat.solvers.offload._solve import WITH_HOST, check_choice, lower_bound, proven, verified
from lightning_remat.solvers.portfolio import _smallest_peak

PLAIN, LOWEST = 0.4, 0.6
"""Shares of the time limit for schedules without copies, and of the rest for the smallest peak with them."""

LOWER = 0.995
"""A peak with copies is taken where it is at most so many times the one without, or the step takes no longer."""


def find_smallest(
    graph: ComputationGraph, time_limit: float = 30.0, *, offload: str = "off", work_limit: float | None = None
) -> Solution:
    """The schedule of the smallest peak that is found, improved at that peak: what ``budget="min"`` means.

    The solution always has a schedule.

    Args:
        graph: the problem.
        time_limit: seconds it may take.
        offload: ``"host"``: what the forward makes may also wait in the host's memory (see `solve`); ``"off"``: nothing is
            copied.
        work_limit: seconds of counted work, beside it (see `solve`).

    Returns:
        A `Solution` whose ``peak_bytes`` is the smallest feasible budget found. Its notes name the op whose own working set
        no schedule can go below.

    Raises:
        SolverError: for ``offload="host"`` where the graph has no host memory.
        BudgetError: for a limit that is not positive.
        GraphError: for a graph whose forward outputs are produced in the backward.
    """
    check_choice(offload)
    if offload == "off":
        return _smallest_peak.find_smallest(graph, time_limit, work_limit=work_limit)
    host_of(graph)
    begun = time.monotonic()
    plain = _smallest_peak.find_smallest(
        graph, PLAIN * time_limit, work_limit=None if work_limit is None else PLAIN * work_limit
    )
    rest = 1 - PLAIN
    with _clock.limited(rest * time_limit, None if work_limit is None else rest * work_limit) as deadline:
        problem = Problem(graph)
        best = plain
        trial = _lowest(graph, problem, plain.peak_bytes, deadline)
        if trial is not None and trial.placed.fetched:
            made = dataclasses.replace(
                plain, schedule=trial.placed.schedule, method=plain.method + WITH_HOST, status=Status.FEASIBLE
            )
            copied = verified(graph, plain.peak_bytes, made)
            if copied.peak_bytes <= LOWER * plain.peak_bytes or copied.seconds <= plain.seconds:
                best = copied
        _, least, scope = lower_bound(graph, problem, best.peak_bytes, deadline)
    return proven(best, least, scope, time.monotonic() - begun)


def _lowest(graph: ComputationGraph, problem: Problem, peak_bytes: int, deadline: float) -> Trial | None:
    """The trial of the smallest peak where all may be fetched that there is room for on the host, improved at that peak."""
    search = Search(graph, problem, peak_bytes, None)
    room, chosen = host_of(graph).bytes, set[int]()
    sizes = {t: problem.nbytes[v] for v, t in search.tensor_of.items()}
    for t in sorted(search.early, key=lambda t: -sizes[t]):
        if sizes[t] <= room:
            chosen.add(t)
            room -= sizes[t]
    if not chosen:
        return None
    until = clock() + LOWEST * (deadline - clock())
    lowest = search.lowest(frozenset(chosen), until)
    return None if lowest is None else search.improved(lowest, deadline)
