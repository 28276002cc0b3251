"""REVOLVE: its counts, its memory, and its schedules on any graph."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.chen_griewank._griewank import advances, repetitions, revolve, split
from tests.helpers.graphs import random_graph, unit_chain


@cache
def fewest(steps: int, snapshots: int) -> int:
    """The recursion that the closed form solves: advance k steps, reverse what is behind, then what is before."""
    if steps <= 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(k + fewest(steps - k, snapshots - 1) + fewest(k, snapshots) for k in range(1, steps))


@pytest.mark.parametrize("snapshots", range(1, 9))
def test_the_closed_form_and_the_binomial_split_are_optimal(snapshots: int) -> None:
    for steps in range(1, 60):
        assert advances(steps, snapshots) == fewest(steps, snapshots)
        if snapshots > 1 and steps > 1:
            k = split(steps, snapshots)
            assert k + fewest(steps - k, snapshots - 1) + fewest(k, snapshots) == fewest(steps, snapshots)


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 13, 30, 64])
@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 8])
def test_counts_on_a_unit_chain_equal_the_closed_form(layers: int, snapshots: int) -> None:
    problem = Problem(unit_chain(layers))
    evaluation = problem.evaluate(revolve(problem, snapshots))
    assert evaluation.seconds == advances(layers, snapshots) + layers + 2
    assert evaluation.peak_bytes <= snapshots + 3


@pytest.mark.parametrize(
    ("layers", "budget", "computed"), [(8, 4, 38), (8, 5, 24), (8, 6, 21), (12, 7, 32), (16, 8, 43), (64, 7, 266)]
)
def test_the_method_takes_as_many_snapshots_as_fit(layers: int, budget: int, computed: int) -> None:
    """The first five are the optima of Checkmate's program."""
    solution = solve(unit_chain(layers), budget, "griewank_logn")
    assert solution.seconds == computed == advances(layers, budget - 3) + layers + 2
    assert solution.notes == (f"{budget - 3} snapshots",)


def test_memory_and_repetitions_grow_with_the_logarithm() -> None:
    for layers, snapshots in ((10, 3), (100, 5), (1000, 7)):
        assert repetitions(layers, snapshots) <= snapshots
        solution = solve(unit_chain(layers), snapshots + 3, "griewank_logn")
        assert solution.seconds <= (snapshots + 1) * layers + 2
    assert solve(unit_chain(8), 3, "griewank_logn").status is Status.INFEASIBLE


def test_too_long_schedules_are_not_tried() -> None:
    assert solve(unit_chain(200), 4, "griewank_logn", longest=30.0).status is Status.INFEASIBLE
    assert solve(unit_chain(200), 4, "griewank_logn", longest=60.0).seconds == 200 * 199 // 2 + 202


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_every_number_of_snapshots_gives_a_valid_schedule(seed: int, snapshots: int) -> None:
    graph = random_graph(seed, 12, 12)
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    problem.expand(revolve(problem, snapshots))
    for budget in range(peak, max(peak - 12, 0), -3):
        solution = solve(graph, budget, "griewank_logn")  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget
