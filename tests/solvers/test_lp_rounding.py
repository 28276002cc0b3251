"""Checkmate's linear relaxation and its two-phase rounding."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time

import mip
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.schedule import verify
from lightning_remat.solvers import NodeSequence, Problem, Status, solve
from lightning_remat.solvers.checkmate import _lp_rounding as _registers  # noqa: F401
from lightning_remat.solvers.checkmate._integer_program import CAPTURED_ORDER, Program, fill_computations, solve_stages
from lightning_remat.solvers.checkmate._lp_rounding import _Allowances, round_checkpoints, sample_checkpoints
from lightning_remat.solvers.common._prune import required
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._stages import Stages, from_stages, to_stages
from tests.helpers.brute_force import cheapest_in_stages
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain


def smallest_budget(problem: Problem) -> int:
    peak = problem.evaluate(problem.captured).peak_bytes
    return next(b for b in range(1, peak + 1) if cheapest_in_stages(problem, b) < math.inf)


def confined(problem: Problem, seed: int) -> list[NodeSequence]:
    """Sequences that eq. 9 can express, of other origins than its rounding."""
    keeps = [frozenset(random.Random(seed + i).sample(range(len(problem.nbytes)), 2 * i)) for i in range(3)]
    sequences = [rollout(problem, keep, forget) for keep in keeps for forget in ([], range(len(problem.nbytes)))]
    sequences.append(recomputing_sequence(problem, seed))
    return [from_stages(problem, to_stages(problem, sequence)) for sequence in sequences]


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(3, 5), st.integers(3, 5))
def test_relaxation_at_most_program_at_most_every_method_confined_to_it(seed: int, forward: int, backward: int) -> None:
    problem = Problem(random_graph(seed, forward, backward, overwriting=False))
    assume(problem.boundary > 0)
    peak = problem.evaluate(problem.captured).peak_bytes
    low = smallest_budget(problem)
    with contextlib.closing(Program(problem, peak, "CBC")) as program:
        for budget in sorted({low, low + 1, (low + peak) // 2, peak}, reverse=True):
            value = program.relax(budget, 60)
            exact = solve_stages(problem, budget, gap=1e-6, deadline=time.monotonic() + 60)
            assert value is not None
            assert exact.sequence is not None
            best = problem.evaluate(exact.sequence).seconds
            assert sum(problem.seconds[node] for node in required(problem)) - 1e-6 <= value <= best + 1e-6
            shares = program.checkpoints()
            rounded = [round_checkpoints(problem, shares, threshold) for threshold in (0.2, 0.5, 0.8)]
            rounded += [sample_checkpoints(problem, shares, random.Random(seed)) for _ in range(2)]
            for sequence in (*rounded, *confined(problem, seed)):
                evaluation = problem.evaluate(sequence)
                assert evaluation.peak_bytes > budget or evaluation.seconds >= best
        program.relax(low - 1, 60)  # may be feasible, though no schedule is: it is a relaxation
        assert program.status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.INFEASIBLE)


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_another_budget_of_the_same_program_is_that_of_a_new_program(seed: int) -> None:
    problem = Problem(random_graph(seed, 5, 5, overwriting=False))
    assume(problem.boundary > 0)
    peak = problem.evaluate(problem.captured).peak_bytes
    with contextlib.closing(Program(problem, peak, "CBC")) as program:
        for budget in (peak - 3, peak, max(peak - 6, 1), peak - 1):
            again = program.relax(budget, 60)
            with contextlib.closing(Program(problem, budget, "CBC")) as fresh:
                expected = fresh.relax(budget, 60)
            assert (again is None) == (expected is None)
            if again is not None:
                assert again == pytest.approx(expected, rel=1e-6, abs=1e-6)


def violations(problem: Problem, stages: Stages, held: list[set[int]]) -> int:
    """How many of eqs. 1b and 1c do not hold."""
    count = 0
    outputs = set(problem.forward_outputs)
    for stage in range(len(problem) + 1):
        wanted = set(held[stage])
        if stage == problem.boundary:
            wanted |= {*outputs, *problem.forward_transient}
        if stage == len(problem):
            wanted |= set(problem.finals)
        if stage:
            for v in wanted:
                taken = v in outputs and stage - 1 >= problem.boundary
                tangent = problem.producer[v] < 0 and stage == problem.boundary
                made = problem.producer[v] in stages[stage - 1] or v in held[stage - 1]
                count += not (taken or tangent or made)
        if stage < len(problem):
            for node in stages[stage]:
                for v in problem.reads[node]:
                    taken = v in outputs and stage >= problem.boundary
                    count += not (taken or v in held[stage] or problem.producer[v] in stages[stage])
    return count


def random_checkpoints(problem: Problem, seed: int) -> list[set[int]]:
    """A random lower triangular S, with what the caller hands in held all through the backward."""
    rng = random.Random(seed)
    share = rng.choice([0.1, 0.3, 0.7])
    rows: list[set[int]] = []
    for stage in range(len(problem) + 1):
        made = [v for v, producer in enumerate(problem.producer) if 0 <= producer < stage and rng.random() < share]
        rows.append({*made, *(problem.tangents if stage >= problem.boundary else ())})
    return rows


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_algorithm_2_computes_what_the_checkpoints_need_and_nothing_else(seed: int, checkpoint_seed: int) -> None:
    problem = Problem(random_graph(seed, 7, 7, overwriting=False))
    assume(problem.boundary > 0)
    assume(all(problem.recomputable))
    held = random_checkpoints(problem, checkpoint_seed)
    stages = fill_computations(problem, held)
    assert violations(problem, stages, held) == 0
    diagonal = set(required(problem))
    for stage, row in enumerate(stages):
        assert max(row, default=0) <= stage
        assert stage in row or stage not in diagonal
        for node in row - ({stage} & diagonal):
            fewer = [*stages[:stage], row - {node}, *stages[stage + 1 :]]
            assert violations(problem, fewer, held) > 0


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_any_checkpoints_give_a_valid_schedule(seed: int, checkpoint_seed: int) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    held = [row - set(problem.tangents) for row in random_checkpoints(problem, checkpoint_seed)]
    verify(graph, problem.expand(from_stages(problem, fill_computations(problem, held))))


@given(st.floats(-0.9, 0.9))
def test_the_search_finds_the_allowance_from_which_on_it_fits(edge: float) -> None:
    search = _Allowances(largest=0.95)
    for remaining in range(20, 0, -1):
        allowance = search.following(remaining)
        if allowance is None:
            break
        search.tell(allowance, enough=allowance >= edge)
    assert search.high is not None
    assert edge <= search.high <= edge + 6e-3
    assert search.tried[0] == 0
    assert search.is_spread
    assert len(search.tried) == 20
    assert max(search.tried) <= 0.95
    beyond = sorted(allowance for allowance in search.tried if allowance >= search.high)
    assert max(b - a for a, b in itertools.pairwise([*beyond, 0.95])) < 0.5 * max(1, 1 - edge)


@pytest.mark.parametrize(("layers", "budget"), [(8, 5), (8, 6), (12, 7), (16, 8)])
@pytest.mark.parametrize("rounding", ["deterministic", "randomized"])
def test_unit_chains(layers: int, budget: int, rounding: str) -> None:
    graph = unit_chain(layers)
    exact = {(8, 5): 24, (8, 6): 21, (12, 7): 32, (16, 8): 43}[layers, budget]
    solution = solve(graph, budget, "lp_rounding", rounding=rounding, programs=16)
    assert exact <= solution.seconds <= 1.25 * exact
    assert len(graph.ops) < solution.lower_bound_seconds <= exact
    assert solution.bound_scope == CAPTURED_ORDER
    alone = solve(graph, budget, "lp_rounding", rounding=rounding, programs=16, fill_up=False)
    assert alone.seconds >= solution.seconds


def test_randomized_rounding_repeats_itself_for_a_seed() -> None:
    graph = unit_chain(12)
    found = {
        seed: [
            solve(graph, 7, "lp_rounding", rounding="randomized", samples=3, seed=seed, fill_up=False) for _ in range(2)
        ]
        for seed in range(4)
    }
    for first, second in found.values():
        assert first.schedule == second.schedule
    assert len({pair[0].schedule for pair in found.values()}) > 1
    with pytest.raises(SolverError, match="deterministic"):
        solve(graph, 7, "lp_rounding", rounding="up")


def test_a_budget_that_no_schedule_meets() -> None:
    solution = solve(unit_chain(8), 3, "lp_rounding")
    assert solution.status is Status.INFEASIBLE
    assert any("alone needs 4 bytes" in note for note in solution.notes)


def test_without_time_nothing_is_claimed() -> None:
    assert solve(unit_chain(8), 5, "lp_rounding", time_limit=1e-9).status is Status.TIMEOUT


def test_large_problems_are_coarsened_and_claim_no_bound() -> None:
    graph = unit_chain(60)
    solution = solve(graph, 24, "lp_rounding", time_limit=15, max_ops=40, coarsen_to=16)
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_seconds == len(graph.ops)  # the bound that holds always
    assert solution.seconds < 2 * len(graph.ops)
    assert "coarsened to" in solution.notes[0]


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(["deterministic", "randomized"]), st.booleans())
def test_schedules_pass_the_verifier_at_every_budget(seed: int, rounding: str, coarsened: bool) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    options = {"max_ops": 4, "coarsen_to": 6} if coarsened else {}
    for budget in range(peak, max(peak - 8, 0), -3):
        solution = solve(graph, budget, "lp_rounding", rounding=rounding, samples=2, programs=4, **options)  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget
        assert solution.lower_bound_seconds <= solution.seconds
