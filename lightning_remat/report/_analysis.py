"""All that the report, `explain` and a notebook say of a plan, computed once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from enum import Enum

from lightning_remat.errors import listed
from lightning_remat.graph import ComputationGraph
from lightning_remat.report._changes import Change, TradePoint, changes, loss_head
from lightning_remat.report._course import Course, course, course_of_whole
from lightning_remat.report._modules import Groups, ModuleRow, module_rows
from lightning_remat.report._replay import BESIDE, KEPT, OLD, OUTSIDE, PASSING, Held, Moment, Replay
from lightning_remat.report._subject import Planned
from lightning_remat.report._units import format_bytes, format_seconds
from lightning_remat.schedule import OUTSIDE as NEEDED
from lightning_remat.schedule import Schedule

LAYERS = 6
"""How many groups of modules have a layer of their own in the picture."""

COSTLY = 10
"""How many ops and tensors are listed."""


@dataclasses.dataclass(frozen=True)
class OpRow:
    """An op: how often it runs, and the seconds that all of its evaluations take."""

    name: str
    target: str
    module: str
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, of whatever number of graphs.

    Attributes:
        graphs: how many it runs as.
        before, after: memory over it without and with rematerialization.
        always_bytes: what is held whatever the schedule; of several graphs, what is held at any time.
        baseline_seconds, seconds, overhead: of it without and with rematerialization, and the second over the first.
        counted: whether costs are numbers of ops or FLOPs, and no seconds.
    """

    graphs: int
    before: Course
    after: Course
    always_bytes: int
    baseline_seconds: float
    seconds: float
    overhead: float
    counted: bool

    @property
    def baseline_bytes(self) -> int:
        """The peak without rematerialization."""
        return int(self.before.nbytes.max(initial=0))

    @property
    def peak_bytes(self) -> int:
        """The peak with rematerialization."""
        return int(self.after.nbytes.max(initial=0))

    def cost(self, seconds: float) -> str:
        """A cost in words: a time, or a number where the cost model counts something else."""
        return _cost(seconds, self.counted)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A plan, looked at.

    Attributes:
        name: of the step.
        device: that the costs hold for.
        ops: how many ops the graph has.
        budget_bytes, floor_bytes: the budget, and what is held whatever the schedule.
        baseline_seconds, seconds, overhead: of a step without and with rematerialization, and the second over the first.
        lower_bound_seconds, gap, bound_scope: how much cheaper a schedule could be.
        solver, status, solve_seconds, notes: how the schedule was found.
        reserved_bytes, arrangement: of the device's allocator; 0 and "" where it is not modelled.
        counted: whether costs are numbers of ops or FLOPs, and no seconds.
        before, after: memory over the step without and with rematerialization.
        step: the whole step. What else is told is of the graph, which is the only one of most steps.
        peak_before, peak: the moments of both peaks.
        modules: what each group of modules costs.
        costly: the ops that take longest, all of their evaluations together.
        curve: the trade-off, the smallest peak first, this plan among it: of what was found, all that nothing is better than in
            both peak and time. Empty where it was not computed.
        peak_words: what sets the peak, a sentence each.
        changes: what would help most, the best first.
    """

    name: str
    device: str
    ops: int
    budget_bytes: int
    floor_bytes: int
    baseline_seconds: float
    seconds: float
    overhead: float
    lower_bound_seconds: float
    gap: float
    bound_scope: str
    solver: str
    status: str
    solve_seconds: float
    notes: tuple[str, ...]
    reserved_bytes: int
    arrangement: str
    host_bytes: int
    counted: bool
    before: Course
    after: Course
    step: Step
    peak_before: Moment
    peak: Moment
    modules: tuple[ModuleRow, ...]
    costly: tuple[OpRow, ...]
    curve: tuple[TradePoint, ...]
    peak_words: tuple[str, ...]
    changes: tuple[Change, ...]

    def cost(self, seconds: float) -> str:
        """A cost in words: a time, or a number where the cost model counts something else."""
        return _cost(seconds, self.counted)

    @property
    def cost_words(self) -> str:
        """What the times of this plan are, so that nobody takes them for measurements of the step."""
        if self.counted:
            return "Costs are whole numbers (ops, or FLOPs: the cost model 'unit' or 'flops'), and no seconds."
        if self.baseline_seconds <= 0:
            return "No times are known: ops cost nothing in this graph."
        return (
            "Times are predictions: the sum of what the plan's cost model gives each op, which 'profile' measures one op at a "
            "time and 'roofline' estimates from a device's figures. No step was timed."
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes that the forward leaves to the backward."""
        return sum(row.kept_bytes for row in self.modules)

    @property
    def again_seconds(self) -> float:
        """Seconds of what is computed again."""
        return sum(row.again_seconds for row in self.modules)


def analyse(plan: Planned, curve: Iterable[TradePoint] = ()) -> Analysis:
    """Look at a plan.

    Args:
        plan: the plan.
        curve: the trade-off of its graph, where it is known.
    """
    captured, points = plan.as_captured, _best(plan, curve)
    groups = Groups(op.module for graph in (plan.graph, captured) for op in graph.ops)
    before, after = Replay(captured, plan.baseline_schedule()), Replay(plan.graph, plan.schedule)
    peak_before, peak = before.peak(groups.name), after.peak(groups.name, COSTLY)
    layers = _layers(groups, peak_before, peak)
    courses = (course(before, groups.name, layers, format_bytes), course(after, groups.name, layers, format_bytes))
    return Analysis(
        name=plan.graph.name or "training step",
        device=plan.graph.device,
        ops=len(plan.graph.ops),
        budget_bytes=plan.budget_bytes,
        floor_bytes=plan.graph.floor_bytes,
        baseline_seconds=plan.baseline_seconds,
        seconds=plan.predicted_seconds,
        overhead=plan.overhead,
        lower_bound_seconds=plan.lower_bound_seconds,
        gap=plan.gap,
        bound_scope=plan.bound_scope,
        solver=plan.solver,
        status=str(plan.status.value if isinstance(plan.status, Enum) else plan.status),
        solve_seconds=plan.solve_seconds,
        notes=plan.notes,
        reserved_bytes=plan.predicted_reserved_bytes,
        arrangement=plan.arrangement,
        host_bytes=plan.host_bytes,
        counted=_counted(plan.graph),
        before=courses[0],
        after=courses[1],
        step=_step(plan, *courses),
        peak_before=peak_before,
        peak=peak,
        modules=module_rows(after, groups, plan.untiled),
        costly=_costly(plan.graph, plan.schedule),
        curve=points,
        peak_words=tuple(_peak_words(plan, after, peak)),
        changes=changes(plan, (before, peak_before), (after, peak), points),
    )


def _step(plan: Planned, before: Course, after: Course) -> Step:
    whole = plan.whole
    if whole is None:
        seconds = (plan.baseline_seconds, plan.predicted_seconds, plan.overhead)
        return Step(1, before, after, plan.graph.floor_bytes, *seconds, _counted(plan.graph))
    return Step(
        graphs=whole.graphs,
        before=course_of_whole(whole.before, whole.boundaries[0]),
        after=course_of_whole(whole.after, whole.boundaries[1]),
        always_bytes=whole.always_bytes,
        baseline_seconds=float(whole.before.seconds.sum()),
        seconds=float(whole.after.seconds.sum()),
        overhead=whole.overhead,
        counted=whole.counted,
    )


def _cost(cost: float, counted: bool) -> str:
    if not counted:
        return format_seconds(cost)
    return f"{cost:,.0f}" if math.isfinite(cost) else "-"


def _best(plan: Planned, curve: Iterable[TradePoint]) -> tuple[TradePoint, ...]:
    """The points of a curve than which none has a smaller peak and less time, with the plan among them."""
    found = sorted(set(curve), key=lambda point: (point.peak_bytes, point.seconds))
    if not found:
        return ()
    this = TradePoint(plan.budget_bytes, plan.predicted_peak_bytes, plan.predicted_seconds)
    kept, least = [], math.inf
    for point in found:
        if point.seconds < least:
            kept.append(point)
            least = point.seconds
    others = [point for point in kept if point[1:] != this[1:] and not _worse(point, this)]
    return tuple(sorted([*others, this], key=lambda point: (point.peak_bytes, -point.seconds)))


def _worse(point: TradePoint, than: TradePoint) -> bool:
    return point.peak_bytes >= than.peak_bytes and point.seconds >= than.seconds


def _counted(graph: ComputationGraph) -> bool:
    costs = [op.seconds for op in graph.ops]
    return any(costs) and all(cost == int(cost) for cost in costs)


def _layers(groups: Groups, *moments: Moment) -> Sequence[str]:
    """The groups that hold the most at either peak."""
    most: dict[str, int] = {}
    for moment in moments:
        for name, nbytes in moment.modules:
            if name in groups.count:
                most[name] = max(nbytes, most.get(name, 0))
    return sorted(most, key=lambda name: -most[name])[:LAYERS]


def _costly(graph: ComputationGraph, schedule: Schedule) -> tuple[OpRow, ...]:
    rows = [
        OpRow(op.name, op.target, op.module or OUTSIDE, count, count * op.seconds)
        for op, count in ((graph.ops[index], count) for index, count in schedule.evaluations.items())
    ]
    return tuple(sorted((row for row in rows if row.seconds > 0), key=lambda row: -row.seconds)[:COSTLY])


def _peak_words(plan: Planned, replay: Replay, peak: Moment) -> Iterable[str]:
    """What sets the peak, sentence by sentence."""
    if plan.predicted_peak_bytes > peak.nbytes:
        yield (
            f"Code that is not captured sets the peak of the step, {format_bytes(plan.predicted_peak_bytes)}, before the first "
            "graph's forward or after its backward: no schedule changes that."
        )
        return
    if not peak.op:
        yield f"No op runs: {format_bytes(peak.nbytes)} are held all through the step."
        return
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in peak.parts[:5])
    if peak.target == NEEDED:
        yield _elsewhere(plan, peak)
        yield f"Meanwhile this graph, and those before it, hold {parts}."
        return
    whose = peak.module or "An op outside of submodules"
    # Of several graphs any one may end outside of submodules.
    if plan.whole is None and replay.op(replay.timeline.peak_step) in loss_head(plan.graph):
        whose = "The loss head"
    yield f"{whose} sets the peak: {format_bytes(peak.nbytes)}, in the {peak.phase}, while {peak.op} ({peak.target}) runs."
    alive = [replay.held(one) for one in replay.alive(replay.timeline.peak_step)]
    passing = [held for held in alive if held.why == PASSING]
    yield from _said(passing, peak.nbytes, "there for the moment only")
    yield from _alike(alive, peak.nbytes)
    yield f"By what it is there for: {parts}."
    held_for = dict(peak.parts)
    gradients = plan.graph.gradient_bytes
    if gradients and plan.graph.resident_bytes < gradients / 2:
        beside = held_for.get(BESIDE, 0)
        yield (
            f"Of an optimizer's state, at most {format_bytes(beside)} are counted: Adam's would be about "
            f"{format_bytes(2 * gradients)} more."
        )
    if KEPT not in held_for and OLD not in held_for:
        yield "Nothing of it is kept for the backward: to keep less would not lower it."


def _elsewhere(plan: Planned, peak: Moment) -> str:
    """What sets the peak where that is not the plan's own graph."""
    there = plan.whole.after.timeline() if plan.whole is not None else None
    if there is None or there.peak_op == NEEDED:
        return f"Code that is not captured sets the peak, {format_bytes(peak.nbytes)}, after this graph's forward."
    where = there.peak_module or "an op outside of submodules"
    return f"Another graph sets the peak of the step: {format_bytes(there.peak_bytes)}, in {where} while {there.peak_op} runs."


def _said(found: Sequence[Held], whole: int, what: str) -> Iterable[str]:
    """Tensors by their names, where they matter."""
    nbytes = sum(held.nbytes for held in found)
    if found and nbytes >= 0.05 * whole:
        names = listed([f"{held.name} {format_bytes(held.nbytes)}" for held in found])
        yield f"{format_bytes(nbytes)} of it ({nbytes / whole:.0%}) are {what}: {names}."


def _alike(found: Sequence[Held], whole: int) -> Iterable[str]:
    """The shape whose tensors take the most."""
    by_shape: dict[str, list[Held]] = {}
    for held in found:
        if held.shape:
            by_shape.setdefault(held.shape, []).append(held)
    shape = max(by_shape, key=lambda one: sum(held.nbytes for held in by_shape[one]), default="")
    if len(by_shape.get(shape, ())) > 1:
        yield from _said(by_shape[shape], whole, f"{len(by_shape[shape])} tensors of {shape}")
