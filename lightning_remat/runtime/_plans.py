"""Keeping the plans of one step: which there are, which ran last, and which runs next (`Planning` makes them)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_remat._recent import Recent
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import CapturedGraph, Fusing, Tiling
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._device_memory import DeviceMemory
from lightning_remat.planner._late import with_late_gradients
from lightning_remat.planner._make import SECONDS_A_SIZE
from lightning_remat.planner._plan import FOR_NOW, FOR_ONCE, Plan
from lightning_remat.planner._surroundings import Surroundings, Weights, replay_bytes
from lightning_remat.planner._tiling import cheapest, forms
from lightning_remat.planner._together import Part, with_outside
from lightning_remat.runtime._call import Call, Shapes, growth
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._moving import WATCHED_RUNS
from lightning_remat.runtime._planning import Planning
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.runtime._sized_plans import SizedPlan, SizedPlans
from lightning_remat.solvers import Status

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_Planned = tuple[CapturedGraph, ComputationGraph, Plan]
"""A graph with costs, the same with what is held beside it, and its plan."""

MOST_PLAIN = 16
"""Sets of shapes at which the function itself fits, of those that were captured, with which others are compared."""

EAGER_EXTRA = 1.25
"""Factor by which eager mode may hold more than the captured step without rematerialization (float dropout masks)."""

MANY_SHAPES = 3
"""Sets of shapes for which the graphs of a call are measured and planned together at leisure; later ones quickly."""

DEGREE = 3
"""What a step holds grows with the sizes of what it is given to this power, at most (attention over pairs of residues)."""

SECONDS_A_PART = 1.0
"""Time limit of a plan that one of several graphs of a call runs by once, before they are planned together."""


class Plans:
    """The graphs of a step and their plans: which there are, which ran, which runs next.

    Args:
        planning: makes the plans.
        reasons: has the step's name.
        call: the present call.
        on_plan: called with every new plan.

    Attributes:
        all: the plans, in the order in which they were made; a plan's number is its index.
        runs: how often each plan's forward has run.
        graphs: the captured graphs.
        limit: the lowered budget, in bytes (see `come_down`); ``None`` where it is the one that was given.
        plain: the sets of shapes at which the function itself runs, since it fits, with the number of their call's
            largest plan.
        seconds: see `ScheduledStep.planning_seconds`.
        in_parts: the sets of shapes for which the graphs of a call were planned together.
    """

    def __init__(
        self, planning: Planning, reasons: Reasons, call: Call, on_plan: Callable[[Plan], None] | None = None
    ) -> None:
        self.planning = planning
        self.all: list[Plan] = []
        self.runs: list[int] = []
        self.graphs: list[Graph] = []
        self.limit: int | None = None
        self.plain: Recent[Shapes, int] = Recent()
        self._known_plain: Recent[Shapes, int] = Recent(MOST_PLAIN)  # that were captured, with their baseline peaks
        self._not_plain: Recent[Shapes, None] = Recent()  # that ran out of memory
        self.seconds = 0.0
        self.in_parts: Recent[Shapes, None] = Recent()
        self._reasons, self._call, self._on_plan = reasons, call, on_plan
        self._last: Plan | tuple[SizedPlans, SizedPlan] | None = None

    @property
    def last(self) -> Plan | None:
        """The plan that ran last (of several in one call, that with the largest peak); ``None`` before the first."""
        if isinstance(self._last, tuple):
            plans, sized = self._last
            return plans.plan(sized)
        return self._last

    @property
    def ran(self) -> list[Plan]:
        """The plans that the present call has run so far."""
        return [self.all[number] for _, number in self._call.ran]

    @property
    def last_sized(self) -> SizedPlan | None:
        """The last plan, where it has symbolic sizes."""
        return self._last[1] if isinstance(self._last, tuple) else None

    # -- what fits as it is -------------------------------------------------------------------------------------------

    def leave_plain(self, shapes: Shapes, number: int, plan: Plan | SizedPlan) -> None:
        """Run the function itself for these shapes, since it fits; ``number`` is that of the call's largest plan."""
        self.plain[shapes] = number
        self._known_plain[shapes] = plan.baseline_peak_bytes

    def is_plain(self, shapes: Shapes) -> bool:
        """Whether the function itself runs at these shapes: it fits, or must by what it holds at other sizes."""
        if shapes in self.plain:
            return True
        if not len(self._known_plain) or shapes in self._not_plain or not self.planning.budget_is_fixed:
            return False
        for known in list(self._known_plain):
            larger_by, number, held = growth(shapes, known), self.plain.get(known), self._known_plain.get(known)
            if larger_by is None or number is None or held is None:
                continue
            budget = self.all[number].budget_bytes if self.limit is None else self.limit
            if held * larger_by**DEGREE * EAGER_EXTRA <= budget:
                self.plain[shapes] = number
                return True
        return False

    def capture_though_it_fits(self, shapes: Shapes) -> bool:
        """Have a call of these shapes captured that has run as it is, by what it holds at others; returns whether it has."""
        if shapes not in self.plain or shapes in self._known_plain:
            return False
        self.plain.keep(lambda known, _: known != shapes)
        self._not_plain[shapes] = None
        return True

    # -- what has run -------------------------------------------------------------------------------------------------

    def runs_now(self, graph: Graph, number: int, plan: Plan | SizedPlan) -> None:
        """A graph's forward begins to run by this plan."""
        self.runs[number] += 1
        last = self._last[1] if isinstance(self._last, tuple) else self._last
        if not self._call.ran or last is None or plan.predicted_peak_bytes >= last.predicted_peak_bytes:
            if not isinstance(plan, SizedPlan):
                self._last = plan
            elif graph.sized is not None:
                self._last = graph.sized, plan

    def let_go_of_copies(self) -> None:
        """Before a call: drop the room for copies of watched buffers from the plans whose first runs are over."""
        for graph, number in self._call.ran:
            if self.runs[number] != WATCHED_RUNS or not (spare := graph.buffers.watched()):
                continue
            plan, before = self.all[number], graph.problem.resident_bytes
            graph.problem = graph.problem.replace(resident_bytes=before - spare)
            if plan.graph.resident_bytes == before:  # not where the plan evaluates nothing again, and copies nothing
                self.all[number] = self.planning.with_beside(plan, graph.memory, -spare)

    # -- making plans -------------------------------------------------------------------------------------------------

    def first(
        self, captured: CapturedGraph, weights: Weights, whole: bool, room_bytes: int, *, staged: bool = False
    ) -> tuple[CapturedGraph, ComputationGraph, Plan, Surroundings, DeviceMemory | None]:
        """Measure and plan a graph that was just captured.

        Args:
            captured: the graph.
            weights: see `Graph`.
            whole: whether it is the only graph of a call, as far as is known.
            room_bytes: see `Planning.made`.
            staged: whether its gradients leave it while it runs: then none is computed later than in eager mode, unless the
                budget takes it.

        Returns:
            The graph with costs, the same with the memory that is held beside it, its plan, that memory, and the CUDA
            device's memory.
        """
        make = functools.partial(self._first_within, captured, weights, whole, room_bytes, staged=staged)
        try:
            return make()
        except InfeasibleBudgetError as error:
            return self.or_smallest(error, make)

    def or_smallest(self, error: InfeasibleBudgetError, make: Callable[[], _Made]) -> _Made:
        """What is made in the place of what is infeasible: the smallest, if the budget is a share and a call has run by plans.

        Raises:
            InfeasibleBudgetError: the ``error`` elsewhere.
        """
        if parse_budget(self.planning.config.budget).kind is not BudgetKind.SHARE or not self._call.planned:
            raise error
        self._reasons.share_is_too_small(error)
        with self.planning.smallest():
            return make()

    def _first_within(
        self, captured: CapturedGraph, weights: Weights, whole: bool, room_bytes: int, *, staged: bool
    ) -> tuple[CapturedGraph, ComputationGraph, Plan, Surroundings, DeviceMemory | None]:
        one_of_many = bool(self.many(self._call.shapes))
        captured, cost_seconds = self.planning.measured(captured, traced=True, one_of_many=one_of_many)
        if staged and parse_budget(self.planning.config.budget).kind is not BudgetKind.MIN:
            with contextlib.suppress(InfeasibleBudgetError):
                return self._first(captured, cost_seconds, weights, whole, room_bytes, lambda form: form)
        return self._first(with_late_gradients(captured), cost_seconds, weights, whole, room_bytes, with_late_gradients)

    def _first(
        self,
        captured: CapturedGraph,
        cost_seconds: float,
        weights: Weights,
        whole: bool,
        room_bytes: int,
        ordered: Callable[[CapturedGraph], CapturedGraph],
    ) -> tuple[CapturedGraph, ComputationGraph, Plan, Surroundings, DeviceMemory | None]:
        """Plan a graph that was measured; ``ordered`` puts the ops of its other forms in order."""
        begins = not (any(self.runs) or self.plain or self._call.ran)
        around, memory = self.planning.on_device(captured, alone=not self._call.ran, begins=begins)
        part = bool(self._call.ran) or (len(self.in_parts) > 0 and not whole)

        def planned(form: CapturedGraph, seconds: float, **others: Any) -> _Planned:
            make = functools.partial(
                self.made,
                form,
                weights,
                around,
                memory,
                cost_seconds=seconds,
                whole=whole,
                room_bytes=room_bytes,
                least=around.sharded,  # units that are alike run by one plan until all are planned together
                **others,
            )
            problem, plan = self._for_now(make) if part and not around.sharded else make()
            return form, problem, plan

        def made(
            form: CapturedGraph,
            below_seconds: float = math.inf,
            budget_bytes: int | None = None,
            unimproved: bool = False,
        ) -> _Planned:
            others = {"below_seconds": below_seconds, "unimproved": unimproved}
            if form is captured:
                return planned(form, cost_seconds, **others)
            form, more_seconds = self.planning.measured(form)
            form, seconds = ordered(form), cost_seconds + more_seconds
            return planned(form, seconds, budget_bytes=budget_bytes, **others)

        def improved(unimproved: _Planned, below_seconds: float) -> _Planned:
            form, _, before = unimproved
            if before.status is Status.OPTIMAL:
                return unimproved
            form, problem, plan = planned(form, before.cost_seconds, improving=before, below_seconds=below_seconds)
            if plan is before:  # one that was made for an earlier capture
                return unimproved
            return form, problem, dataclasses.replace(plan, solve_seconds=before.solve_seconds + plan.solve_seconds)

        config, alone = self.planning.config, self._alone(captured, whole)
        fusing = Fusing(config.fuse) if alone and config.fuse != "off" else None
        losses = captured.tiled(Tiling.LOSSES) if alone and config.tiling == "losses" else None
        if alone and (config.tiling == "exact" or fusing is not None):
            within = around.put_around(captured, weights)
            fits, budget_bytes = self.planning.fits(captured, within, around.held_bytes)
            smallest = budget_bytes is None
            captured, problem, plan = cheapest(
                forms(losses or captured, fits=fits, tiled=config.tiling == "exact", fusing=fusing),
                functools.partial(made, budget_bytes=budget_bytes, unimproved=smallest),
                lambda made: made[2],
                smallest=smallest,
                improved=improved,
                whole=lambda form: form.tiling is None and fusing is None,
            )
        else:
            captured, problem, plan = made(losses or captured)
        self.planning.allocator.arrange(plan.footprint, captured.device)
        return captured, problem, plan, around, memory

    def _for_now(self, make: Callable[..., tuple[ComputationGraph, Plan]]) -> tuple[ComputationGraph, Plan]:
        """A graph and its plan for the present call, after which it is planned together with the other graphs."""
        if self.planning.config.time_limit <= SECONDS_A_PART:
            return make()
        many = self.many(self._call.shapes) > 0
        problem, plan = make(most_seconds=SECONDS_A_PART, moved="nearest" if many else "any")
        if FOR_ONCE in plan.notes:  # it is over the budget; in more time one may be found that is not
            return make(most_seconds=SECONDS_A_SIZE) if many else make()
        if plan.rematerializes and not any(plan is known for known in self.all):
            plan = dataclasses.replace(plan, notes=(*plan.notes, FOR_NOW))
        return problem, plan

    def _alone(self, captured: CapturedGraph, whole: bool) -> bool:
        """Whether a graph is the whole of a call, and its sizes do not vary: then it may be planned in other forms.

        How much the step without rematerialization holds at other sizes is told by the form that is planned.
        """
        return whole and not captured.symbols and not self._call.ran

    def made(
        self,
        captured: CapturedGraph,
        weights: Weights,
        around: Surroundings,
        memory: DeviceMemory | None,
        **others: Any,
    ) -> tuple[ComputationGraph, Plan]:
        """A graph with what is held beside it in the present call, and its plan (see `Planning.made`)."""
        earlier = [(self.all[number], graph.weights) for graph, number in self._call.ran]
        return self.planning.made(captured, weights, around, memory, known=self.all, earlier=earlier, **others)

    def larger_than_all(self, shapes: Shapes) -> bool:
        """Whether no set of shapes for which the graphs of calls were planned together is as large as this one."""
        ways = (growth(shapes, known) for known in list(self.in_parts))
        return all(by is None or by > 1 for by in ways)

    def many(self, shapes: Shapes) -> int:
        """For how many other sets of shapes than these the graphs of calls were planned together; 0 where they are few."""
        others = len(self.in_parts) - (shapes in self.in_parts)
        return others if others >= MANY_SHAPES else 0

    def together(
        self, parts: Sequence[Part], fixed: Sequence[int], memory: DeviceMemory | None, *, sizes: int
    ) -> list[Plan]:
        """Plans for the graphs of a call together; the first graphs keep their plans, by their numbers in ``fixed``."""
        schedules = [self.all[number].schedule for number in fixed]
        return self.planning.together(parts, schedules, memory, sizes=sizes)

    def again(self, graph: Graph, *, part: bool = False) -> None:
        """Plan a graph again if its plan is over the lowered budget, or has no room for copies of changing buffers.

        If ``part``, it is one of several graphs of a call, and keeps its plan where no other one is found.

        Raises:
            InfeasibleBudgetError: where no other plan is found, unless ``part``.
        """
        plan = self.all[graph.plan]
        copies = 0 if self.planning.agreement is not None else graph.buffers.unplanned_bytes
        limit = plan.budget_bytes if self.limit is None and (copies or graph.crowded) else self.limit
        if graph.sized is not None or graph.stays or limit is None or plan.predicted_peak_bytes + copies <= limit:
            return  # plans for symbolic sizes are chosen for each call
        graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + copies)
        graph.buffers.planned_bytes += copies
        try:
            made = self.planning.again(graph.problem, graph.captured, graph.memory)
        except InfeasibleBudgetError:
            if not part:
                raise
            graph.stays = True  # the whole may fit
            return
        except ScheduleError as error:
            graph.stays = True
            self.planning.refused(graph.problem, str(error), "the plan at hand stays")
            return
        graph.plan = self.add(made, graph)
        log.info(
            "%s, %s: %s",
            self._reasons.name or "captured graph",
            "with copies" if copies or graph.crowded else "within less",
            made.summary(),
        )

    def number_of(self, plan: Plan) -> int:
        """A plan's number; a new plan is added first (and has yet to be lowered)."""
        index = next((i for i, known in enumerate(self.all) if known is plan), len(self.all))
        if index == len(self.all):
            self.all.append(plan)
            self.runs.append(0)
        return index

    def add(self, plan: Plan, graph: Graph, captured: CapturedGraph | None = None) -> int:
        """Add a plan of a graph (in the form ``captured``), lower it so that it can run, and return its number."""
        captured = captured or graph.captured
        self.all.append(plan)
        self.runs.append(0)
        number = len(self.all) - 1
        graph.add(number, captured, plan.schedule)
        self.planning.allocator.arrange(plan.footprint, captured.device)
        self.tell(plan)
        return number

    def tell(self, plan: Plan) -> None:
        """Call ``on_plan`` with a new plan."""
        if self._on_plan is not None:
            self._on_plan(plan)

    # -- sizes that vary ----------------------------------------------------------------------------------------------

    def of_sizes(self, graph: Graph, captured: CapturedGraph, number: int) -> SizedPlans:
        """The plans for a graph with symbolic sizes, of which the one of this number is the first."""
        replayed = replay_bytes(captured)

        def surround(captured: CapturedGraph, replays: bool) -> ComputationGraph:
            around = graph.around.put_around(captured, graph.weights)
            return around if replays else around.replace(resident_bytes=around.resident_bytes - replayed)

        def make(captured: CapturedGraph, beside: Beside | None, budget_bytes: int | None) -> tuple[int, Plan]:
            put = NOTHING_BESIDE if beside is None else beside
            made = functools.partial(self.made, captured, graph.weights, graph.around, graph.memory, beside=put)
            within = functools.partial(made, budget_bytes=budget_bytes)
            with internals.real_tensors():
                try:
                    _, plan = within(most_seconds=SECONDS_A_SIZE)
                except InfeasibleBudgetError:
                    try:
                        _, plan = within()
                    except InfeasibleBudgetError as error:
                        _, plan = self.or_smallest(error, functools.partial(made, most_seconds=SECONDS_A_SIZE))
            return self.add(plan, graph, graph.captured if beside is None else with_outside(graph.captured)), plan

        def measure(captured: CapturedGraph) -> CapturedGraph:
            self._call.measures = True
            with internals.real_tensors():
                return self.planning.measured(captured, one_of_many=True)[0]

        return SizedPlans(
            captured,
            number,
            self.all[number],
            fixed=lambda: self.planning.budget_is_fixed,
            share=self.planning.share,
            measure=measure,
            surround=surround,
            make=make,
            allocated=functools.partial(self.planning.as_allocated, graph.memory),
        )

    def of_these_sizes(self, graph: Graph, args: Sequence[Any]) -> tuple[int, SizedPlan]:
        """What a graph with symbolic sizes runs for these arguments: a plan's number, and the plan at their sizes."""
        assert graph.sized is not None
        started = time.monotonic()
        sized = graph.sized.at(tuple(int(args[i]) for i in graph.arguments))
        self.seconds += time.monotonic() - started
        return sized.number, sized

    # -- another budget -----------------------------------------------------------------------------------------------

    def come_down(self, budget_bytes: int) -> None:
        """Lower the budget of all later plans to so many bytes."""
        self._limit_to(budget_bytes)
        self.planning.config = dataclasses.replace(self.planning.config, budget=budget_bytes)
        self._known_plain.keep(lambda shapes, held: shapes != self._call.shapes and held * EAGER_EXTRA <= budget_bytes)
        self.plain.keep(lambda shapes, _: shapes in self._known_plain)

    def take_the_smallest(self) -> None:
        """Make the smallest of all later plans, whatever the budget."""
        self._limit_to(None)
        self.planning.config = dataclasses.replace(self.planning.config, budget="min")

    def go_back(self, limit: int | None, config: RematConfig) -> None:
        """Plan as before a budget was lowered: the shapes at which the function itself runs are found out again."""
        self._limit_to(limit)
        self.planning.config = config

    def _limit_to(self, limit: int | None) -> None:
        self.limit = limit
        for graph in self.graphs:
            if graph.sized is not None:
                graph.sized.come_down(limit)

    def count(self, nbytes: int) -> None:
        """Count so many more bytes beside all graphs; a budget that is a share, or ``"min"``, grows by as many."""
        larger = nbytes if self.limit is None and not self.planning.budget_is_fixed else 0
        for graph in self.graphs:
            graph.around = dataclasses.replace(graph.around, resident_bytes=graph.around.resident_bytes + nbytes)
            graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + nbytes)
            graph.crowded = True
        owners = {number: graph for graph in self.graphs for number in graph.versions}
        for number, graph in owners.items():
            plan = self.planning.with_beside(self.all[number], graph.memory, nbytes, larger)
            if self._last is self.all[number]:
                self._last = plan
            self.all[number] = plan
        for graph in self.graphs:
            if graph.sized is not None:
                graph.sized.take({number: self.all[number] for number in graph.versions})


def fits_as_it_is(plan: Plan | SizedPlan) -> bool:
    """Whether the unchanged step fits a plan's budget with room to spare."""
    return plan.baseline_peak_bytes * EAGER_EXTRA <= plan.budget_bytes
