"""The backward in another order: the same results, and less memory where branches join."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, find_smallest, solve
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.heuristics._reorder import backward_memory, reorder
from tests.helpers.graphs import joined_branches, random_graph, unit_chain


def test_the_branch_that_needs_most_runs_while_least_waits() -> None:
    graph = joined_branches()
    problem = Problem(graph)
    assert problem.evaluate(once(problem)).peak_bytes == 1 + 8 + 2 + 8 + 12
    other = reorder(problem, time.monotonic() + 60)
    assert other is not None
    names = [other.name(node) for node in other.captured.nodes]
    assert names.index("large") < names.index("small")
    assert problem.evaluate(other.original(other.captured)).peak_bytes == 1 + 1 + 2 + 8 + 12
    smallest = find_smallest(graph)
    assert smallest.peak_bytes == 1 + 1 + 2 + 8 + 12
    assert smallest.seconds == len(graph.ops)  # nothing is computed twice for it
    found = solve(graph, smallest.peak_bytes, "auto", exact_up_to=0)
    assert found.seconds == len(graph.ops)


def test_a_chain_has_one_order() -> None:
    assert reorder(Problem(unit_chain(8)), time.monotonic() + 60) is None


@given(st.integers(0, 10_000))
@settings(max_examples=150)
def test_another_order_is_one_of_the_same_problem_and_takes_less(seed: int) -> None:
    graph = random_graph(seed, 5, 9)
    problem = Problem(graph)
    captured = list(range(problem.boundary, len(problem)))
    other = reorder(problem, time.monotonic() + 60)
    if other is None:
        return
    assert sorted(other.order) == list(range(len(problem)))
    backward = other.order[problem.boundary :]
    assert max(backward_memory(problem, backward)) <= max(backward_memory(problem, captured))
    assert backward_memory(other, captured) == backward_memory(problem, backward)
    original = other.original(once(other))
    assert problem.evaluate(original) == other.evaluate(once(other))
    verify(graph, problem.expand(original), None)
    pinned = [n for n in captured if problem.random[n] or not problem.recomputable[n]]
    assert [n for n in backward if n in pinned] == pinned


@given(st.integers(0, 10_000))
@settings(max_examples=100)
def test_no_step_in_an_order_takes_less_than_its_backward(seed: int) -> None:
    problem = Problem(random_graph(seed, 5, 6))
    other = reorder(problem, time.monotonic() + 60) or problem
    plain = once(other)
    backward = [node for node in plain.nodes if node >= problem.boundary]
    least = problem.base_bytes + max(backward_memory(other, backward), default=0)
    for keep in ((), range(len(problem.nbytes))):
        assert other.evaluate(drop_unused(other, rollout(other, keep))).peak_bytes >= least


@given(st.integers(0, 10_000))
@settings(max_examples=100)
def test_a_schedule_is_contracted_to_what_it_was_expanded_from(seed: int) -> None:
    problem = Problem(random_graph(seed))
    sequence = once(problem)
    assert problem.contract(problem.expand(sequence)) == sequence
    assert problem.contract(problem.expand(problem.captured)) == problem.captured
