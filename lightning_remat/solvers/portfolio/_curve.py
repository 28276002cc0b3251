"""The whole trade-off of a graph, from the smallest peak found to no rematerialization, in the time of a plan or two.

Budgets are solved from the largest down. Each has two quick starts: what the program of "crossing", which is built
once, holds for it, and the schedule of the next larger budget, lowered to it (`lower_peak`). Then, from the smallest
budget up, the schedule of the next smaller one is taken, and `keep_longer` run on it, where it is cheaper. So a larger
budget is never dearer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time

from lightning_remat.errors import BudgetError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.bounds._minimum_cut import BACKWARD_AFTER_FORWARD, CrossingProgram, schedules
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import finish, keep_longer, once
from lightning_remat.solvers.common._registry import Answer, solution_of
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.portfolio._smallest_peak import find_smallest_sequence


@dataclasses.dataclass(frozen=True)
class Curve:
    """The trade-off between memory and time of one graph.

    Attributes:
        solutions: verified ones, one a budget, the smallest first; ``solutions[-1]`` is without rematerialization.
        budgets_bytes: the budget of each.
        solve_seconds: wall time of all solves together.
    """

    solutions: tuple[Solution, ...]
    budgets_bytes: tuple[int, ...]
    solve_seconds: float

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget, which is the smallest peak found."""
        return self.budgets_bytes[0]

    def within(self, budget_bytes: int) -> Solution | None:
        """The cheapest of its solutions within a budget; ``None`` below the smallest."""
        fits = [solution for solution in self.solutions if solution.peak_bytes <= budget_bytes]
        return min(fits, key=lambda solution: (solution.seconds, solution.peak_bytes), default=None)


def plan_curve(
    graph: ComputationGraph, points: int = 24, time_limit: float = 30.0, *, work_limit: float | None = None
) -> Curve:
    """Solve ``graph`` for many budgets at once.

    Args:
        graph: the problem, with costs.
        points: number of budgets, evenly spaced from the smallest peak found to the peak without rematerialization.
        time_limit: seconds that it may take; budgets that are not reached get the schedule of a smaller one.
        work_limit: seconds of counted work, beside it (see `solve`).

    Raises:
        BudgetError: for fewer than two points, or a limit that is not positive.
    """
    if points < 2:
        raise BudgetError(f"points={points!r}: give two points or more")
    started = time.monotonic()
    with _clock.limited(time_limit, work_limit) as deadline:
        problem = Problem(graph)
        budgets, chosen, bounds = _schedules(problem, points, deadline)
    solutions = [
        solution_of(
            graph,
            problem,
            Answer(sequence, Status.FEASIBLE, bound, BACKWARD_AFTER_FORWARD if bound else ""),
            budget,
            "curve",
            {},
            started,
        )
        for sequence, bound, budget in zip(chosen, bounds, budgets, strict=True)
    ]
    return Curve(tuple(solutions), tuple(budgets), time.monotonic() - started)


def _schedules(problem: Problem, points: int, deadline: float) -> tuple[list[int], list[NodeSequence], list[float]]:
    """Budgets, the cheapest sequence that is found within each, and a lower bound for each in seconds (0: none)."""
    plain = once(problem)
    top = problem.evaluate(plain).peak_bytes
    lowest = find_smallest_sequence(problem, clock() + (deadline - clock()) / 3)
    bottom = problem.evaluate(lowest).peak_bytes
    budgets = [bottom + (top - bottom) * point // (points - 1) for point in range(points)]
    chosen: list[NodeSequence] = [lowest] * points
    chosen[-1] = plain
    bounds = [0.0] * points

    def seconds(sequence: NodeSequence) -> float:
        return problem.evaluate(sequence).seconds

    with contextlib.closing(CrossingProgram(problem)) as program:
        for point in range(points - 2, -1, -1):
            left = deadline - clock()
            if left <= 0:
                break
            budget = budgets[point]
            most = min(float(program.room(budget)), program.all_bytes)
            bounds[point] = program.solve(most, left) or 0.0
            amounts = [most * step / 12 for step in range(12, 5, -1)]
            found, _ = schedules(problem, program, amounts, budget, 2, deadline)
            lowered = lower_peak(problem, chosen[point + 1], budget, deadline)
            if problem.evaluate(lowered).peak_bytes <= budget:
                found.append(lowered)
            best = finish(problem, [chosen[point], *found], budget, deadline)
            assert best is not None
            chosen[point] = best
    for point in range(1, points):
        if (
            seconds(chosen[point - 1]) < seconds(chosen[point])
            or problem.evaluate(chosen[point]).peak_bytes > budgets[point]
        ):
            filled = keep_longer(problem, chosen[point - 1], budgets[point], max(deadline, clock() + 0.5))
            chosen[point] = filled
    return budgets, chosen, bounds
