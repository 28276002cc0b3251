"""Moccasin's program against brute force, with few retention intervals and with as many as there can be."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._prune import drop_unused, once, required
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._stages import from_stages
from lightning_remat.solvers.moccasin._moccasin import Request, ask
from tests.helpers.brute_force import cheapest_in_stages, cheapest_of_any_order, interesting_budgets
from tests.helpers.graphs import random_graph, unit_chain

if importlib.util.find_spec("ortools") is None:
    pytest.skip("OR-Tools is an optional extra", allow_module_level=True)


def cheapest_with(problem: Problem, budget: int, intervals: int) -> float:
    """Seconds of the cheapest schedule in stages that evaluates no node more often than ``intervals``: all are tried."""
    order = required(problem)
    later = {node: range(node + 1, len(problem)) if problem.recomputable[node] else [] for node in order}
    choices = [
        [(node, *again) for count in range(intervals) for again in itertools.combinations(later[node], count)]
        for node in order
    ]
    best = math.inf
    for chosen in itertools.product(*choices):
        stages: list[set[int]] = [set() for _ in problem.reads]
        for node, in_stages in zip(order, chosen, strict=True):
            for stage in in_stages:
                stages[stage].add(node)
        evaluation = problem.evaluate(from_stages(problem, stages))
        if evaluation.peak_bytes <= budget:
            best = min(best, evaluation.seconds)
    return best


@settings(max_examples=3, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=8, max_size=8))
def test_the_program_equals_brute_force(seeds: list[int]) -> None:
    requests, expected = [], []
    for seed in seeds:
        problem = Problem(random_graph(seed, 3, 2 + seed % 3, overwriting=False))
        if problem.boundary == 0:  # all of the forward are views
            continue
        for budget in interesting_budgets(problem):
            if problem.evaluate(once(problem)).peak_bytes <= budget:
                continue
            in_stages, any_order = cheapest_in_stages(problem, budget), cheapest_of_any_order(problem, budget)
            for intervals, cheapest in ((len(problem), in_stages), (2, cheapest_with(problem, budget, 2))):
                requests.append(Request(problem, budget, time.time() + 300, intervals=intervals, gap=1e-6))
                expected.append((any_order, in_stages, cheapest))
    for request, answer, (any_order, in_stages, cheapest) in zip(requests, ask(requests), expected, strict=True):
        problem = request.problem
        if math.isinf(cheapest):  # but a start may evaluate a node more often than the program can
            assert answer.status in (Status.INFEASIBLE, Status.FEASIBLE)
            assert answer.sequence is None or in_stages < cheapest
            assert answer.lower_bound_seconds == 0
            continue
        assert answer.sequence is not None
        evaluation = problem.evaluate(answer.sequence)
        assert evaluation.peak_bytes <= request.budget_bytes
        # A first evaluation that nobody reads yet may wait, outside of stages: that can be cheaper than any in them.
        assert any_order <= evaluation.seconds <= cheapest
        assert answer.status is Status.OPTIMAL
        assert answer.lower_bound_seconds <= evaluation.seconds
        if evaluation.seconds == cheapest:
            assert answer.lower_bound_seconds == pytest.approx(cheapest, rel=1e-3)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_with_many_intervals_it_is_no_dearer_than_checkmates_program(seed: int) -> None:
    graph = random_graph(seed, 4, 4, overwriting=False)
    problem = Problem(graph)
    budget = interesting_budgets(problem)[1]
    checkmate = solve(graph, budget, "milp", gap=1e-6)
    assert solve(graph, budget, "moccasin", intervals=9, gap=1e-6).seconds == checkmate.seconds


def test_few_intervals_cost_something_on_some_random_graphs() -> None:
    """The property above would hold of graphs that never need rematerialization: these do, and one wants more than two."""
    repeats = dearer = infeasible = 0
    for seed in range(30):
        problem = Problem(random_graph(seed, 3, 4, overwriting=False))
        for budget in interesting_budgets(problem)[:4]:
            in_stages, twice = cheapest_in_stages(problem, budget), cheapest_with(problem, budget, 2)
            assert twice >= in_stages
            infeasible += math.isinf(in_stages)
            dearer += in_stages < twice
            repeats += sum(problem.seconds[node] for node in required(problem)) < twice < math.inf
    assert min(repeats, infeasible) >= 3
    assert dearer >= 1


@pytest.mark.parametrize(("layers", "budget", "computed"), [(8, 5, 24), (8, 6, 21), (12, 7, 32)])
def test_unit_chains(layers: int, budget: int, computed: int) -> None:
    solution = solve(unit_chain(layers), budget, "moccasin", time_limit=60)
    assert solution.seconds == computed
    assert solution.status is Status.OPTIMAL
    assert "3 times in all" in solution.bound_scope
    assert computed - 1 < solution.lower_bound_seconds <= computed


def test_two_intervals_a_node_do_not_always_do() -> None:
    """Eight layers in five units take a third evaluation somewhere: the schedule returned then is the start's."""
    few = solve(unit_chain(8), 5, "moccasin", time_limit=60, intervals=2)
    assert few.status is Status.FEASIBLE
    assert "infeasible" in few.notes[0]
    assert few.lower_bound_seconds == 17


def test_sizes_and_times_of_real_networks_are_scaled() -> None:
    graph = unit_chain(8).replace(storages=tuple(3 * 2**30 + 7 * i for i in range(17)))  # no common divisor
    graph = graph.with_costs([1e-6] * 17)
    solution = solve(graph, 6 * 3 * 2**30 + 1000, "moccasin", time_limit=60)
    assert solution.status is Status.OPTIMAL
    assert solution.seconds == pytest.approx(21e-6)
    assert solution.gap < 1e-3


def test_a_budget_below_one_op_is_refused_by_name() -> None:
    solution = solve(unit_chain(8), 3, "moccasin")
    assert solution.status is Status.INFEASIBLE
    assert any("alone needs 4 bytes" in note for note in solution.notes)


def test_the_start_is_returned_when_there_is_no_time() -> None:
    graph = unit_chain(8)
    problem = Problem(graph)
    start = rollout(problem, [], forget=range(8))  # everything again, for each backward op
    peak = problem.evaluate(start).peak_bytes
    solution = solve(graph, peak, "moccasin", time_limit=1e-6, start=start)
    assert solution.schedule is not None
    assert solution.seconds <= problem.evaluate(drop_unused(problem, start)).seconds
    assert solution.lower_bound_seconds == 17


@settings(max_examples=3, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 100)), min_size=15, max_size=15))
def test_every_schedule_passes_the_verifier(cases: list[tuple[int, int]]) -> None:
    requests = []
    for seed, share in cases:
        problem = Problem(random_graph(seed, 5, 5))
        low, high = problem.base_bytes + 1, problem.evaluate(problem.captured).peak_bytes
        requests.append(Request(problem, low + (high - low) * share // 100, time.time() + 60))
    answers = ask(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(request.problem, Problem)
        budget = request.budget_bytes
        if answer.sequence is None:
            assert answer.status is Status.INFEASIBLE
            assert request.problem.evaluate(once(request.problem)).peak_bytes > budget
        else:
            verify(request.problem.graph, request.problem.expand(answer.sequence), budget)


def test_it_runs_beside_the_other_solvers_libraries() -> None:
    """OR-Tools and python-mip's CBC cannot be loaded by one process, in either order."""
    for _ in range(2):
        assert solve(unit_chain(4), 5, "milp").seconds == solve(unit_chain(4), 5, "moccasin").seconds
    assert "ortools" not in sys.modules


def test_what_fails_in_the_other_process_is_said_here() -> None:
    broken = Problem(unit_chain(4))
    broken.nbytes = []
    with pytest.raises(SolverError, match="OR-Tools failed: IndexError"):
        ask([Request(broken, 5, time.time() + 10)])


def test_large_problems_are_coarsened_and_claim_no_bound() -> None:
    graph = unit_chain(60)
    solution = solve(graph, 24, "moccasin", time_limit=6, max_ops=40, coarsen_to=16)
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_seconds == len(graph.ops)  # the bound that holds always
    assert solution.seconds < 2 * len(graph.ops)
    assert "coarsened to" in solution.notes[0]
    refused = solve(graph, 3, "moccasin", time_limit=6, max_ops=40, coarsen_to=16)
    assert refused.status is Status.INFEASIBLE
    assert "this coarsening only" in refused.notes[-1]


def test_without_or_tools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(SolverError, match="pip install"):
        solve(unit_chain(3), 100, "moccasin")


def test_a_node_has_an_interval() -> None:
    with pytest.raises(SolverError, match="intervals=0"):
        solve(unit_chain(3), 100, "moccasin", intervals=0)
