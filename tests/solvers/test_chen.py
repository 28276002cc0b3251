"""Checkpoints every square root of n."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._segments import crossing, segment_ends
from tests.helpers.graphs import random_graph, unit_chain


@pytest.mark.parametrize("layers", [16, 64, 100, 256])
def test_memory_of_a_unit_chain_grows_with_the_root(layers: int) -> None:
    graph = unit_chain(layers)
    root = math.isqrt(layers)
    # One value a segment end, one segment's values, and what the running op holds beside.
    budget = 2 * root + 3
    solution = solve(graph, budget, "chen_sqrt")
    assert solution.status is Status.FEASIBLE
    assert isinstance(solution.schedule, Schedule)
    assert max(solution.schedule.evaluations.values()) == 2  # at most one more forward
    assert len(graph.ops) < solution.seconds <= len(graph.ops) + layers
    assert solve(graph, root, "chen_sqrt").status is Status.INFEASIBLE


def test_all_values_that_cross_an_end_are_kept() -> None:
    problem = Problem(unit_chain(9))
    assert segment_ends(9, 3) == [2, 5]
    assert crossing(problem, segment_ends(9, 3)) == {2, 5}
    assert segment_ends(1, 1) == []
    assert segment_ends(2, 5) == [0]


@given(st.integers(0, 10_000))
def test_schedules_pass_the_verifier_at_their_own_peak(seed: int) -> None:
    graph = random_graph(seed, 9, 9)
    problem = Problem(graph)
    ends = segment_ends(problem.boundary, max(1, math.isqrt(problem.boundary)))
    peak = problem.evaluate(drop_unused(problem, rollout(problem, crossing(problem, ends)))).peak_bytes
    baseline = problem.evaluate(once(problem)).peak_bytes
    solution = solve(graph, peak, "chen_sqrt")  # verifies
    assert solution.schedule is not None
    assert solution.peak_bytes <= peak
    if peak < baseline:
        assert solve(graph, peak - 1, "chen_sqrt").status is Status.INFEASIBLE
