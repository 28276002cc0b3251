"""One graph with symbolic sizes, and few plans for all the sizes that it is called with.

Sizes are rounded up to a grid, and a plan is made at a point of the grid: its schedule runs for all sizes below that are
rounded up to it. Whether it fits is not inferred from that: for every new set of sizes, each schedule at hand is simulated
with the exact bytes of every tensor, and the one that takes least is verified (`lightning_remat.schedule.verify`). Where one
at hand adds next to nothing, none is made for that point of the grid. Times and workspaces are those measured at a point of
the grid above.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from lightning_remat.allocator import Footprint
from lightning_remat.capture import CapturedGraph
from lightning_remat.errors import InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._plan import Plan
from lightning_remat.schedule import Schedule, simulate, verify
from lightning_remat.solvers import Problem, Status
from lightning_remat.solvers._registry import ANY_ORDER

STEPS_A_DOUBLING = 4
"""Points of the grid from one size to twice that."""

SHARED = 0.02
"""Overhead up to which a plan at hand is taken where there is none for the point of the grid."""

Sizes = tuple[int, ...]


def rounded_up(size: int, most: int | None = None) -> int:
    """The smallest point of the grid that is no smaller, or ``most``."""
    exponent = math.ceil(math.log2(size) * STEPS_A_DOUBLING - 1e-9) if size > 1 else 0
    found = max(size, math.floor(2 ** (exponent / STEPS_A_DOUBLING)))
    return found if most is None else max(size, min(found, most))


@dataclasses.dataclass(frozen=True)
class SizedPlan:
    """What runs at one set of sizes.

    Attributes:
        number: of the plan whose schedule it is.
        plan: that schedule, at these sizes.
    """

    number: int
    plan: Plan


class SizedPlans:
    """Plans of a graph that was captured with symbolic sizes.

    Args:
        captured: the graph at a point of the grid, with costs.
        number, plan: the plan that was made for it.
        shared: whether a plan may be used beyond its own point of the grid: where a budget is so many bytes, not a share of
            something that depends on the sizes.
        measure: the same graph with costs.
        surround: a captured graph with what lies around it; the flag says whether random ops are evaluated again.
        make: plans a captured graph; gives the plan its number.
        allocated: whether a schedule of a graph is within so many bytes as the device's allocator sees it, and its footprint.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        number: int,
        plan: Plan,
        *,
        shared: bool,
        measure: Callable[[CapturedGraph], CapturedGraph],
        surround: Callable[[CapturedGraph, bool], ComputationGraph],
        make: Callable[[CapturedGraph], tuple[int, Plan]],
        allocated: Callable[[ComputationGraph, Schedule, int], tuple[bool, Footprint | None]],
    ) -> None:
        self._limits = captured.size_limits()
        self._measure, self._surround, self._make, self._shared = measure, surround, make, shared
        self._allocated = allocated
        corner = tuple(captured.sizes.values[symbol] for symbol in captured.symbols)
        self._costs: dict[Sizes, CapturedGraph] = {corner: captured}
        self._plans: dict[int, tuple[Sizes, Plan]] = {number: (corner, plan)}
        self._known: dict[Sizes, SizedPlan] = {}
        self._impossible: set[Sizes] = set()  # points of the grid for which there is no plan within the budget
        self._most_bytes: int | None = None

    def at(self, sizes: Sizes) -> SizedPlan:
        """What to run at these sizes.

        Raises:
            InfeasibleBudgetError: where no schedule was found that fits.
        """
        if sizes not in self._known:
            self._known[sizes] = self._found(sizes)
        return self._known[sizes]

    def come_down(self, budget_bytes: int) -> None:
        """From now on nothing that takes more than this will do."""
        self._most_bytes = budget_bytes
        self._known.clear()
        self._impossible.clear()

    def take(self, plans: Mapping[int, Plan]) -> None:
        """What lies around the graph has changed, and with it these plans: what was chosen for sizes is chosen anew."""
        self._plans = {number: (sizes, plans.get(number, plan)) for number, (sizes, plan) in self._plans.items()}
        self._known.clear()
        self._impossible.clear()

    def _found(self, sizes: Sizes) -> SizedPlan:
        corner = tuple(rounded_up(size, most) for size, most in zip(sizes, self._limits, strict=True))
        exact = next(iter(self._costs.values())).at(sizes)
        above = [one for one in self._costs if all(a >= b for a, b in zip(one, corner, strict=True))]
        if self._shared and above and corner not in above:
            found = self._best(exact, self._costs[min(above, key=math.prod)], corner)
            if found is not None and found.plan.overhead <= SHARED:
                return found
        costs = self._costs_at(corner, exact)
        found = self._best(exact, costs, corner)
        planned = any(made_for == corner for made_for, _ in self._plans.values())
        if found is not None and (planned or found.plan.overhead <= SHARED):
            return found
        if corner not in self._impossible:
            try:
                self._plan(corner, costs)
            except InfeasibleBudgetError:
                self._impossible.add(corner)
            found = self._best(exact, costs, corner)
        return found or self._plan(sizes, _with_costs_of(exact, costs))

    def _costs_at(self, corner: Sizes, exact: CapturedGraph) -> CapturedGraph:
        if corner not in self._costs:
            self._costs[corner] = self._measure(exact.at(corner))
        return self._costs[corner]

    def _plan(self, sizes: Sizes, captured: CapturedGraph) -> SizedPlan:
        number, plan = self._make(captured)
        self._plans[number] = sizes, plan
        return SizedPlan(number, plan)

    def _best(self, exact: CapturedGraph, costs: CapturedGraph, corner: Sizes) -> SizedPlan | None:
        """The fastest of the schedules at hand that fit at these sizes."""
        exact = _with_costs_of(exact, costs)
        found: list[tuple[float, int, ComputationGraph]] = []
        for number, (made_for, plan) in self._plans.items():
            if self._shared or made_for == corner:
                graph = self._surround(exact, plan.rematerializes)
                timeline = simulate(graph, plan.schedule)
                if timeline.peak_bytes <= self._budget(plan):
                    found.append((timeline.seconds, number, graph))
        for seconds, number, graph in sorted(found, key=lambda one: one[:2]):
            _, plan = self._plans[number]
            try:
                peak = verify(graph, plan.schedule, self._budget(plan))
            except ScheduleError:  # it writes over something of the same shape, which is not so at these sizes
                continue
            fits, footprint = self._allocated(graph, plan.schedule, self._budget(plan))
            if fits:
                return SizedPlan(number, dataclasses.replace(_moved(plan, graph, peak, seconds), footprint=footprint))
        return None

    def _budget(self, plan: Plan) -> int:
        return plan.budget_bytes if self._most_bytes is None else min(plan.budget_bytes, self._most_bytes)


def _with_costs_of(exact: CapturedGraph, costs: CapturedGraph) -> CapturedGraph:
    graph = exact.graph.with_costs(
        [op.seconds for op in costs.graph.ops], [op.workspace_bytes for op in costs.graph.ops]
    )
    return dataclasses.replace(exact, graph=graph.replace(device=costs.graph.device)).taking(costs.real_bytes)


def _moved(plan: Plan, graph: ComputationGraph, peak: int, seconds: float) -> Plan:
    """The plan's schedule at other sizes: the bound is that no schedule is faster than the step without rematerialization."""
    problem = Problem(graph)
    baseline = problem.evaluate(problem.captured)
    optimal = not plan.rematerializes
    return dataclasses.replace(
        plan,
        graph=graph,
        predicted_peak_bytes=peak,
        predicted_seconds=seconds,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        lower_bound_seconds=seconds if optimal else baseline.seconds,
        bound_scope=ANY_ORDER,
    )
