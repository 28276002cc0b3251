"""`solve`: any method, and with ``offload="host"`` host memory as a third choice beside keeping and computing again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from typing import Any

from lightning_remat.errors import GraphError, ScheduleError, SolverError
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Copy, Schedule, simulate, verify
from lightning_remat.solvers.bounds._binding_moments import choose
from lightning_remat.solvers.common import _clock, _registry
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._prune import required, resting_bytes
from lightning_remat.solvers.common._registry import ANY_ORDER
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.common._working_set import needs_more
from lightning_remat.solvers.offload._program import ANY_COPIES, OffloadProgram
from lightning_remat.solvers.offload._rewriting import host_of
from lightning_remat.solvers.offload._search import Search
from lightning_remat.solvers.portfolio._auto import INTERRUPTED, REFUSED

log = logging.getLogger(__name__)

CHOICES = ("off", "host")
"""What ``offload`` may be."""

CHOOSING, WITHOUT = 0.05, 0.5
"""Shares of the time limit for the moments that bind, and for schedules without copies, which the others begin at."""

WITH_HOST = "+host"
"""Ends the name of a method whose schedule was improved by copies."""

WAITING = "wait on the host"
"""Words of the note on what is copied."""

NEAR = 1e-4
"""Gap to the bound up to which nothing is searched for."""


def solve(
    graph: ComputationGraph,
    budget_bytes: int,
    method: str = "auto",
    time_limit: float = 30.0,
    *,
    offload: str = "off",
    work_limit: float | None = None,
    known: Solution | None = None,
    below_seconds: float = math.inf,
    **options: Any,
) -> Solution:
    """Find the cheapest schedule of ``graph`` whose peak memory is at most ``budget_bytes``.

    Args:
        graph: the problem, with costs.
        budget_bytes: the most that may be held at any moment, everything counted (see `ComputationGraph.floor_bytes`).
        method: one of `available()`.
        time_limit: seconds the method may take.
        offload: ``"host"``: what the forward makes may also wait in the host's memory, ``graph.host``. The method's schedule
            is where that search begins, so the answer is never dearer, and the bound holds for schedules with copies.
            ``"off"``: nothing is copied.
        work_limit: seconds of counted work that it may do: the answer is the same on every machine that is fast enough for
            the time limit (see `lightning_remat.solvers.common._clock`). ``None`` to go by time alone.
        known: a solution of the same graph within the budget, if there is one: the answer is never dearer. Methods with a
            keyword ``known`` ("auto") go on from it.
        below_seconds: a schedule is of no use unless it takes less than so many seconds a step. Methods with a keyword of that
            name ("auto") end once they have proven that none does, with what they have found so far.
        **options: the method's own options (`options_of`).

    Returns:
        A `Solution`; its schedule has passed `verify` at this budget.

    Raises:
        SolverError: for an unknown method or option, another package's method that cannot be loaded, or ``offload="host"``
            where the graph has no host memory.
        BudgetError: for a budget that is not a positive whole number of bytes, or a limit that is not positive.
        GraphError: for a graph whose forward outputs are produced in the backward.
        ScheduleError: when the answer breaks a rule or the budget: a defect of the method, or ``known`` is not as said.
    """
    check_choice(offload)
    copied = known if known is not None and known.schedule is not None and offloaded(known.schedule) else None
    known = known if copied is None else None
    if offload == "off":
        return _registry.solve(
            graph,
            budget_bytes,
            method,
            time_limit,
            work_limit=work_limit,
            known=known,
            below_seconds=below_seconds,
            **options,
        )
    host_of(graph)
    _registry.check(budget_bytes, method, options)
    begun = time.monotonic()
    problem = Problem(graph)

    def limited(share: float) -> contextlib.AbstractContextManager[float]:
        return _clock.limited(share * time_limit, None if work_limit is None else share * work_limit)

    with limited(CHOOSING) as deadline:
        moments, least, scope = lower_bound(graph, problem, budget_bytes, deadline)
    of_no_use = least >= below_seconds
    plain = _registry.solve(
        graph,
        budget_bytes,
        method,
        WITHOUT * time_limit,
        work_limit=None if work_limit is None else WITHOUT * work_limit,
        known=known,
        below_seconds=below_seconds if of_no_use else math.inf,
        **options,
    )
    found = [plain] if copied is None else [plain, verified(graph, budget_bytes, copied)]
    best = min(found, key=lambda one: one.seconds)
    fits = resting_bytes(problem) <= budget_bytes and not needs_more(problem, budget_bytes)
    if fits and not of_no_use and best.seconds > least * (1 + NEAR) and INTERRUPTED not in plain.notes:
        with limited(1 - CHOOSING - WITHOUT) as deadline:
            if work_limit is None:
                deadline = min(deadline, clock() + max(2.0 + len(problem) / 400, time.monotonic() - begun))
            sequence = None if plain.schedule is None else problem.contract(plain.schedule)
            search = Search(graph, problem, budget_bytes, sequence, moments)
            best = _better(graph, budget_bytes, best, search, deadline)
    return proven(best, least, scope, time.monotonic() - begun)


def _better(graph: ComputationGraph, budget_bytes: int, best: Solution, search: Search, deadline: float) -> Solution:
    """What a search finds, or what is known where that is no dearer, or where the search fails or is interrupted."""
    try:
        trial = search.run(deadline)
        if trial is None or trial.placed.seconds >= best.seconds:
            return best
        method = best.method if WITH_HOST in best.method else best.method + WITH_HOST
        made = dataclasses.replace(best, schedule=trial.placed.schedule, method=method, status=Status.FEASIBLE)
        return verified(graph, budget_bytes, made)
    except KeyboardInterrupt:
        if best.schedule is None:
            raise
        return dataclasses.replace(best, notes=(*best.notes, INTERRUPTED))
    except (ScheduleError, GraphError, SolverError) as error:  # a defect of the search: there is the other schedule
        log.warning("copies to the host: %s: %s", REFUSED, error)
        return dataclasses.replace(best, notes=(*best.notes, f"copies to the host: {REFUSED}: {error}"))


def check_choice(offload: str) -> None:
    """Raise `SolverError` for what ``offload`` cannot be."""
    if offload not in CHOICES:
        raise SolverError(f"offload={offload!r}: choose one of {', '.join(map(repr, CHOICES))}")


def lower_bound(
    graph: ComputationGraph, problem: Problem, budget_bytes: int, deadline: float
) -> tuple[list[int], float, str]:
    """Moments that bind, and a lower bound in seconds that holds for schedules with copies, with its scope."""
    once = sum(problem.seconds[node] for node in required(problem))
    moments, _ = choose(problem, budget_bytes, deadline)
    best, scope = once, ANY_ORDER
    with contextlib.closing(OffloadProgram(graph, problem, moments[-1])) as program:
        least = program.bound(budget_bytes, max(0.1, deadline - clock())) or 0.0
    if least > best:
        best, scope = least, ANY_COPIES
    return moments[-1], best, scope


def verified(graph: ComputationGraph, budget_bytes: int, solution: Solution) -> Solution:
    """A solution with the seconds and the peak of its schedule, and a note of what is copied."""
    assert solution.schedule is not None
    peak = verify(graph, solution.schedule, budget_bytes)
    timeline = simulate(graph, solution.schedule)
    count = len(offloaded(solution.schedule))
    note = f"{count} tensors {WAITING}, {timeline.host_bytes:,} bytes"
    notes = (*(one for one in solution.notes if WAITING not in one), note)
    return dataclasses.replace(solution, seconds=timeline.seconds, peak_bytes=peak, notes=notes)


def proven(solution: Solution, least: float, scope: str, seconds: float) -> Solution:
    """A solution with the bound that holds for schedules with copies."""
    status = solution.status
    if solution.schedule is not None:
        status = Status.OPTIMAL if solution.seconds <= least * (1 + 1e-9) else Status.FEASIBLE
    return dataclasses.replace(
        solution, status=status, lower_bound_seconds=least, bound_scope=scope, solve_seconds=seconds
    )


def offloaded(schedule: Schedule) -> frozenset[int]:
    """Tensors that a schedule copies to the host."""
    return frozenset(step.tensor for step in schedule.steps if isinstance(step, Copy) and not step.to_device)
