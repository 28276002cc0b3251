"""Making a plan for one graph: its budget in bytes, a schedule within it, and what is known of both."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_remat.budget import BudgetKind, device_bytes, device_total_bytes, parse_budget
from lightning_remat.errors import GraphError, InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._device_memory import DeviceMemory
from lightning_remat.planner._plan import FOR_NOW, FOR_ONCE, Plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.schedule import simulate, verify
from lightning_remat.solvers import INTERRUPTED, OF_NO_USE, Problem, Solution, Status, find_smallest, solve
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.common._registry import ANY_ORDER

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Called with a text about the work in progress."""

FIRST_SECONDS = 2.0
"""Time limit of the first plan, where a cheaper one is searched for in the background."""

SECONDS_A_SIZE = 3.0
"""Time limit of a plan for one of many sizes, as long as a plan is found in it."""

SMALLEST_SHARE = 0.5
"""With the budget ``"min"``: share of the time limit for the smallest peak; the rest is for a cheaper schedule."""

OVERRUN = 0.05
"""Share of the time limit by which both searches together may overrun their own limits."""

UNPLANNED = "none"
"""The solver's name in a plan that is the captured order whatever the budget (`unplanned`)."""

LEAST_SECONDS = 3.0
"""Time limit of a plan that keeps as little as can be, until the call as a whole is known."""

OTHERS = ("auto", "greedy", "descent", "linearized_greedy")
"""Solvers that are tried in turn where the verifier refuses what the configured one has found."""


@dataclasses.dataclass(frozen=True)
class AtHand:
    """Schedules that are known before a graph is planned, such as those of other batch sizes.

    Attributes:
        find: returns the cheapest of them for a graph within a budget in bytes, verified; ``None`` where none fits.
        suffices: whether such a schedule is taken without solving. It is not kept for later runs then.
        first: whether it is taken even where the graph fits as it was captured: it leaves room for others.
    """

    find: Callable[[ComputationGraph, int], Solution | None]
    suffices: bool = False
    first: bool = False


def make_plan(
    graph: ComputationGraph,
    config: RematConfig,
    *,
    held_bytes: int = 0,
    replay_bytes: int = 0,
    cost_seconds: float = 0.0,
    progress: Progress | None = None,
    cache: PlanCache | None = None,
    memory: DeviceMemory | None = None,
    reserved: bool | None = None,
    at_hand: AtHand | None = None,
    part: bool = False,
    below_seconds: float = math.inf,
    unimproved: bool = False,
    least: Solution | None = None,
) -> Plan:
    """Choose a schedule for ``graph`` within ``config.budget``.

    Args:
        graph: with costs, and with the memory that is held outside of it (``resident_bytes``).
        config: budget, solver and time limit.
        held_bytes: what the process holds on the device already; only ``budget="auto"`` on the CPU needs it.
        replay_bytes: the part of ``resident_bytes`` that is needed only where random ops are evaluated again.
        cost_seconds: time spent on measuring, for the plan's record.
        progress: called with a text about the work in progress.
        cache: plans of earlier runs, which are used, and added to; ``None`` always solves.
        memory: the CUDA device's memory: the allocator's footprint is then part of the plan, and is kept within the
            budget.
        reserved: whether the budget is one of reserved bytes, not of allocated ones; by default if it is ``"auto"``.
        at_hand: schedules that are known already: nothing dearer than these is taken.
        part: whether this is one of several graphs that share the budget, and has to run before the others are known:
            where no schedule is within the budget, the plan is that of the smallest peak, over it, with the note
            `FOR_ONCE`.
        below_seconds: a plan is of no use unless its step takes less than so many seconds: solving ends once it is proven
            that none does. With ``budget="min"`` the smallest peak is looked for first.
        unimproved: whether ``budget="min"`` looks for the smallest peak alone, and for no cheaper schedule within it.
        least: the solution of such a plan for the same graph: its peak is not looked for again.

    Raises:
        InfeasibleBudgetError: when no schedule was found (unless ``part``); it names the smallest budget for which one
            was.
        BudgetError: for a size over what the device has.
        ScheduleError: when the verifier refuses what every solver finds, which is a defect of theirs.
    """
    started = time.monotonic()
    say = progress or (lambda _text: None)
    plain = graph.replace(resident_bytes=graph.resident_bytes - replay_bytes) if replay_bytes else graph
    problem = Problem(plain)
    baseline = problem.evaluate(problem.captured)
    device = torch.device(graph.device or "cpu")
    budget = parse_budget(config.budget)
    found_smallest: list[Solution] = [] if least is None else [least]

    def smallest() -> Solution:
        if not found_smallest:
            least_file = cache.path(graph, "smallest", config) if cache is not None and unimproved else None
            kept = cache.load(least_file, graph) if cache is not None and least_file is not None else None
            if kept is None:
                say("looking for the smallest peak")
                share = SMALLEST_SHARE if budget.kind is BudgetKind.MIN else 1.0
                kept = find_smallest(graph, share * config.time_limit, **_offload(graph))
                if cache is not None and least_file is not None:
                    cache.store(least_file, kept, kept.peak_bytes)
            found_smallest.append(kept)
        return found_smallest[0]

    file: Path | None = None
    known: Solution | None = None
    if cache is not None and budget.kind is BudgetKind.MIN:  # its bytes are known only after a search
        file = cache.path(graph, "min", config)
        known = cache.load(file, graph)
        if known is None and below_seconds < math.inf:
            known = cache.load(cache.path_below(file, below_seconds), graph)
        budget_bytes = known.peak_bytes if known is not None else smallest().peak_bytes
    else:
        budget_bytes = resolve_budget(
            config, plain.floor_bytes, baseline.peak_bytes, lambda: smallest().peak_bytes, device, held_bytes
        )

    def solved(within: int) -> tuple[ComputationGraph, Solution]:
        """The graph (without ``replay_bytes`` if nothing runs again), and a schedule for it within so many bytes."""
        others = None if budget.kind is BudgetKind.MIN else at_hand
        if others is not None and others.first and (beside := others.find(graph, within)) is not None:
            return graph, beside
        if baseline.peak_bytes <= within and (solution := _without_remat(plain, within)) is not None:
            return plain, solution
        path, found = (file, known) if within == budget_bytes else (None, None)
        if cache is not None and path is None:
            path = cache.path(graph, within, config)
            found = cache.load(path, graph)
            if found is None and below_seconds < math.inf:
                found = cache.load(cache.path_below(path, below_seconds), graph)
        beside = others.find(graph, within) if others is not None and not others.first else None
        if found is not None:
            return graph, _cheaper_of(found, beside)
        if beside is not None and others is not None and others.suffices:
            return graph, beside
        if unimproved and budget.kind is BudgetKind.MIN:
            return graph, smallest()
        interruptible = "; Ctrl-C: best so far" if config.solver == "auto" else ""
        say(f"solving, at most {config.time_limit:.0f} s{interruptible}")
        solution, interrupted = _solution(graph, within, config, smallest, beside, below_seconds)
        if interrupted:
            log.warning("Planning was interrupted: the best plan so far is used. Interrupt again to end what runs.")
        if solution.schedule is None:
            least = smallest()
            assert least.schedule is not None
            if part:
                return graph, dataclasses.replace(least, notes=(*least.notes, FOR_ONCE))
            where = simulate(graph, least.schedule)
            raise InfeasibleBudgetError(within, least.peak_bytes, where.peak_op, where.peak_module)
        whole = (
            not config.background
            or graph.host is not None
            or budget.kind is BudgetKind.MIN
            or solution.status is Status.OPTIMAL
        )
        if cache is not None and path is not None and whole and not interrupted:
            of_no_use = OF_NO_USE in solution.notes
            cache.store(cache.path_below(path, below_seconds) if of_no_use else path, solution, within)
        return graph, solution

    graph_as_counted, solution = solved(budget_bytes)
    footprint = None
    if memory is not None:
        say("looking at what the allocator makes of it")
        if reserved is None:
            reserved = budget.kind is BudgetKind.AUTO
        if budget.kind is BudgetKind.MIN or {FOR_ONCE, FOR_NOW}.intersection(solution.notes):
            assert solution.schedule is not None
            footprint = memory.footprint(graph_as_counted, solution.schedule)
            budget_bytes = max(budget_bytes, footprint.allocated_bytes if budget.kind is BudgetKind.MIN else 0)
        else:
            graph_as_counted, solution, footprint = memory.settle(
                graph_as_counted, solution, budget_bytes, reserved, solved
            )
    assert solution.schedule is not None, "what has none has raised"
    return Plan(
        graph=graph_as_counted,
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
        footprint=footprint,
    )


def keeping_least(
    graph: ComputationGraph,
    config: RematConfig,
    *,
    held_bytes: int = 0,
    cost_seconds: float = 0.0,
    progress: Progress | None = None,
    memory: DeviceMemory | None = None,
) -> Plan:
    """A plan for one of many parts of a call, of which most are not known: it keeps as little as can be for its backward.

    Many parts that are alike may run by it, one after the other, before the call as a whole is planned; each alone may fit the
    budget as it is, and all of them together not.

    Args:
        graph: with costs, and with the memory that is held outside of it.
        config: budget and time limit.
        held_bytes: as in `make_plan`; so are the others.
        cost_seconds: time spent on measuring.
        progress: called with a text about the work in progress.
        memory: the CUDA device's memory.
    """
    started = time.monotonic()
    (progress or (lambda _text: None))("looking for what must be kept")
    pressed, at = graph, graph.boundary
    if at < len(graph.ops):  # as if the backward began with something large: what is alive there is all that counts
        first = dataclasses.replace(graph.ops[at], workspace_bytes=graph.ops[at].workspace_bytes + sum(graph.storages))
        pressed = graph.replace(ops=(*graph.ops[:at], first, *graph.ops[at + 1 :]))
    solution = find_smallest(pressed, min(LEAST_SECONDS, config.time_limit))
    assert solution.schedule is not None, "the captured order is one"
    timeline, problem = simulate(graph, solution.schedule), Problem(graph)
    baseline = problem.evaluate(problem.captured)
    device = torch.device(graph.device or "cpu")
    peak = timeline.peak_bytes
    return Plan(
        graph=graph,
        schedule=solution.schedule,
        budget_bytes=resolve_budget(config, graph.floor_bytes, baseline.peak_bytes, lambda: peak, device, held_bytes),
        predicted_peak_bytes=peak,
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_seconds=timeline.seconds,
        baseline_seconds=baseline.seconds,
        solver=solution.method,
        status=Status.FEASIBLE,
        lower_bound_seconds=problem.evaluate(once(problem)).seconds,
        bound_scope=ANY_ORDER,
        solve_seconds=time.monotonic() - started,
        cost_seconds=cost_seconds,
        notes=(FOR_ONCE,),
        footprint=memory.footprint(graph, solution.schedule) if memory is not None else None,
    )


def unplanned(graph: ComputationGraph, config: RematConfig, reason: str, *, held_bytes: int = 0) -> Plan:
    """A plan that is the captured order, whatever the budget; ``reason`` says why no schedule could be made.

    Raises:
        ScheduleError: when the verifier refuses the captured order too.
    """
    started = time.monotonic()
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    device = torch.device(graph.device or "cpu")
    schedule = problem.expand(problem.captured)
    return Plan(
        graph=graph,
        schedule=schedule,
        budget_bytes=resolve_budget(config, graph.floor_bytes, peak, lambda: peak, device, held_bytes),
        predicted_peak_bytes=verify(graph, schedule),
        baseline_peak_bytes=peak,
        predicted_seconds=graph.seconds,
        baseline_seconds=graph.seconds,
        solver=UNPLANNED,
        status=Status.FEASIBLE,
        lower_bound_seconds=0.0,
        bound_scope="",
        solve_seconds=time.monotonic() - started,
        notes=(reason,),
    )


def _solution(
    graph: ComputationGraph,
    within: int,
    config: RematConfig,
    smallest: Callable[[], Solution],
    beside: Solution | None,
    below_seconds: float,
) -> tuple[Solution, bool]:
    """A solution within so many bytes (without a schedule if none was found), and whether the user interrupted it.

    It is not dearer than ``beside``, a schedule that is known already.
    """
    if parse_budget(config.budget).kind is BudgetKind.MIN:
        least = smallest()
        limit = seconds_left(config.time_limit, least.solve_seconds)
        solution = _by_any(graph, within, config, limit, least, below_seconds)
        return solution, INTERRUPTED in solution.notes
    limits = [min(FIRST_SECONDS, config.time_limit)] if config.background and graph.host is None else []
    for limit in (*limits, config.time_limit):
        solution = _by_any(graph, within, config, limit, below_seconds=below_seconds)
        if solution.schedule is not None:
            break
    interrupted = INTERRUPTED in solution.notes
    if solution.schedule is None and beside is None and smallest().peak_bytes <= within:
        solution = smallest()
    return _cheaper_of(solution, beside), interrupted


def seconds_left(time_limit: float, spent: float) -> float:
    """With ``budget="min"``: the seconds left for a cheaper schedule, after ``spent`` seconds for the smallest peak."""
    return max((1 - OVERRUN) * time_limit - spent, 0.8 * (1 - SMALLEST_SHARE) * time_limit)


def _offload(graph: ComputationGraph) -> dict[str, Any]:
    """The option of solvers by which tensors may wait on the host, where the graph has host memory."""
    return {"offload": "host"} if graph.host is not None else {}


def _by_any(
    graph: ComputationGraph,
    within: int,
    config: RematConfig,
    limit: float,
    known: Solution | None = None,
    below_seconds: float = math.inf,
) -> Solution:
    """The solution of the configured solver, or of another one, where the verifier refuses that.

    Raises:
        ScheduleError: where the verifier refuses the schedules of all.
    """
    refused: ScheduleError | GraphError | None = None
    for method in dict.fromkeys((config.solver, *OTHERS)):
        options = config.solver_options if method == config.solver else {}
        try:
            solution = solve(
                graph, within, method, limit, known=known, below_seconds=below_seconds, **_offload(graph), **options
            )
        except (ScheduleError, GraphError) as error:
            log.warning(
                "a schedule of the solver %r breaks a rule, another one is asked; please report it (%s)", method, error
            )
            refused = refused or error
            continue
        if refused is None:
            return solution
        if solution.schedule is not None:
            return dataclasses.replace(solution, notes=(*solution.notes, f"{config.solver} was refused: {refused}"))
    assert refused is not None
    raise refused if isinstance(refused, ScheduleError) else ScheduleError(str(refused)) from refused


def _without_remat(plain: ComputationGraph, within: int) -> Solution | None:
    """The captured order as a solution; ``None`` where the verifier refuses it, although it should fit."""
    try:
        return solve(plain, within, "no_remat")
    except (ScheduleError, GraphError) as error:
        log.warning("the step without rematerialization breaks a rule, and is planned; please report it (%s)", error)
        return None


def _cheaper_of(solution: Solution, beside: Solution | None) -> Solution:
    """The cheaper of a solution and a known one (``beside``), with the better lower bound of the two."""
    if beside is None or beside.seconds >= solution.seconds:
        return solution
    if beside.lower_bound_seconds < solution.lower_bound_seconds <= beside.seconds:
        return dataclasses.replace(
            beside, lower_bound_seconds=solution.lower_bound_seconds, bound_scope=solution.bound_scope
        )
    return beside


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
