"""Checkmate's program against brute force, its bounds, its warm starts, and the coarsening for larger problems."""

from __future__ import annotations

import gc
import math
import random
import time

import mip
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_remat.schedule import verify
from lightning_remat.solvers import NodeSequence, Problem, Status, solve
from lightning_remat.solvers.checkmate._integer_program import CAPTURED_ORDER, solve_stages
from lightning_remat.solvers.checkmate._milp import milp
from lightning_remat.solvers.common._coarsen import Coarsening, coarsen, contract
from lightning_remat.solvers.common._mip import Model
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import required
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._stages import best_start, from_stages, to_stages
from tests.helpers.brute_force import cheapest_in_stages, cheapest_of_any_order, interesting_budgets
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 4))
def test_the_program_equals_brute_force(seed: int, forward: int, backward: int) -> None:
    graph = random_graph(seed, forward, backward, overwriting=False)
    problem = Problem(graph)
    assume(problem.boundary > 0)  # not all of the forward are views
    for budget in interesting_budgets(problem):
        in_stages, any_order = cheapest_in_stages(problem, budget), cheapest_of_any_order(problem, budget)
        result = solve_stages(problem, budget, gap=1e-6, deadline=time.monotonic() + 60)
        if math.isinf(in_stages):
            assert result.sequence is None
            assert result.status is Status.INFEASIBLE
            continue
        assert result.sequence is not None
        assert result.status is Status.OPTIMAL
        evaluation = problem.evaluate(result.sequence)
        assert evaluation.seconds == in_stages
        assert evaluation.peak_bytes <= budget
        assert result.lower_bound_seconds <= in_stages
        assert result.lower_bound_seconds == pytest.approx(in_stages, rel=1e-3)
        solution = solve(graph, budget, "milp")
        assert any_order <= solution.seconds <= in_stages
        assert solution.lower_bound_seconds <= solution.seconds
        assert solution.status is Status.OPTIMAL


def test_some_random_graphs_exercise_every_case() -> None:
    """The property above would hold of graphs that never need rematerialization: these do, and some want another order."""
    repeats = dearer = infeasible = several_outputs = 0
    for seed in range(40):
        problem = Problem(random_graph(seed, 4, 4, overwriting=False))
        several_outputs += any(len(values) > 1 for values in problem.writes)
        for budget in interesting_budgets(problem):
            in_stages, any_order = cheapest_in_stages(problem, budget), cheapest_of_any_order(problem, budget)
            infeasible += math.isinf(in_stages)
            repeats += sum(problem.seconds[node] for node in required(problem)) < in_stages < math.inf
            dearer += any_order < in_stages
    assert min(repeats, dearer, infeasible, several_outputs) >= 3


@pytest.mark.parametrize(("layers", "budget", "computed"), [(8, 5, 24), (8, 6, 21), (12, 7, 32), (16, 8, 43)])
def test_unit_chains(layers: int, budget: int, computed: int) -> None:
    solution = solve(unit_chain(layers), budget, "milp", time_limit=300)
    assert solution.seconds == computed
    assert solution.status is Status.OPTIMAL
    assert solution.bound_scope == CAPTURED_ORDER
    assert computed - 1 < solution.lower_bound_seconds <= computed


def test_no_solver_is_left_to_the_garbage_collector() -> None:
    """Where that deletes one inside of cffi, the process waits for its own lock forever."""
    gc.collect()
    gc.disable()
    try:
        assert solve(unit_chain(8), 5, "milp").status is Status.OPTIMAL
        assert not [one for one in gc.get_objects() if issubclass(type(one), mip.solver.Solver)]
    finally:
        gc.enable()


def test_sizes_and_times_of_real_networks_are_scaled() -> None:
    graph = unit_chain(8).replace(storages=tuple(3 * 2**30 + 7 * i for i in range(17)))  # no common divisor
    graph = graph.with_costs([1e-6] * 17)
    solution = solve(graph, 5 * 3 * 2**30 + 1000, "milp")
    assert solution.status is Status.OPTIMAL
    assert solution.seconds == pytest.approx(24e-6)
    assert solution.gap < 1e-3


def test_a_budget_below_one_op_is_refused_by_name() -> None:
    solution = solve(unit_chain(8), 3, "milp")
    assert solution.status is Status.INFEASIBLE
    assert any("alone needs 4 bytes" in note for note in solution.notes)


def test_the_start_is_returned_when_there_is_no_time() -> None:
    problem = Problem(unit_chain(8))
    best = solve_stages(problem, 5, gap=1e-4, deadline=time.monotonic() + 60).sequence
    assert best is not None
    answer = milp(problem, 5, deadline=time.monotonic() - 1, start=best)
    assert answer.sequence == best
    assert answer.status is Status.FEASIBLE
    assert answer.lower_bound_seconds <= 17


def test_without_time_and_without_a_start_nothing_is_claimed() -> None:
    for seed in range(200):
        problem = Problem(random_graph(seed, 3, 4, overwriting=False))
        budget = interesting_budgets(problem)[1]
        if best_start(problem, budget, None) is None:
            break
    else:
        pytest.fail("no random graph that a simple schedule does not fit")
    assert cheapest_in_stages(problem, budget) < math.inf
    answer = milp(problem, budget, deadline=time.monotonic() - 1)
    assert answer.sequence is None
    assert answer.status is Status.TIMEOUT


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_sequences_and_stages(seed: int, sequence_seed: int) -> None:
    graph = random_graph(seed)
    problem = Problem(graph)
    for sequence in (recomputing_sequence(problem, sequence_seed), rollout(problem, [])):
        stages = to_stages(problem, sequence)
        staged = from_stages(problem, stages)
        verify(graph, problem.expand(staged))
        assert to_stages(problem, staged) == stages


def test_a_sequence_of_stages_is_taken_as_it_is() -> None:
    problem = Problem(unit_chain(3))  # f1 f2 f3 loss b3 b2 b1
    sequence = NodeSequence((0, 1, 2, 3, 0, 1, 4, 5, 0, 6), 4)
    assert to_stages(problem, sequence) == [{0}, {1}, {2}, {3}, {0, 1, 4}, {5}, {0, 6}]
    assert from_stages(problem, to_stages(problem, sequence)) == sequence


def random_runs(problem: PlainProblem, seed: int) -> tuple[range, ...]:
    rng = random.Random(seed)
    count = len(problem)
    cuts = {0, problem.boundary} | set(rng.sample(range(count), rng.randint(0, count)))
    starts = sorted(cuts - {count})
    return tuple(range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True))


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_coarse_schedule_is_never_worse_than_it_says(seed: int, runs_seed: int, sequence_seed: int) -> None:
    graph = random_graph(seed, 9, 9)
    fine = Problem(graph)
    runs = random_runs(fine, runs_seed)
    coarse = Coarsening(fine, contract(fine, runs), runs)
    assert coarse.problem.boundary == sum(run.start < fine.boundary for run in runs)
    for sequence in (coarse.problem.captured, recomputing_sequence(coarse.problem, sequence_seed)):  # type: ignore[arg-type]
        said, found = coarse.problem.evaluate(sequence), fine.evaluate(coarse.refine(sequence))
        assert found.peak_bytes <= said.peak_bytes
        assert found.seconds <= said.seconds + 1e-9
        verify(graph, fine.expand(coarse.refine(sequence)), said.peak_bytes)


@given(st.integers(0, 10_000), st.integers(2, 20))
def test_coarsening_keeps_the_boundary_and_the_size(seed: int, size: int) -> None:
    problem = Problem(random_graph(seed, 12, 12, overwriting=False))
    coarse = coarsen(problem, size)
    assert [node for run in coarse.runs for node in run] == list(range(len(problem)))
    assert len(coarse.problem) == len(coarse.runs) <= size
    assert all(run.stop <= problem.boundary or run.start >= problem.boundary for run in coarse.runs)
    assert sum(coarse.problem.seconds) == sum(problem.seconds)
    each = contract(problem, tuple(range(node, node + 1) for node in range(len(problem))))
    assert each.evaluate(each.captured).peak_bytes == problem.evaluate(problem.captured).peak_bytes


def test_backward_groups_match_forward_groups() -> None:
    problem = Problem(unit_chain(12))
    coarse = coarsen(problem, 6)
    for group, values in enumerate(coarse.problem.reads):
        sources = {coarse.problem.producer[v] for v in values}
        if coarse.problem.is_backward[group]:  # its own forward group, the one before it, and the chain
            assert len(sources) <= 3


def test_large_problems_are_coarsened_and_claim_no_bound() -> None:
    graph = unit_chain(60)
    solution = solve(graph, 24, "milp", time_limit=15, max_ops=40, coarsen_to=16)
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_seconds == len(graph.ops)  # the bound that holds always
    assert solution.seconds < 2 * len(graph.ops)
    assert "coarsened to" in solution.notes[0]
    refused = solve(graph, 5, "milp", time_limit=15, max_ops=40, coarsen_to=16)
    assert refused.status is Status.INFEASIBLE
    assert "this coarsening only" in refused.notes[-1]


def test_cbc_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Not even of a relaxation that is infeasible, or was never solved before."""
    model = Model()
    variables = [model.add_var(ub=1.0) for _ in range(4)]
    row = model.add_constr(mip.xsum(variables) >= 3)
    model.add_constr(variables[0] + variables[1] <= 0.5)
    model.add_constr(variables[2] + variables[3] <= 1.2)
    assert model.optimize(5.0, relax=True) is mip.OptimizationStatus.INFEASIBLE
    row.rhs = 1.0
    assert model.optimize(5.0, relax=True) is mip.OptimizationStatus.OPTIMAL
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
