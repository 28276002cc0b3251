"""Giving up what is held, filling up what that leaves, and descents from the peak."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, Status, find_smallest, solve
from lightning_remat.solvers.common._eviction import Moments, evict, gaps
from lightning_remat.solvers.common._prune import CHARGES, drop_unused, keep_longer, once, required
from lightning_remat.solvers.common._working_set import least_bytes
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_what_is_given_up_is_computed_again(seed: int, sequence_seed: int) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    sequence = recomputing_sequence(problem, sequence_seed)
    around = gaps(problem, sequence)
    for v, begin, end in around:
        assert begin + 2 < end and v in problem.reads[sequence.nodes[end]]
        assert not any(v in problem.reads[node] for node in sequence.nodes[begin + 1 : end])
    chosen = random.Random(seed).sample(around, (len(around) + 1) // 2)
    other = evict(problem, sequence, chosen)
    if other is not None:
        verify(graph, problem.expand(other), None)
        assert set(required(problem)) <= set(other.nodes)


def test_a_value_that_is_given_up_is_not_held_meanwhile() -> None:
    problem = Problem(unit_chain(8))
    sequence = once(problem)
    v, begin, end = next(gap for gap in gaps(problem, sequence) if gap[0] == 2)
    other = evict(problem, sequence, [(v, begin, end)])
    assert other is not None
    assert other.nodes.count(problem.producer[v]) == 2
    assert len(other.nodes) == len(sequence.nodes) + 1
    assert problem.evaluate(other).peak_bytes == problem.evaluate(sequence).peak_bytes - 1


def test_what_is_said_to_lower_nothing_does_not() -> None:
    said = 0
    for seed in range(400):
        problem = Problem(random_graph(seed, 9, 9))
        now = Moments(problem, drop_unused(problem, recomputing_sequence(problem, seed + 1)))
        for gap in gaps(problem, now.sequence):
            other = evict(problem, now.sequence, [gap])
            if now.lowers_nothing(gap):
                assert other is None or problem.evaluate(other).peak_bytes > now.height[0]
                said += other is not None
    assert said > 50


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(sorted(CHARGES)), st.booleans())
def test_every_way_of_filling_up_keeps_the_budget(seed: int, sequence_seed: int, charge: str, biased: bool) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    sequence = recomputing_sequence(problem, sequence_seed)
    before = problem.evaluate(sequence)
    budget = before.peak_bytes + seed % 5
    generator = random.Random(seed)
    bias = (lambda key: generator.random()) if biased else None
    kept = keep_longer(problem, sequence, budget, time.monotonic() + 60, charge, bias)
    assert verify(graph, problem.expand(kept), budget) <= budget
    assert problem.evaluate(kept).seconds <= before.seconds * (1 + 1e-9)


@given(st.integers(0, 10_000))
def test_schedules_of_descents_keep_the_budget(seed: int) -> None:
    graph = random_graph(seed, 8, 8)
    peak = Problem(graph).evaluate(once(Problem(graph))).peak_bytes
    for budget in (peak, peak * 8 // 10, peak * 6 // 10):
        solution = solve(graph, budget, "descent")  # verifies
        assert solution.peak_bytes <= budget
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_no_schedule_is_smaller_than_the_largest_working_set(seed: int) -> None:
    graph = random_graph(seed, 5, 4)
    problem = Problem(graph)
    floor = max(least_bytes(problem, node) for node in required(problem))
    assert math.isinf(cheapest_of_any_order(problem, floor - 1))
    found = find_smallest(graph)
    assert floor <= found.peak_bytes <= problem.evaluate(problem.captured).peak_bytes
    assert f"{floor:,} bytes of" in found.notes[0]
    assert (found.peak_bytes == floor) == (len(found.notes) == 1)


@pytest.mark.parametrize(("layers", "computed"), [(8, 38), (16, 138)])
def test_chains_go_down_to_what_one_op_needs(layers: int, computed: int) -> None:
    """For 8 layers this is the optimum of Checkmate's program (section 4.6)."""
    found = find_smallest(unit_chain(layers))
    assert found.peak_bytes == 4
    assert found.seconds <= computed
