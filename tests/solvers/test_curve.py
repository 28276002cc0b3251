"""The whole trade-off at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.errors import BudgetError
from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, find_smallest, plan_curve, solve
from lightning_remat.solvers.common._prune import once
from tests.helpers.graphs import random_graph, unit_chain


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_more_memory_is_never_dearer(seed: int) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    curve = plan_curve(graph, 8)
    assert len(curve.solutions) == len(curve.budgets_bytes) == 8
    assert list(curve.budgets_bytes) == sorted(curve.budgets_bytes)
    assert curve.smallest_bytes == find_smallest(graph).peak_bytes
    for solution, budget in zip(curve.solutions, curve.budgets_bytes, strict=True):
        assert solution.schedule is not None
        assert verify(graph, solution.schedule, budget) == solution.peak_bytes
        assert solution.lower_bound_seconds <= solution.seconds * (1 + 1e-6)
    seconds = [solution.seconds for solution in curve.solutions]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == problem.evaluate(once(problem)).seconds


def test_a_curve_is_read_at_any_budget() -> None:
    curve = plan_curve(unit_chain(12), 10)
    assert curve.within(curve.smallest_bytes - 1) is None
    for budget in range(curve.smallest_bytes, 30):
        found = curve.within(budget)
        assert found is not None and found.peak_bytes <= budget
    assert curve.within(30) is not None and curve.within(30).seconds == 25  # type: ignore[union-attr]


@pytest.mark.long
def test_a_curve_is_near_what_single_plans_find() -> None:
    graph = unit_chain(24)
    curve = plan_curve(graph, 24, 300.0)
    for solution, budget in list(zip(curve.solutions, curve.budgets_bytes, strict=True))[4::8]:
        assert solution.seconds <= 1.1 * solve(graph, budget, "auto").seconds


@pytest.mark.parametrize(("points", "limit"), [(1, 30.0), (5, 0.0)])
def test_a_curve_of_nothing_is_refused(points: int, limit: float) -> None:
    with pytest.raises(
        BudgetError, match="give two points or more" if limit else "a time limit of 0.0: give a positive"
    ):
        plan_curve(unit_chain(4), points, limit)
