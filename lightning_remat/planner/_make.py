"""Budget and graph to plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from lightning_remat.budget import BudgetKind, device_bytes, device_total_bytes, parse_budget
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.schedule import simulate
from lightning_remat.solvers import INTERRUPTED, Problem, Solution, Status, find_smallest, solve

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

FIRST_SECONDS = 2.0
"""Time limit of the first plan, where a better one is searched for in the background."""

SMALLEST_SHARE = 0.5
"""Share of the time limit for finding the smallest peak where the rest is for a cheaper schedule at it."""


def make_plan(
    graph: ComputationGraph,
    config: RematConfig,
    *,
    held_bytes: int = 0,
    replay_bytes: int = 0,
    cost_seconds: float = 0.0,
    progress: Progress | None = None,
    cache: PlanCache | None = None,
) -> Plan:
    """Choose a schedule for ``graph`` within ``config.budget``.

    Args:
        graph: with costs, and with what lies outside of it (``resident_bytes``).
        config: budget, solver and time limit.
        held_bytes: what the process holds on the device already; only ``budget="auto"`` on the CPU needs it.
        replay_bytes: what of ``resident_bytes`` is there only where random ops are evaluated again.
        cost_seconds: time spent on measuring, for the plan's record.
        progress: told in words what is being done.
        cache: plans of earlier runs, read first and added to; ``None`` solves.

    Raises:
        InfeasibleBudgetError: when no schedule was found; it names the smallest budget for which one was.
        BudgetError: for a size over what the device has.
    """
    started = time.monotonic()
    say = progress or (lambda _text: None)
    plain = graph.replace(resident_bytes=graph.resident_bytes - replay_bytes) if replay_bytes else graph
    problem = Problem(plain)
    baseline = problem.evaluate(problem.captured)
    device = torch.device(graph.device or "cpu")
    budget = parse_budget(config.budget)
    found_smallest: list[Solution] = []

    def smallest() -> Solution:
        if not found_smallest:
            say("looking for the smallest peak")
            share = SMALLEST_SHARE if budget.kind is BudgetKind.MIN else 1.0
            found_smallest.append(find_smallest(graph, share * config.time_limit))
        return found_smallest[0]

    known: Solution | None = None
    file = None
    if cache is not None and budget.kind is BudgetKind.MIN:  # what it resolves to is a search of its own
        file = cache.path(graph, "min", config)
        known = cache.load(file, graph)
    if known is not None:
        budget_bytes = known.peak_bytes
    else:
        budget_bytes = resolve_budget(
            config, plain.floor_bytes, baseline.peak_bytes, lambda: smallest().peak_bytes, device, held_bytes
        )
    if cache is not None and file is None and baseline.peak_bytes > budget_bytes:
        file = cache.path(graph, budget_bytes, config)
        known = cache.load(file, graph)
    interrupted = False
    if known is not None:
        solution = known
    elif baseline.peak_bytes <= budget_bytes:
        graph = plain
        solution = solve(graph, budget_bytes, "no_remat")
    elif budget.kind is BudgetKind.MIN:
        say("solving")
        least = smallest()
        left = max(config.time_limit - least.solve_seconds, (1 - SMALLEST_SHARE) * config.time_limit)
        solution = solve(graph, budget_bytes, config.solver, left, known=least, **config.solver_options)
        interrupted = INTERRUPTED in solution.notes
    else:
        say("solving")
        limits = [min(FIRST_SECONDS, config.time_limit)] if config.background else []
        for limit in (*limits, config.time_limit):
            solution = solve(graph, budget_bytes, config.solver, limit, **config.solver_options)
            interrupted = INTERRUPTED in solution.notes
            if solution.schedule is not None:
                break
        if solution.schedule is None and smallest().peak_bytes <= budget_bytes:
            solution = smallest()
    if interrupted:
        log.warning("Planning was interrupted: the best plan so far is used. Interrupt again to end what runs.")
    if solution.schedule is None:
        least = smallest()
        assert least.schedule is not None
        where = simulate(graph, least.schedule)
        raise InfeasibleBudgetError(budget_bytes, least.peak_bytes, where.peak_op, where.peak_module)
    whole = not config.background or budget.kind is BudgetKind.MIN or solution.status is Status.OPTIMAL
    searched = whole and not interrupted
    if cache is not None and file is not None and known is None and searched:
        cache.store(file, solution, budget_bytes)
    return Plan(
        graph=graph,
        schedule=solution.schedule,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=solution.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_seconds=solution.seconds,
        baseline_seconds=baseline.seconds,
        solver=solution.method,
        status=solution.status,
        lower_bound_seconds=solution.lower_bound_seconds,
        bound_scope=solution.bound_scope,
        solve_seconds=time.monotonic() - started,
        cost_seconds=cost_seconds,
        notes=solution.notes,
    )


def resolve_budget(
    config: RematConfig,
    floor_bytes: int,
    baseline_bytes: int,
    smallest: Callable[[], int],
    device: torch.device,
    held_bytes: int,
) -> int:
    """``config.budget`` in bytes (see `Budget.resolve`)."""
    return parse_budget(config.budget).resolve(
        floor_bytes,
        baseline_bytes,
        smallest,
        lambda: device_bytes(device, config.margin, held_bytes),
        lambda: device_total_bytes(device),
    )
