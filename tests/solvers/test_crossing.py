"""The linear program for the moment between forward and backward."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.bounds._minimum_cut import BACKWARD_AFTER_FORWARD, CrossingProgram
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.hiremate._blocks import alive_after
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


def bound(problem: Problem, budget_bytes: int) -> float | None:
    with contextlib.closing(CrossingProgram(problem)) as program:
        return program.solve(program.room(budget_bytes))


@given(st.integers(0, 10_000))
@settings(max_examples=40)
def test_no_schedule_in_any_order_is_cheaper_than_the_bound(seed: int) -> None:
    problem = Problem(random_graph(seed, 5, 4))
    peak = problem.evaluate(once(problem)).peak_bytes
    for budget in range(peak, max(0, peak - 8), -2):
        best, proven = cheapest_of_any_order(problem, budget), bound(problem, budget)
        if proven is None:
            assert math.isinf(best)
        else:
            assert proven <= best + 1e-6


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_no_other_method_is_cheaper_than_the_bound(seed: int) -> None:
    graph = random_graph(seed, 8, 8)
    budget = int(0.8 * Problem(graph).evaluate(once(Problem(graph))).peak_bytes)
    proven = bound(Problem(graph), budget)
    for method in ("greedy", "treewidth", "griewank_logn", "linearized_greedy", "greedy_xla", "rotor"):
        solution = solve(graph, budget, method)
        if solution.schedule is not None:
            assert proven is not None and proven <= solution.seconds * (1 + 1e-6)


@pytest.mark.long
@given(st.integers(0, 10_000))
def test_schedules_are_within_the_budget_and_over_the_bound(seed: int) -> None:
    graph = random_graph(seed, 8, 8)
    peak = Problem(graph).evaluate(once(Problem(graph))).peak_bytes
    for budget in (peak, peak * 9 // 10, peak * 7 // 10):
        solution = solve(graph, budget, "crossing")  # verifies
        assert solution.peak_bytes <= budget
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.lower_bound_seconds <= solution.seconds * (1 + 1e-9)


def chain(layers: int) -> ComputationGraph:
    """`unit_chain` whose loss the caller takes when the forward ends."""
    return unit_chain(layers).replace(forward_outputs=(layers,))


def test_on_a_chain_the_bound_is_what_does_not_fit() -> None:
    """Of 8 results 4 can be held at the crossing beside the loss: the others run again."""
    problem = Problem(chain(8))
    assert bound(problem, 5) == pytest.approx(17 + 4)
    assert bound(problem, 100) == pytest.approx(17)
    solution = solve(chain(8), 6, "crossing")
    assert solution.bound_scope == BACKWARD_AFTER_FORWARD
    assert solution.schedule is not None and 17 + 3 <= solution.seconds <= 24


def test_what_is_held_is_what_the_program_holds() -> None:
    problem = Problem(chain(16))
    with contextlib.closing(CrossingProgram(problem)) as program:
        for count in (4, 8, 12):
            assert program.solve(count) is not None
            held = sum(problem.nbytes[v] for v in program.kept())
            assert held <= count + 1
            assert len(alive_after(problem, once(problem), problem.boundary)) >= held


def test_a_budget_that_not_even_the_outputs_fit_has_no_bound_and_no_schedule() -> None:
    assert bound(Problem(chain(4)), 0) is None
    assert solve(chain(4), 1, "crossing").status is Status.INFEASIBLE


def test_an_amount_that_was_just_solved_is_not_solved_again() -> None:
    with contextlib.closing(CrossingProgram(Problem(chain(8)))) as program:
        first, kept = program.solve(5), program.kept()
        program.bound = lambda *_: pytest.fail("solved again")
        assert program.solve(5) == first and program.kept() == kept
