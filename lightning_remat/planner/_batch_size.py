"""Predicting a step at any batch size, and the largest batch that fits a budget at a bounded overhead."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from lightning_remat.errors import BudgetError, GraphError, InfeasibleBudgetError, RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._make import Progress
from lightning_remat.planner._plan import Plan
from lightning_remat.report import format_bytes
from lightning_remat.schedule import simulate
from lightning_remat.solvers import (
    OpSequence,
    Problem,
    Solution,
    find_smallest,
    largest_batch_size,
    linear_in_batch,
    moved,
    one_extra_forward,
    plain_batch_size,
)

SECONDS_A_SOLVE = 3.0
"""Time limit of one solve of the search, at most; the schedule that is trained with has the whole time limit."""

SOLVES = (3, 1)
"""Solves of one search, at most: of the first search, and of each later one, which follows a real step."""

OTHER_SOLVES = (8, 3)
"""The same for other solvers than "auto": no quick searches come before theirs."""

PRECISION = 0.03
"""The search stops when the answer is known to within this share; a step may be over the allowed time by as much."""


class BatchSizes:
    """Predicts a step at any batch size from two plans of it at different batch sizes.

    All bytes and seconds are taken to grow linearly with the batch size, on the line through the two.

    Args:
        small, large: two batch sizes, each with the plan of the step at it.
        config: solver, its options, and time limit.
        max_overhead: the most extra time, as a share of the step without rematerialization; ``None`` for one extra forward
            (Jain et al. 2020, eq. 10).
        progress: called with a text about the work in progress.

    Raises:
        GraphError: where the two are not the same ops on the same tensors.
    """

    def __init__(
        self,
        small: tuple[int, Plan],
        large: tuple[int, Plan],
        config: RematConfig,
        max_overhead: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._small = small
        self._config = config
        self._max_overhead = max_overhead
        self._progress = progress or (lambda _text: None)
        self._sequences: tuple[OpSequence, ...] = ()
        self._searched = False
        self._graph_of: Callable[[int], ComputationGraph] = _line(small, large)
        # What is compared with is the step as it was captured, where losses are computed in slices.
        self._captured_of = _line(small, large, lambda plan: plan.as_captured)

    @staticmethod
    def plain(size: int, plan: Plan, budget_bytes: int) -> int:
        """A batch size that fits without rematerialization, by one plan alone: the largest that does, or less."""
        return plain_batch_size(plan.graph, size, budget_bytes)

    def learn(self, size: int, plan: Plan) -> None:
        """Take in the plan of another batch size: its schedule, and the line through the small batch size and this one.

        The line stays as it was where the step has other ops at this size.
        """
        sequence = OpSequence.of_solution(plan.graph, plan.solution())
        if sequence is not None and sequence not in self._sequences:
            self._sequences = (*self._sequences, sequence)
        if size == self._small[0]:
            return
        try:
            self._graph_of = _line(self._small, (size, plan))
        except GraphError:  # other ops at that size
            return

    def largest(self, budget_bytes: int, at_most: int) -> int:
        """The largest batch size up to ``at_most`` with a schedule within budget and overhead; 0 for none."""
        config = self._config
        solves = SOLVES if config.solver == "auto" else OTHER_SOLVES
        found = largest_batch_size(
            self._graph_of,
            budget_bytes,
            method=config.solver,
            cap=self._cap,
            at_most=at_most,
            precision=PRECISION,
            solves=solves[self._searched],
            time_limit=min(SECONDS_A_SOLVE, config.time_limit),
            known=self._sequences,
            progress=self._progress,
            **config.solver_options,
        )
        self._searched = True
        self._sequences = found.sequences
        return found.batch_size

    def at_hand(self, graph: ComputationGraph, budget_bytes: int) -> Solution | None:
        """The cheapest schedule met by the searches that fits a graph, at any overhead; ``None`` where none does."""
        return moved(self._sequences, graph, budget_bytes)

    def allowed(self, graph: ComputationGraph, budget_bytes: int) -> Solution | None:
        """The same; ``None`` also where its overhead is over the bound."""
        found = self.at_hand(graph, budget_bytes)
        return found if found is not None and self._is_allowed(found.seconds, graph) else None

    @staticmethod
    def tells_apart(size: int, larger: int) -> bool:
        """Whether ``larger`` exceeds ``size`` by more than the precision of the search."""
        return larger > size * (1 + PRECISION)

    def largest_plain(self, budget_bytes: int, at_most: int) -> int:
        """The largest batch size that fits without rematerialization; 0 for none."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            problem = Problem(self._captured_of(middle))
            fits = problem.evaluate(problem.captured).peak_bytes <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low

    def samples_per_second(self, size: int) -> float:
        """Predicted samples per second of a step without rematerialization; 0 for a batch size of 0."""
        seconds = self._captured_of(size).seconds if size else 0.0
        return size / seconds if seconds else 0.0

    def allows(self, plan: Plan) -> bool:
        """Whether a plan's overhead is within the bound."""
        return self._is_allowed(plan.predicted_seconds, plan.graph)

    def _is_allowed(self, seconds: float, graph: ComputationGraph) -> bool:
        return seconds <= self._cap(graph) * (1 + PRECISION)

    def refusal(self, budget_bytes: int) -> RematError:
        """The error to raise when not even a batch of one sample fits the budget and the overhead."""
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


def _line(
    small: tuple[int, Plan],
    large: tuple[int, Plan],
    graph: Callable[[Plan], ComputationGraph] = operator.attrgetter("graph"),
) -> Callable[[int], ComputationGraph]:
    return functools.lru_cache(64)(linear_in_batch(graph(small[1]), small[0], graph(large[1]), large[0]))
