"""Checkmate's program without frontier-advancing stages, against brute force and the partitioned program."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.checkmate import _milp_unpartitioned as _registers  # noqa: F401
from lightning_remat.solvers.checkmate._integer_program import Program, solve_program
from lightning_remat.solvers.checkmate._milp_unpartitioned import UNPARTITIONED, UnpartitionedProgram
from tests.helpers.brute_force import _cheapest, _mask, _Rules, cheapest_in_stages, cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


def cheapest_unpartitioned(problem: Problem, budget: int) -> float:
    """Seconds of the cheapest schedule of as many stages as there are nodes, each in the captured order with every node at
    most once; the first ``boundary`` stages evaluate forward nodes. Infinity where none fits."""
    rules = _Rules(problem, budget)
    count, boundary = len(problem), problem.boundary
    kinds = [
        [node for node in range(count) if flags[node]]
        for flags in (problem.random, [not f for f in problem.recomputable])
    ]
    effects = _mask(kinds[0] + kinds[1])
    before_boundary = _mask([node for node in range(boundary) if effects >> node & 1])

    def allowed(node: int, done: int) -> bool:
        if done >> node & 1:
            return bool(problem.recomputable[node])
        return all(done >> other & 1 for kind in kinds if node in kind for other in kind if other < node)

    def moves(state: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        stage, position, present, done = state
        backward = stage >= boundary
        if position == (count if backward else boundary):
            if stage + 1 == boundary:
                if rules.crossing & ~present or before_boundary & ~done:
                    return
                present |= rules.tangents
            if stage + 1 == count:
                if not rules.finals & ~present and not effects & ~done:
                    yield 0.0, ()
                return
            yield 0.0, (stage + 1, 0, present, done)
            return
        if rules.runs(position, present, backward) and allowed(position, done):
            after = done | (effects & 1 << position)
            yield problem.seconds[position], (stage, position + 1, present | rules.writes[position], after)
        yield 0.0, (stage, position + 1, present, done)
        for fewer in rules.drops(present, backward):
            yield 0.0, (stage, position, fewer, done)

    return _cheapest((0, 0, 0, 0), moves) if rules.starts() else math.inf


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(2, 3))
def test_the_program_equals_brute_force(seed: int, forward: int, backward: int) -> None:
    problem = Problem(random_graph(seed, forward, backward, overwriting=False))
    assume(problem.boundary > 0)
    peak = problem.evaluate(problem.captured).peak_bytes
    for budget in range(peak, max(peak - 6, 0), -2):
        expected = cheapest_unpartitioned(problem, budget)
        assert cheapest_of_any_order(problem, budget) <= expected <= cheapest_in_stages(problem, budget)
        with contextlib.closing(UnpartitionedProgram(problem, budget, "CBC")) as program:
            result = solve_program(program, None, 1e-6, time.monotonic() + 60)
        if math.isinf(expected):
            assert result.status is Status.INFEASIBLE
            continue
        assert result.status is Status.OPTIMAL
        assert result.sequence is not None
        assert problem.evaluate(result.sequence).seconds == expected
        assert problem.evaluate(result.sequence).peak_bytes <= budget


def test_some_schedules_are_cheaper_without_the_partition() -> None:
    cheaper = 0
    for seed in range(40):
        problem = Problem(random_graph(seed, 3, 3, overwriting=False))
        if problem.boundary == 0:
            continue
        peak = problem.evaluate(problem.captured).peak_bytes
        for budget in range(peak - 1, max(peak - 5, 0), -1):
            cheaper += cheapest_unpartitioned(problem, budget) < cheapest_in_stages(problem, budget)
    assert cheaper > 0


def test_the_chain_of_section_4_6_costs_the_same_as_with_the_partition() -> None:
    graph = unit_chain(8)
    assert cheapest_of_any_order(Problem(graph), 4) == 38  # so no program can do better
    assert solve(graph, 4, "milp").seconds == 38
    solution = solve(graph, 4, "checkmate_unpartitioned", time_limit=4)
    assert solution.seconds == 38
    assert solution.lower_bound_seconds <= 38


def test_a_small_chain_is_solved_to_the_optimum() -> None:
    graph = unit_chain(3)
    problem = Problem(graph)
    solution = solve(graph, 4, "checkmate_unpartitioned")
    assert solution.status is Status.OPTIMAL
    assert solution.seconds == cheapest_unpartitioned(problem, 4) == cheapest_of_any_order(problem, 4)
    assert solution.bound_scope == UNPARTITIONED


def test_the_partition_tightens_the_relaxation() -> None:
    """Appendix A, section 4.6: integrality gaps of 1.18 with frontier-advancing stages and 21.56 without."""
    problem = Problem(unit_chain(8))
    values = []
    for kind in (Program, UnpartitionedProgram):
        with contextlib.closing(kind(problem, 4, "CBC")) as program:
            values.append(program.relax(4, 60))
    partitioned, unpartitioned = values
    assert partitioned is not None
    assert unpartitioned is not None
    assert 38 / partitioned <= 1.18
    assert 38 / unpartitioned > 5


def test_larger_problems_are_refused() -> None:
    solution = solve(unit_chain(12), 7, "checkmate_unpartitioned")
    assert solution.status is Status.REFUSED
    assert "refused: 25 ops" in solution.notes[0]
    assert solve(unit_chain(8), 3, "checkmate_unpartitioned").status is Status.INFEASIBLE


@pytest.mark.parametrize("budget_below", [1, 3])
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_schedules_pass_the_verifier(budget_below: int, seed: int) -> None:
    graph = random_graph(seed, 4, 4, overwriting=budget_below == 1)
    problem = Problem(graph)
    budget = max(1, problem.evaluate(problem.captured).peak_bytes - budget_below)
    solution = solve(graph, budget, "checkmate_unpartitioned", time_limit=1)  # verifies
    assert solution.peak_bytes <= budget
    if not any(problem.overwrites):
        assert solution.seconds <= solve(graph, budget, "milp", time_limit=1).seconds + 1e-9
