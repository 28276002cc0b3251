"""A few plans of one graph with symbolic sizes, for all the sizes that it is called with.

Sizes are rounded up to a grid, and a plan is made at a point of the grid: its schedule runs for all sizes that are
rounded up to it. Whether it fits is not inferred from that: for every new set of sizes, each existing schedule is
simulated with the exact bytes of every tensor, and the fastest that fits is verified
(`lightning_remat.schedule.verify`). Where an existing one has next to no overhead, none is made for that point of the
grid. Times and workspaces are those measured at a point of the grid that is no smaller. For each set of sizes only a
few numbers are kept; its graph is made again when its plan is asked for.

What is held beside the graph (a loss that is computed outside of it) is measured at some sizes, and taken to grow as what
the graph returns; where it grows faster, larger sizes are measured too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from lightning_remat._recent import MOST, Recent
from lightning_remat.allocator import Footprint
from lightning_remat.capture import CapturedGraph
from lightning_remat.errors import InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside, floor_bytes
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._together import NOT_CAPTURED, with_outside
from lightning_remat.schedule import Schedule, simulate, verify
from lightning_remat.solvers import Problem, Status
from lightning_remat.solvers.common._registry import ANY_ORDER

STEPS_A_DOUBLING = 4
"""Points of the grid from one size to twice that."""

SHARED = 0.02
"""Overhead up to which an existing plan is taken where there is none for the point of the grid."""

MOST_SIZES = MOST
"""Sets of sizes for which the choice of a plan is kept, at most."""

MOST_POINTS = 512
"""Points of the grid whose costs are kept, at most."""

MOST_PLANS = 64
"""Plans of one graph after which a point of the grid is planned only if no plan of any point fits its budget."""

LITTLE_MORE = 0.1
"""Share of its peak by which a plan may hold more, since more was measured beside it, without being made anew."""

Sizes = tuple[int, ...]
"""The values of a graph's symbolic sizes."""


def rounded_up(size: int, most: int | None = None) -> int:
    """The smallest point of the grid from ``size`` on; ``most``, or ``size`` itself, where that is over ``most``."""
    exponent = math.ceil(math.log2(size) * STEPS_A_DOUBLING - 1e-9) if size > 1 else 0
    found = max(size, math.floor(2 ** (exponent / STEPS_A_DOUBLING)))
    return found if most is None else max(size, min(found, most))


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """The costs of every op at a point of the grid, in the captured order.

    Attributes:
        seconds, workspace_bytes: one per op.
        real_bytes: see `CapturedGraph.taking`.
        device: the device that they were measured on.
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    real_bytes: Mapping[int, int]
    device: str

    @classmethod
    def of(cls, captured: CapturedGraph) -> Costs:
        """The costs in a graph."""
        ops = captured.graph.ops
        return cls(
            tuple(op.seconds for op in ops),
            tuple(op.workspace_bytes for op in ops),
            captured.real_bytes,
            captured.graph.device,
        )

    def put_on(self, captured: CapturedGraph) -> CapturedGraph:
        """The graph, captured for other sizes, with these costs."""
        graph = captured.graph.with_costs(self.seconds, self.workspace_bytes).replace(device=self.device)
        return dataclasses.replace(captured, graph=graph).taking(self.real_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class SizedPlan:
    """The plan that runs at one set of sizes, and what is predicted of it there.

    Attributes:
        number: number of the plan whose schedule runs.
        made: that plan.
        sizes: the sizes.
        costs: the costs that are assumed for the ops at these sizes.
        resident_bytes: the graph's at these sizes.
        budget_bytes, predicted_peak_bytes, predicted_seconds, baseline_peak_bytes, baseline_seconds, footprint: see `Plan`.
        as_made: whether the plan was made for these very sizes.
    """

    number: int
    made: Plan
    sizes: Sizes
    costs: Costs
    budget_bytes: int
    resident_bytes: int
    predicted_peak_bytes: int
    predicted_seconds: float
    baseline_peak_bytes: int
    baseline_seconds: float
    footprint: Footprint | None
    as_made: bool = False

    @property
    def overhead(self) -> float:
        """See `Plan.overhead`."""
        return self.predicted_seconds / self.baseline_seconds - 1.0 if self.baseline_seconds > 0 else 0.0


class SizedPlans:
    """Plans of a graph that was captured with symbolic sizes.

    Args:
        captured: the graph at a point of the grid, with costs.
        number, plan: the plan that was made for it, and its number.
        fixed: whether the budget is a number of bytes, not a share of something that depends on the sizes: asked for each plan.
            If it is so at first, a plan may be used beyond its own point of the grid.
        share: given floor and baseline, returns the budget in bytes if that is a share, else 0.
        measure: returns a graph with costs.
        surround: returns a captured graph with what is held beside it; the flag says whether ops are evaluated again.
        make: plans a captured graph, with what was measured beside it (``None`` before it was), within so many bytes
            (``None`` for the configured budget); returns the number of the plan, and the plan.
        allocated: whether a schedule of a graph is within so many bytes by the model of the device's allocator, and its
            footprint.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        number: int,
        plan: Plan,
        *,
        fixed: Callable[[], bool],
        share: Callable[[int, int], int],
        measure: Callable[[CapturedGraph], CapturedGraph],
        surround: Callable[[CapturedGraph, bool], ComputationGraph],
        make: Callable[[CapturedGraph, Beside | None, int | None], tuple[int, Plan]],
        allocated: Callable[[ComputationGraph, Schedule, int], tuple[bool, Footprint | None]],
    ) -> None:
        self._limits = captured.size_limits()
        self._measure, self._surround, self._make, self._shared = measure, surround, make, fixed()
        self._allocated, self._share, self._fixed = allocated, share, fixed
        self._captured = captured
        corner = tuple(captured.sizes.values[symbol] for symbol in captured.symbols)
        self._costs: Recent[Sizes, Costs] = Recent(MOST_POINTS)
        self._costs[corner] = Costs.of(captured)
        self._plans: dict[int, tuple[Sizes, Plan]] = {number: (corner, plan)}
        self._known: Recent[Sizes, SizedPlan] = Recent(MOST_SIZES)
        self._impossible: Recent[Sizes, None] = Recent()  # points of the grid with no plan within the budget
        self._most_bytes: int | None = None
        self._exact: Recent[Sizes, CapturedGraph] = Recent(
            2
        )  # the graph at these sizes, and at their point of the grid
        self._measured: list[tuple[int, Beside]] = []  # beside the graph, with the bytes that it returned then
        self._written: tuple[SizedPlan, Plan] | None = None

    def at(self, sizes: Sizes) -> SizedPlan:
        """The plan to run at these sizes.

        Raises:
            InfeasibleBudgetError: where no schedule was found that fits.
        """
        known = self._known.get(sizes)
        if known is None:
            known = self._known[sizes] = self._found(sizes)
        return known

    def plan(self, sized: SizedPlan) -> Plan:
        """The whole plan, with the graph at these sizes."""
        if sized.as_made:
            return sized.made
        if self._written is None or self._written[0] is not sized:
            exact = self._with_costs(sized.sizes, sized.costs)
            graph = self._around(exact, sized.made.rematerializes, self.beside(sized.sizes))
            graph = graph.replace(resident_bytes=sized.resident_bytes)
            self._written = sized, _moved(sized, graph)  # the one that was asked for last
        return self._written[1]

    def beside(self, sizes: Sizes) -> Beside:
        """What is held beside the graph at these sizes, by what was measured; nothing before it was."""
        if not self._measured:
            return NOTHING_BESIDE
        returned, found = self._returned_bytes(sizes), NOTHING_BESIDE
        for nbytes, measured in self._measured:
            found = found.at_least(measured, returned / nbytes)
        return found

    def put_beside(self, sizes: Sizes, measured: Beside) -> Callable[[], None]:
        """Have plans count what was measured beside the graph at these sizes; returns a function that undoes this."""
        before = self._measured, self._plans
        self._measured = [*self._measured, (self._returned_bytes(sizes), measured)]
        # What was planned before anything was measured is of other ops.
        kept = {number: self._with_beside(*made) for number, made in self._plans.items() if before[0]}
        self._plans = {number: made for number, made in kept.items() if made is not None}
        self._forget()

        def undo() -> None:
            self._measured, self._plans = before
            self._forget()

        return undo

    def come_down(self, budget_bytes: int | None) -> None:
        """Lower the budget, if it is larger: plans for all sizes are chosen again within it.

        ``None`` puts back the budget that they were made for.
        """
        self._most_bytes = budget_bytes
        self._forget()

    def take(self, plans: Mapping[int, Plan]) -> None:
        """Take these plans in place of those of the same numbers: what is held beside the graph has changed.

        Plans for all sizes are chosen again.
        """
        self._plans = {number: (sizes, plans.get(number, plan)) for number, (sizes, plan) in self._plans.items()}
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._impossible.clear()
        self._written = None

    def _at(self, sizes: Sizes) -> CapturedGraph:
        """The graph at these sizes, without costs."""
        found = self._exact.get(sizes)
        if found is None:
            found = self._exact[sizes] = self._captured.at(sizes)
        return found

    def _returned_bytes(self, sizes: Sizes) -> int:
        graph = self._at(sizes).graph
        return max(1, sum(graph.storages[s] for s in {graph.tensors[t].storage for t in graph.forward_outputs}))

    def _with_costs(self, sizes: Sizes, costs: Costs) -> CapturedGraph:
        """The graph at these sizes; with an op for what runs beside it, once that was measured."""
        exact = costs.put_on(self._at(sizes))
        return with_outside(exact) if self._measured else exact

    def _around(self, exact: CapturedGraph, replays: bool, beside: Beside) -> ComputationGraph:
        graph = self._surround(exact, replays)
        return beside.put_beside(graph) if self._measured else graph

    def _found(self, sizes: Sizes) -> SizedPlan:
        corner = tuple(rounded_up(size, most) for size, most in zip(sizes, self._limits, strict=True))
        above = [one for one in self._costs if all(a >= b for a, b in zip(one, corner, strict=True))]
        if self._shared and above and corner not in above:
            costs = self._costs.get(min(above, key=math.prod))
            assert costs is not None
            found = self._best(costs, corner, sizes)
            if found is not None and found.overhead <= SHARED:
                return found
        costs = self._costs_at(corner)
        planned = any(made_for == corner for made_for, _ in self._plans.values())
        enough = not planned and len(self._plans) >= MOST_PLANS
        found = self._best(costs, corner, sizes, anywhere=enough)
        if found is not None and (planned or enough or found.overhead <= SHARED):
            return found
        if corner not in self._impossible:
            try:
                self._plan(corner, costs)
            except InfeasibleBudgetError:
                self._impossible[corner] = None
            found = self._best(costs, corner, sizes)
        return found or self._own(sizes, costs) or self._plan(sizes, costs)

    def _costs_at(self, corner: Sizes) -> Costs:
        known = self._costs.get(corner)
        if known is None:
            known = self._costs[corner] = Costs.of(self._measure(self._at(corner)))
        return known

    def _plan(self, sizes: Sizes, costs: Costs) -> SizedPlan:
        exact, beside = self._with_costs(sizes, costs), self.beside(sizes)
        if self._measured:
            number, plan = self._make(exact, beside, self._budget_at(exact, beside) or None)
            plan = self._with_elsewhere(plan, exact, beside)
        else:
            number, plan = self._make(exact, None, None)
        self._plans[number] = sizes, plan
        return _as_made(number, plan, sizes, costs)

    def _with_beside(self, sizes: Sizes, plan: Plan) -> tuple[Sizes, Plan] | None:
        """A plan that was made for these sizes, with what is beside it now; ``None`` where another one is to be made."""
        costs = self._costs.get(tuple(rounded_up(size, most) for size, most in zip(sizes, self._limits, strict=True)))
        if costs is None:
            return None
        exact, beside = self._with_costs(sizes, costs), self.beside(sizes)
        graph, elsewhere = self._around(exact, plan.rematerializes, beside), self._elsewhere(plan, exact, beside)
        peak = max(simulate(graph, plan.schedule).peak_bytes, elsewhere)
        budget = plan.budget_bytes if self._shared else max(peak, plan.budget_bytes)
        fits, footprint = self._allocated(graph, plan.schedule, budget)
        if not fits or peak > min(budget, (1 + LITTLE_MORE) * plan.predicted_peak_bytes):
            return None
        problem = Problem(graph)
        return sizes, dataclasses.replace(
            plan,
            graph=graph,
            budget_bytes=budget,
            predicted_peak_bytes=peak,
            baseline_peak_bytes=max(problem.evaluate(problem.captured).peak_bytes, elsewhere),
            footprint=footprint,
        )

    def _with_elsewhere(self, plan: Plan, exact: CapturedGraph, beside: Beside) -> Plan:
        """The plan with what is held while its graph does not run; no budget but a given size is less.

        Raises:
            InfeasibleBudgetError: where that is more than a given size.
        """
        nbytes = self._elsewhere(plan, exact, beside)
        if nbytes > plan.budget_bytes and self._fixed():
            raise InfeasibleBudgetError(plan.budget_bytes, nbytes, NOT_CAPTURED, "")
        return dataclasses.replace(
            plan,
            budget_bytes=max(nbytes, plan.budget_bytes),
            predicted_peak_bytes=max(nbytes, plan.predicted_peak_bytes),
            baseline_peak_bytes=max(nbytes, plan.baseline_peak_bytes),
        )

    def _elsewhere(self, plan: Plan, exact: CapturedGraph, beside: Beside) -> int:
        """Bytes that are held while the graph does not run, as far as they were measured."""
        return beside.elsewhere(self._surround(exact, plan.rematerializes)) if self._measured else 0

    def _own(self, sizes: Sizes, costs: Costs) -> SizedPlan | None:
        """A plan that was made for these very sizes and has a budget that is no larger than the present one."""
        most = math.inf if self._most_bytes is None else self._most_bytes
        for number, (made_for, plan) in self._plans.items():
            if made_for == sizes and plan.budget_bytes <= most:
                return _as_made(number, plan, sizes, costs)
        return None

    def _best(self, costs: Costs, corner: Sizes, sizes: Sizes, *, anywhere: bool = False) -> SizedPlan | None:
        """The fastest existing schedule that fits at these sizes; ``anywhere``: those made for other points too."""
        exact, beside = self._with_costs(sizes, costs), self.beside(sizes)
        found: list[tuple[float, int, ComputationGraph, int, int]] = []
        share = self._budget_at(exact, beside) if anywhere and not self._shared else 0
        for number, (made_for, plan) in self._plans.items():
            here = self._shared or made_for in (corner, sizes)
            if here or anywhere:
                graph = self._around(exact, plan.rematerializes, beside)
                budget = self._budget(plan.budget_bytes if here else share)
                timeline, elsewhere = simulate(graph, plan.schedule), self._elsewhere(plan, exact, beside)
                if max(timeline.peak_bytes, elsewhere) <= budget:
                    found.append((timeline.seconds, number, graph, budget, elsewhere))
        for seconds, number, graph, budget, elsewhere in sorted(found, key=lambda one: one[:2]):
            _, plan = self._plans[number]
            try:
                peak = verify(graph, plan.schedule, budget)
            except ScheduleError:  # it writes over something of the same shape, which is not so at these sizes
                continue
            fits, footprint = self._allocated(graph, plan.schedule, budget)
            if fits:
                problem = Problem(graph)
                baseline = problem.evaluate(problem.captured)
                return SizedPlan(
                    number=number,
                    made=plan,
                    sizes=sizes,
                    costs=costs,
                    budget_bytes=budget,
                    resident_bytes=graph.resident_bytes,
                    predicted_peak_bytes=max(peak, elsewhere),
                    predicted_seconds=seconds,
                    baseline_peak_bytes=max(baseline.peak_bytes, elsewhere),
                    baseline_seconds=baseline.seconds,
                    footprint=footprint,
                )
        return None

    def _budget(self, budget_bytes: int) -> int:
        return budget_bytes if self._most_bytes is None else min(budget_bytes, self._most_bytes)

    def _budget_at(self, exact: CapturedGraph, beside: Beside) -> int:
        """The budget in bytes at these sizes, where it is a share of what rematerialization can save there."""
        graph = self._around(exact, False, beside)
        problem = Problem(graph)
        return self._share(floor_bytes(graph), problem.evaluate(problem.captured).peak_bytes)


def _as_made(number: int, plan: Plan, sizes: Sizes, costs: Costs) -> SizedPlan:
    return SizedPlan(
        number=number,
        made=plan,
        sizes=sizes,
        costs=costs,
        budget_bytes=plan.budget_bytes,
        resident_bytes=plan.graph.resident_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        baseline_seconds=plan.baseline_seconds,
        footprint=plan.footprint,
        as_made=True,
    )


def _moved(sized: SizedPlan, graph: ComputationGraph) -> Plan:
    """The plan of a schedule at other sizes; its lower bound is the time of the step without rematerialization."""
    optimal = not sized.made.rematerializes
    return dataclasses.replace(
        sized.made,
        graph=graph,
        budget_bytes=sized.budget_bytes,
        predicted_peak_bytes=sized.predicted_peak_bytes,
        predicted_seconds=sized.predicted_seconds,
        baseline_peak_bytes=sized.baseline_peak_bytes,
        baseline_seconds=sized.baseline_seconds,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        lower_bound_seconds=sized.predicted_seconds if optimal else sized.baseline_seconds,
        bound_scope=ANY_ORDER,
        footprint=sized.footprint,
    )
