"""Planning all graphs of a step together: what one of them saves for its backward is alive while the next ones run.

A step that is captured as several graphs runs their forwards in order and their backwards in the opposite order. While
graph i runs, forward or backward, what the earlier ones have saved is held beside it. With p_i for the peak of i alone,
and k_j for what j keeps, the only constraint between the graphs is

    p_i + sum of k_j for j < i  <=  budget    for every i

Each graph gets a choice of schedules from `plan_curve`: the cheapest ones for a peak, and the cheapest ones for what is
kept. A dynamic program along the chain of graphs, over what has been kept so far, picks one for each; then each graph
is solved once more in exactly the room that the others leave it.

What other graphs and uncaptured code need between a graph's forward and its backward is the workspace of one more op at
the end of its forward (`OUTSIDE`), so that no solver has to know of it. What is held before the first graph runs, and after,
no schedule changes: no budget is smaller, and none need be.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence

from lightning_remat.allocator import Footprint, footprint_together
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import CapturedGraph
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.graph import ComputationGraph, Host, Op, Phase
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside, floor_bytes, needing
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._curves import NEEDS, Curves, outside_bytes, plain_schedule
from lightning_remat.planner._device_memory import DeviceMemory, less
from lightning_remat.planner._make import SECONDS_A_SIZE, Progress, make_plan, resolve_budget
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.planner._surroundings import Surroundings, Weights, replayed_bytes
from lightning_remat.schedule import OUTSIDE, Schedule, Timeline, simulate
from lightning_remat.solvers import INTERRUPTED, Problem, Status
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.common._registry import ANY_ORDER

log = logging.getLogger(__name__)

TRIES = 3
"""Plans within ever smaller budgets, at most, until the graphs fit together by the model of the device's allocator."""

LESS = 0.1
"""Share of the bytes between the floor and the last try's budget that the next try gives up, at least."""

CURVES_SHARE = 0.4
"""Share of the time limit for all curves; the rest is for the solves."""

FEW_SIZES = 4
"""Sets of sizes up to which each may take its whole time to plan; of n, each takes ``FEW_SIZES / n`` of it."""

NOT_CAPTURED = "code that is not captured"
"""What is said to set the smallest budget where that is no op."""

MOST_CHOICES = 400
"""Partial choices that the dynamic program goes on with, at most: of more, every nth in the order of kept bytes."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One graph of a step, with costs, and the memory beside it: what is known (``around``), and what was measured.

    Attributes:
        host: the host's memory, where tensors may be copied to it: of a step's only graph.
    """

    captured: CapturedGraph
    weights: Weights
    around: Surroundings
    beside: Beside = NOTHING_BESIDE
    host: Host | None = None

    @property
    def graph(self) -> ComputationGraph:
        return self.captured.graph


@dataclasses.dataclass(frozen=True)
class _Option:
    """One schedule of a graph, with its peak and what it keeps, if it were the only graph of the step."""

    schedule: Schedule
    seconds: float
    peak_bytes: int
    kept_bytes: int


@dataclasses.dataclass(frozen=True)
class _Choice:
    """An option for each of the first few graphs, with what these keep together, and their time."""

    kept_bytes: int = 0
    seconds: float = 0.0
    options: tuple[_Option, ...] = ()


def with_outside(captured: CapturedGraph) -> CapturedGraph:
    """The graph with the op `OUTSIDE` between its forward and its backward, whose workspace is 0 so far."""
    graph = captured.graph
    at = graph.boundary
    outside = Op(
        name=OUTSIDE, target=OUTSIDE, inputs=graph.forward_outputs, outputs=(), phase=Phase.LOSS, recomputable=False
    )
    return dataclasses.replace(
        captured,
        graph=graph.replace(ops=(*graph.ops[:at], outside, *graph.ops[at:])),
        nodes=(*captured.nodes[:at], None, *captured.nodes[at:]),
        calls=(*captured.calls[:at], None, *captured.calls[at:]),
    )


def kept_bytes(plan: Plan) -> int:
    """Bytes that the forward of a plan leaves behind: saved for the backward, or held by the caller."""
    return plan.timeline().saved_bytes + replayed_bytes(plan.graph, plan.schedule)


def plan_together(
    parts: Sequence[Part],
    config: RematConfig,
    *,
    fixed: Sequence[Schedule] = (),
    held_bytes: int = 0,
    progress: Progress | None = None,
    cache: PlanCache | None = None,
    curves: Curves | None = None,
    memory: DeviceMemory | None = None,
    reserved: bool = False,
    sizes: int = 0,
) -> list[Plan]:
    """Plans for the graphs of one step within one budget.

    Args:
        parts: graphs with the op of `with_outside`, in the order in which their forwards run.
        config: budget, solver and time limit (of all graphs together).
        fixed: schedules that the first graphs keep, since other calls that begin with the same graphs run them too.
        held_bytes: what the process holds on the device already (see `make_plan`).
        progress: called with a text about the work in progress.
        cache: plans of earlier runs, which are used, and added to.
        curves: schedules of graphs that were planned together earlier, which are used, and added to.
        memory: the CUDA device's memory: what its allocator takes for all graphs is then kept within the budget too.
        reserved: whether the budget is one of reserved bytes, not of allocated ones.
        sizes: how many other sets of sizes the step has come with, where they are many: schedules of these stand in for curves
            then (but for ``"min"``, which is found out), solving takes `SECONDS_A_SIZE` in all, at most, and all of it the
            less time the more they are (see `FEW_SIZES`).

    Returns:
        One plan for each part. Each has the budget of the whole step.

    Raises:
        InfeasibleBudgetError: when no choice of schedules was found; it names the smallest budget for which one was.
        BudgetError: for a size over what the device has.
    """
    known = curves or Curves()
    plans = _planned_together(parts, config, fixed, held_bytes, progress, cache, known, sizes)
    if memory is None:
        return plans
    budget = plans[0].budget_bytes
    around = parts[0].around
    others = max(0, around.trainable_bytes - sum(parts[0].weights.values()))  # gradients, which the model allocates

    def taken(plans: Sequence[Plan]) -> Footprint:
        pairs = [(plan.graph, plan.schedule) for plan in plans]
        resident = max(0, plans[0].graph.resident_bytes - others)
        limit = budget if reserved else memory.limit_bytes
        found = footprint_together(pairs, resident, limit, memory.holdings, memory.arrangements)
        peaks = max(plan.predicted_peak_bytes for plan in plans)  # of code that is not captured too
        return dataclasses.replace(found, allocated_bytes=max(found.allocated_bytes, peaks))

    found = taken(plans)
    smallest = parse_budget(config.budget).kind is BudgetKind.MIN
    budget = max(budget, found.allocated_bytes if smallest else 0)
    given = dataclasses.replace(config, budget=budget)
    within = budget
    for _ in range(0 if smallest else TRIES):
        if found.fits and (reserved or found.allocated_bytes <= budget):
            break
        floor = max(plan.graph.floor_bytes for plan in plans)
        within = less(within, floor, max(found.allocated_bytes - budget, int(LESS * (within - floor))))
        try:
            plans = _planned_together(parts, given, fixed, held_bytes, progress, cache, known, sizes, within)
        except InfeasibleBudgetError:
            log.warning(
                "by the allocator's model the graphs of this step do not fit together: memory is fragmented by them"
            )
            break
        found = taken(plans)
    return [dataclasses.replace(plan, budget_bytes=budget, footprint=found) for plan in plans]


def _planned_together(
    parts: Sequence[Part],
    config: RematConfig,
    fixed: Sequence[Schedule],
    held_bytes: int,
    progress: Progress | None,
    cache: PlanCache | None,
    curves: Curves,
    sizes: int,
    within: int | None = None,
) -> list[Plan]:
    """The plans; the graphs stay ``within`` so many bytes, where that is given and less than the budget."""
    say = progress or (lambda _text: None)

    def beside(i: int, kept: int) -> ComputationGraph:
        """Graph i with all that is held beside it, and with so many bytes kept by the earlier graphs."""
        return measured[i].put_beside(around(i, kept))

    def around(i: int, kept: int) -> ComputationGraph:
        earlier = [(part.graph, part.weights) for part in parts[:i]]
        later = [part.weights for part in parts[i + 1 :]]
        return parts[i].around.put_around(parts[i].captured, parts[i].weights, earlier, later, kept)

    less_of = min(1.0, FEW_SIZES / max(1, sizes))
    measured = [part.beside.within(around(i, 0)) for i, part in enumerate(parts)]  # the same whatever is kept
    alone = [beside(i, 0) for i in range(len(parts))]
    elsewhere = measured[0].elsewhere(around(0, 0))
    if parts[0].host is not None:
        only = alone[0].replace(host=parts[0].host)
        make = functools.partial(make_plan, only, held_bytes=held_bytes, progress=progress, cache=cache)
        plan = make(dataclasses.replace(config, budget=config.budget if within is None else within, background=False))
        if within is None and elsewhere > plan.budget_bytes:
            if parse_budget(config.budget).kind in (BudgetKind.SIZE, BudgetKind.AUTO):
                raise InfeasibleBudgetError(plan.budget_bytes, elsewhere, NOT_CAPTURED, "")
            plan = make(dataclasses.replace(config, budget=elsewhere, background=False))
        peaks = max(elsewhere, plan.predicted_peak_bytes), max(elsewhere, plan.baseline_peak_bytes)
        return [dataclasses.replace(plan, predicted_peak_bytes=peaks[0], baseline_peak_bytes=peaks[1])]
    # Kept bytes that are inputs of graph i too are counted in both: only what exceeds ``free[i]`` adds to its peak.
    total = sum(graph.floor_bytes + sum(graph.storages) for graph in alone)
    free = [total - (beside(i, total).resident_bytes - alone[i].resident_bytes) for i in range(len(parts))]

    plain = _Choice(options=tuple(_option(graph, plain_schedule(graph)) for graph in alone))
    known = [[_option(graph, schedule)] for graph, schedule in zip(alone, fixed, strict=False)]

    def graphs_peak(choice: _Choice) -> int:
        return max(_peaks(choice.options, free))

    def peak(choice: _Choice) -> int:
        return max(elsewhere, graphs_peak(choice))

    @functools.cache
    def options() -> list[list[_Option]]:
        say(f"planning {len(parts)} graphs together")
        left = parts[len(known) :], alone[len(known) :]
        moved = sizes > 0 and parse_budget(config.budget).kind is not BudgetKind.MIN
        seconds = min(CURVES_SHARE * config.time_limit, SECONDS_A_SIZE if sizes else math.inf)
        return known + _all_options(*left, curves, seconds * less_of, moved=moved)

    @functools.cache
    def smallest() -> _Choice:
        first = _Choice(options=tuple(one[0] for one in options()))
        return _smallest(lambda budget: _cheapest(options(), free, budget), peak, first, elsewhere)

    device = parts[0].captured.device
    floor = max(elsewhere, *map(floor_bytes, alone))
    budget = resolve_budget(config, floor, peak(plain), lambda: peak(smallest()), device, held_bytes)
    if elsewhere > budget:
        raise InfeasibleBudgetError(budget, peak(smallest()), NOT_CAPTURED, "")
    if within is not None:
        budget = within
    plain_fits = graphs_peak(plain) <= budget and not fixed
    choice = plain if plain_fits else _cheapest(options(), free, budget)
    if choice is None:
        where = _peaks(smallest().options, free)
        worst = where.index(max(where))
        timeline = simulate(alone[worst], smallest().options[worst].schedule)
        op = NOT_CAPTURED if timeline.peak_op == OUTSIDE else timeline.peak_op
        raise InfeasibleBudgetError(budget, peak(smallest()), op, timeline.peak_module)

    chosen = list(choice.options)

    def room(i: int) -> ComputationGraph:
        """Graph i beside all that the present choice of schedules keeps, and needs later."""
        kept = sum(option.kept_bytes for option in chosen[:i])
        return needing(beside(i, kept), _needed_by_later(i, alone[i], chosen, free))

    def taken(i: int, schedule: Schedule) -> bool:
        """Choose a schedule for graph i, if all fit with it: what it evaluates after `OUTSIDE` is kept, and not in its room."""
        option = _option(alone[i], schedule)
        fits = max(_peaks([*chosen[:i], option, *chosen[i + 1 :]], free)) <= budget
        if fits:
            chosen[i] = option
        return fits

    plans = [_recorded(room(i), option.schedule, budget) for i, option in enumerate(chosen)]
    alike: dict[tuple[int, Schedule], list[int]] = {}
    for i, plan in enumerate(plans):
        if plan.rematerializes and i >= len(fixed):
            alike.setdefault((id(parts[i].captured), plan.schedule), []).append(i)
    # Of the places of one graph for which the same was chosen, the first and the last are solved; the others take that.
    solved = {i: key for key, places in alike.items() for i in (places[0], places[-1])}
    seconds = min((1 - CURVES_SHARE) * config.time_limit, SECONDS_A_SIZE if sizes else math.inf)
    limit = seconds * less_of / max(1, len(solved))
    solving = dataclasses.replace(config, budget=budget, time_limit=limit, background=False)
    found: dict[tuple[int, Schedule], list[Plan]] = {key: [] for key in alike}
    for number, i in enumerate(sorted(solved), start=1):
        say(f"solving graph {number} of {len(solved)}")
        try:
            plan = make_plan(room(i), solving, held_bytes=held_bytes, progress=progress, cache=cache)
        except InfeasibleBudgetError as error:
            plans[i] = dataclasses.replace(plans[i], notes=(*plans[i].notes, f"alone: {error}"))
            continue
        better = plan.predicted_seconds < plans[i].predicted_seconds
        alone_as_good = len(parts) == 1 and plan.predicted_seconds == plans[i].predicted_seconds  # with a bound
        if (better or alone_as_good) and taken(i, plan.schedule):
            plans[i] = plan
            found[solved[i]].append(plan)
        if INTERRUPTED in plan.notes:
            break
    for key, places in alike.items():
        for i in places[1:-1]:
            for plan in sorted(found[key], key=lambda one: one.predicted_seconds):
                if taken(i, plan.schedule):
                    plans[i] = dataclasses.replace(_recorded(room(i), plan.schedule, budget), solver=plan.solver)
                    break
    records = []
    for i, plan in enumerate(plans):
        graph = room(i)
        peak_bytes = simulate(graph, plan.schedule).peak_bytes
        assert peak_bytes <= budget, "the graphs were solved in the room that they leave each other"
        peak_bytes = max(peak_bytes, 0 if i else elsewhere)
        records.append(
            dataclasses.replace(
                plan, graph=graph, predicted_peak_bytes=peak_bytes, baseline_peak_bytes=max(peak(plain), peak_bytes)
            )
        )
    return records


def _all_options(
    parts: Sequence[Part], alone: Sequence[ComputationGraph], curves: Curves, time_limit: float, *, moved: bool
) -> list[list[_Option]]:
    """The options of each graph; those of one that runs several times are made once."""
    each = time_limit / len(NEEDS) / max(1, len({id(part.captured) for part in parts}))
    schedules: dict[int, list[Schedule]] = {}
    known: dict[tuple[int, int, int], tuple[int, list[_Option]]] = {}
    found: list[list[_Option]] = []
    for part, graph in zip(parts, alone, strict=True):
        if id(part.captured) not in schedules:
            schedules[id(part.captured)] = curves.schedules(graph, each, moved=moved)
        key = id(part.captured), graph.forward_resident_bytes, outside_bytes(graph)
        if key not in known:
            known[key] = graph.resident_bytes, [_option(graph, schedule) for schedule in schedules[id(part.captured)]]
        before, options = known[key]
        more = graph.resident_bytes - before  # bytes that are held all the time add to the peak
        found.append([dataclasses.replace(one, peak_bytes=one.peak_bytes + more) for one in options])
    return found


def _option(graph: ComputationGraph, schedule: Schedule) -> _Option:
    timeline: Timeline = simulate(graph, schedule)
    kept = timeline.saved_bytes + replayed_bytes(graph, schedule)
    return _Option(schedule, timeline.seconds, timeline.peak_bytes, kept)


def _peaks(options: Sequence[_Option], free: Sequence[int]) -> list[int]:
    """Each graph's peak while it runs or waits; of the bytes that earlier ones keep, ``free`` are its own inputs."""
    kept, peaks = 0, []
    for option, handed_over in zip(options, free, strict=True):
        peaks.append(option.peak_bytes + max(0, kept - handed_over))
        kept += option.kept_bytes
    return peaks


def _needed_by_later(i: int, graph: ComputationGraph, options: Sequence[_Option], free: Sequence[int]) -> int:
    """Bytes that must be free after the forward of graph i: later graphs or uncaptured code need them at a peak."""
    later = max(_peaks(options, free)[i + 1 :], default=0)
    schedule = options[i].schedule
    outside = next(n for n, op in enumerate(graph.ops) if op.name == OUTSIDE)
    at = next(n for n, step in enumerate(schedule.steps) if getattr(step, "op", None) == outside)
    kept_before = max(0, sum(option.kept_bytes for option in options[:i]) - free[i])
    own = graph.ops[outside].workspace_bytes
    return max(own, later - kept_before - int(simulate(graph, schedule).during[at]) + own)


def _cheapest(options: Sequence[Sequence[_Option]], free: Sequence[int], budget_bytes: float) -> _Choice | None:
    """The cheapest choice within a budget, by a dynamic program; ``None`` where there is none.

    Graph by graph, it goes on with the partial choices for which no other one is both as cheap and keeps as little.
    """
    choices = [_Choice()]
    for own, handed_over in zip(options, free, strict=True):
        extended = [
            _Choice(choice.kept_bytes + option.kept_bytes, choice.seconds + option.seconds, (*choice.options, option))
            for choice in choices
            for option in own
            if option.peak_bytes + max(0, choice.kept_bytes - handed_over) <= budget_bytes
        ]
        extended.sort(key=lambda one: (one.kept_bytes, one.seconds))
        choices = []
        for one in extended:
            if not choices or one.seconds < choices[-1].seconds:
                choices.append(one)
        if len(choices) > MOST_CHOICES:
            choices = [choices[round(n * (len(choices) - 1) / (MOST_CHOICES - 1))] for n in range(MOST_CHOICES)]
    return choices[-1] if choices else None


def _smallest(
    choose: Callable[[float], _Choice | None], peak: Callable[[_Choice], int], plain: _Choice, low: int
) -> _Choice:
    """The choice with the smallest peak, which is ``low`` or more, by bisection."""
    best = plain
    while True:
        middle = (low + peak(best)) // 2
        if middle >= peak(best) * (1 - 1e-4):
            return best
        found = choose(middle)
        if found is None:
            low = middle + 1
        else:
            best = found


def _recorded(graph: ComputationGraph, schedule: Schedule, budget_bytes: int) -> Plan:
    """A plan from one of a graph's options."""
    problem = Problem(graph)
    plain = problem.evaluate(problem.captured)
    timeline = simulate(graph, schedule)
    return Plan(
        graph=graph,
        schedule=schedule,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        baseline_peak_bytes=plain.peak_bytes,
        predicted_seconds=timeline.seconds,
        baseline_seconds=plain.seconds,
        solver="curve",
        status=Status.FEASIBLE,
        lower_bound_seconds=problem.evaluate(once(problem)).seconds,
        bound_scope=ANY_ORDER,
        solve_seconds=0.0,
    )
