"""XLA's greedy, as Kumar et al. describe it."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph, Op, Tensor
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.xla._greedy_xla import _Greedy, greedy_remat
from tests.helpers.graphs import figure_1, random_graph, unit_chain


def chain_with_two_skips(sizes: dict[str, int]) -> ComputationGraph:
    """a -> b and c; d reads c; e reads b and d, f reads a, c and e."""
    reads = {"a": "", "b": "a", "c": "a", "d": "c", "e": "bd", "f": "ace"}
    names = "abcdef"
    ops = tuple(Op(n, n, tuple(names.index(r) for r in reads[n]), (i,), seconds=1.0) for i, n in enumerate(names))
    tensors = tuple(Tensor(f"{n}_out", i) for i, n in enumerate(names))
    return ComputationGraph(ops, tensors, tuple(sizes[n] for n in names), forward_outputs=(5,))


def test_figure_1_needs_three_units() -> None:
    solution = solve(figure_1(), 3, "greedy_xla")
    assert solution.peak_bytes == 3
    assert solution.seconds == 6
    assert isinstance(solution.schedule, Schedule)
    assert solution.schedule.evaluations[0] == 2


def test_the_op_that_lowers_the_memory_most_is_computed_again() -> None:
    sizes = {"a": 1, "b": 8, "c": 4, "d": 3, "e": 1, "f": 1}
    problem = Problem(chain_with_two_skips(sizes))
    assert problem.memory(problem.captured) == [1, 9, 13, 16, 17, 7]
    sequence = greedy_remat(problem, 15, math.inf)
    assert sequence is not None
    # At d, a (1) and b (8) are not in use: b goes. When it comes back, right before e, c goes in its turn.
    assert sequence.nodes == (0, 2, 3, 1, 4, 2, 5)
    assert problem.memory(sequence) == [1, 5, 8, 12, 13, 6, 7]


def test_what_must_be_held_longer_instead_counts() -> None:
    """Computing the small one again would hold the large one longer."""
    reads = {"a": "", "b": "a", "c": "", "d": "bc"}
    ops = tuple(Op(n, n, tuple("abcd".index(r) for r in reads[n]), (i,), seconds=1.0) for i, n in enumerate("abcd"))
    graph = ComputationGraph(
        ops, tuple(Tensor(f"{n}_out", i) for i, n in enumerate("abcd")), (9, 3, 5, 1), forward_outputs=(3,)
    )
    problem = Problem(graph)
    sequence = greedy_remat(problem, 7, math.inf)
    assert sequence is not None and sequence.nodes == (0, 1, 2, 3)


@pytest.mark.parametrize("layers", [8, 32, 128])
def test_memory_of_a_unit_chain_stays_linear(layers: int) -> None:
    """Section 4.1: little is saved on feed-forward networks, since chains are not computed again."""
    problem = Problem(unit_chain(layers))
    peaks = []
    for limit in range(2, layers + 2, max(1, layers // 8)):
        sequence = greedy_remat(problem, limit, math.inf)
        assert sequence is not None
        peaks.append(problem.evaluate(sequence).peak_bytes)
    assert layers / 2 <= min(peaks) < layers + 2


@given(st.integers(0, 10_000), st.integers(0, 20))
def test_what_it_takes_to_be_held_comes_to_nothing_in_the_end(seed: int, below: int) -> None:
    """All that was evaluated, given up, held longer after all and computed again is given back."""
    problem = Problem(random_graph(seed, 9, 9, overwriting=False))
    limit = problem.evaluate(once(problem)).peak_bytes - below
    greedy = _Greedy(problem, limit)
    sequence = greedy.run(math.inf)
    assert sequence is not None
    assert greedy.held == problem.base_bytes
    assert not any(greedy.alive)


@pytest.mark.parametrize("shapes", [(5, 5), (9, 9), (12, 3)])
@given(seed=st.integers(0, 10_000))
def test_schedules_pass_the_verifier_at_every_budget(shapes: tuple[int, int], seed: int) -> None:
    graph = random_graph(seed, *shapes)
    problem = Problem(graph)
    peak = problem.evaluate(once(problem)).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -2):
        solution = solve(graph, budget, "greedy_xla")  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget
        lower = solve(graph, budget, "greedy_xla", limit_bytes=max(1, budget - 3))
        assert lower.peak_bytes <= budget


def test_it_ends_at_its_deadline() -> None:
    assert greedy_remat(Problem(unit_chain(9)), 3, time.monotonic() - 1) is None
