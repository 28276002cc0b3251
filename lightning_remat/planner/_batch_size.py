"""How a step grows with its batch, and the largest batch that fits a budget at a bounded overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_remat.errors import BudgetError, GraphError, InfeasibleBudgetError, RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._plan import Plan
from lightning_remat.report import format_bytes
from lightning_remat.schedule import simulate
from lightning_remat.solvers import Problem, find_smallest, linear_in_batch, one_extra_forward, solve

SECONDS_A_TRIAL = 1.5
"""Time limit of one solve of the search; the schedule that trains gets all of its own."""

PRECISION = 0.03
"""The search stops when the answer is known to within this share, and a confirming step may be over the cap by it."""


class BatchSizes:
    """What is predicted from one step at two batch sizes.

    Every byte and second is taken to grow on the line through the two.

    Args:
        small, large: a batch size and the plan of its step, each.
        config: solver, its options, and time limit.
        max_overhead: the most extra time, as a share of the step without rematerialization; ``None`` for one extra forward
            (Jain et al. 2020, eq. 10).

    Raises:
        GraphError: where the two are not the same ops on the same tensors.
    """

    def __init__(
        self, small: tuple[int, Plan], large: tuple[int, Plan], config: RematConfig, max_overhead: float | None = None
    ) -> None:
        self._small = small
        self._config = config
        self._max_overhead = max_overhead
        self._graph_of: Callable[[int], ComputationGraph] = _line(small, large)

    def learn(self, size: int, plan: Plan) -> None:
        """Take the line through the smaller batch size and this one from now on, where it is the same step."""
        if size == self._small[0]:
            return
        try:
            self._graph_of = _line(self._small, (size, plan))
        except GraphError:  # other ops at that size: what was known is still the best guess
            return

    def largest(self, budget_bytes: int, at_most: int) -> int:
        """The largest batch size for which a schedule is found within the budget and the overhead; 0 for none."""
        config, limit = self._config, min(SECONDS_A_TRIAL, self._config.time_limit)
        low, high = 0, at_most + 1
        middle = min(at_most, max(1, 2 * self.largest_plain(budget_bytes, at_most)))
        while high - low > 1 + PRECISION * low:
            graph = self._graph_of(middle)
            if self._fits(graph, budget_bytes, self._cap(graph), config, limit):
                low = middle
                middle = (low + high) // 2 if high <= at_most else min(2 * low, at_most)
            else:
                high = middle
                middle = (low + high) // 2
        return low

    @staticmethod
    def _fits(graph: ComputationGraph, budget: int, cap: float, config: RematConfig, limit: float) -> bool:
        """Whether a schedule within the budget and the cap is found; a bound often says at once that there is none."""
        first: list[tuple[str, dict[str, Any]]] = [("crossing", {})] if config.solver == "auto" else []
        for method, options in (*first, (config.solver, config.solver_options)):
            found = solve(graph, budget, method, limit, **options)
            if found.schedule is not None and found.seconds <= cap * (1 + 1e-9):
                return True
            if found.lower_bound_seconds > cap * (1 + 1e-9):
                return False
        return False

    @staticmethod
    def tells_apart(size: int, larger: int) -> bool:
        """Whether the search is exact enough for ``larger`` to be larger than ``size``."""
        return larger > size * (1 + PRECISION)

    def largest_plain(self, budget_bytes: int, at_most: int) -> int:
        """The largest batch size that fits without rematerialization; 0 for none."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            problem = Problem(self._graph_of(middle))
            fits = problem.evaluate(problem.captured).peak_bytes <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low

    def samples_per_second(self, size: int) -> float:
        """Of a step without rematerialization; 0 for a batch size of 0."""
        seconds = self._graph_of(size).seconds if size else 0.0
        return size / seconds if seconds else 0.0

    def allows(self, plan: Plan) -> bool:
        """Whether a plan's overhead is within the bound."""
        return plan.predicted_seconds <= self._cap(plan.graph) * (1 + PRECISION)

    def refusal(self, budget_bytes: int) -> RematError:
        """Why not even a batch of one sample will do."""
        graph = self._graph_of(1)
        least = find_smallest(graph, self._config.time_limit)
        assert least.schedule is not None
        if least.peak_bytes > budget_bytes:
            where = simulate(graph, least.schedule)
            return InfeasibleBudgetError(budget_bytes, least.peak_bytes, where.peak_op, where.peak_module)
        bound = "one extra forward" if self._max_overhead is None else f"{self._max_overhead:.0%}"
        return BudgetError(
            f"no batch size trains within {format_bytes(budget_bytes)} at an overhead of at most {bound}: allow a larger one, "
            "or give a larger budget"
        )

    def _cap(self, graph: ComputationGraph) -> float:
        """The most seconds that a step may take."""
        if self._max_overhead is None:
            return one_extra_forward(graph)
        return (1 + self._max_overhead) * graph.seconds


def _line(small: tuple[int, Plan], large: tuple[int, Plan]) -> Callable[[int], ComputationGraph]:
    return linear_in_batch(small[1].graph, small[0], large[1].graph, large[0])
