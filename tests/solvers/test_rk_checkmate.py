"""The integer program on computation nodes and data nodes."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph, Op, Tensor
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.hiremate._integer_program import solve_phases
from lightning_remat.solvers.hiremate._rk_checkmate import PHASES, data_flow, to_sequence
from tests.helpers.brute_force import cheapest_in_stages, cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


@pytest.mark.parametrize(("budget", "computed"), [(5, 24), (6, 21)])
def test_a_unit_chain_of_8_layers_has_checkmates_optimum(budget: int, computed: int) -> None:
    solution = solve(unit_chain(8), budget, "rk_checkmate", time_limit=60.0)
    assert solution.status is Status.OPTIMAL
    assert solution.seconds == computed
    assert solution.lower_bound_seconds == pytest.approx(computed, rel=1e-3)
    assert solution.bound_scope == PHASES


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_the_program_equals_brute_force_in_its_order_and_accounts_for_what_it_does(seed: int) -> None:
    problem = Problem(random_graph(seed, 5, 4, overwriting=False))
    peak = problem.evaluate(problem.captured).peak_bytes
    for budget in (peak - 1, peak - 3):
        result = solve_phases(data_flow(problem), budget, gap=0.0, deadline=time.monotonic() + 60)
        best = cheapest_in_stages(problem, budget)
        assert result.status is (Status.INFEASIBLE if math.isinf(best) else Status.OPTIMAL)
        if result.runs is None:
            continue
        evaluation = problem.evaluate(to_sequence(data_flow(problem), result.runs))
        assert evaluation.seconds == pytest.approx(result.seconds)
        assert evaluation.seconds == pytest.approx(best)
        assert evaluation.peak_bytes <= budget
        assert evaluation.seconds >= cheapest_of_any_order(problem, budget) - 1e-6
        assert result.bound_seconds <= best + 1e-6


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_schedules_pass_the_verifier(seed: int) -> None:
    graph = random_graph(seed, 6, 6)
    peak = Problem(graph).evaluate(Problem(graph).captured).peak_bytes
    for budget in (peak, max(1, peak - 3)):
        solution = solve(graph, budget, "rk_checkmate")  # verifies
        assert solution.peak_bytes <= budget
        assert (solution.schedule is None) == (solution.status in (Status.INFEASIBLE, Status.TIMEOUT))


@pytest.mark.long
def test_larger_problems_are_coarsened_and_claim_no_bound() -> None:
    graph = unit_chain(30)
    solution = solve(graph, 16, "rk_checkmate", coarsen_to=14)
    assert solution.schedule is not None
    assert solution.status is Status.FEASIBLE
    assert "61 ops coarsened" in solution.notes[0]
    assert solution.lower_bound_seconds == 61  # each op once: the bound that always holds


def test_what_must_exist_at_the_boundary_is_held_until_then() -> None:
    """As are new values of counters, which no op reads and which are made once."""
    graph = unit_chain(4)
    ops = list(graph.ops)
    tensors, storages = (*graph.tensors, Tensor("counter_out", len(graph.storages))), (*graph.storages, 1)
    ops.insert(1, Op("counter", "add", (), (len(tensors) - 1,), seconds=1.0, recomputable=False))
    graph = ComputationGraph(
        tuple(ops),
        tensors,
        storages,
        forward_transient=(len(tensors) - 1,),
        backward_outputs=graph.backward_outputs,
    )
    solution = solve(graph, 5, "rk_checkmate", time_limit=60.0)
    assert solution.status is Status.OPTIMAL
    assert solution.schedule is not None
    assert solution.seconds == cheapest_in_stages(Problem(graph), 5)


def test_no_schedule_within_a_tiny_budget() -> None:
    assert solve(unit_chain(6), 2, "rk_checkmate").status is Status.INFEASIBLE


def test_no_answer_within_no_time() -> None:
    solution = solve(unit_chain(16), 7, "rk_checkmate", time_limit=1e-6)
    assert solution.status is Status.TIMEOUT
    assert solution.schedule is None
