"""Schedules that are changed step by step, and the search around a schedule."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, solve
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._lifetimes import Lives
from lightning_remat.solvers.common._problem import NodeSequence
from lightning_remat.solvers.common._prune import once, required
from lightning_remat.solvers.heuristics._large_neighbourhood_search import _exchange, improve
from tests.helpers.graphs import joined_branches, random_graph, recomputing_sequence, unit_chain


def checked(problem: Problem, lives: Lives) -> NodeSequence:
    """Its sequence, when all that it keeps beside is what the sequence says."""
    sequence = lives.sequence()
    assert list(lives.memory) == problem.memory(sequence)
    assert lives.repeated == {node for node in sequence.nodes if sequence.nodes.count(node) > 1}
    taken = problem.taken(sequence, problem.last_uses(sequence))
    assert {bisect_left(lives.keys, key): v for key, v in lives.taken.items()} == taken
    return sequence


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=150)
def test_changes_keep_count_of_memory_and_can_be_taken_back(seed: int, overwriting: bool) -> None:
    generator = random.Random(seed)
    graph = random_graph(seed, 7, 7, overwriting=overwriting)
    problem = Problem(graph)
    lives = Lives(problem, recomputing_sequence(problem, seed))
    for _ in range(8):
        before = checked(problem, lives)
        lives.mark()
        spans = [span for v in lives.movable for span in lives.spans(v)]
        repeats = [(node, key) for node in sorted(lives.repeated) for key in lives.runs[node][1:]]
        if spans and generator.random() < 0.5:
            some = generator.sample(spans, generator.randint(1, len(spans)))
            complete = lives.evict(some, generator.choice((0.0, 2.0, 8.0)))
        elif repeats:
            node, key = generator.choice(repeats)
            budget = problem.evaluate(before).peak_bytes + generator.randrange(4)
            within = lives.fits(node, key, budget)
            lives.drop(node, key)
            complete = True
            assert lives.peak() <= budget or not within
        else:
            break
        if complete:
            after = checked(problem, lives)
            verify(graph, problem.expand(after), None)
            assert set(required(problem)) <= set(after.nodes)
        if not complete or generator.random() < 0.4:
            lives.undo()
            assert checked(problem, lives) == before


def test_a_value_that_is_given_up_is_not_held_meanwhile() -> None:
    problem = Problem(unit_chain(8))
    sequence = once(problem)
    lives = Lives(problem, sequence)
    (span,) = lives.spans(2)
    assert lives.evict([span])
    other = checked(problem, lives)
    assert other.nodes.count(problem.producer[2]) == 2
    assert len(other.nodes) == len(sequence.nodes) + 1
    assert problem.evaluate(other).peak_bytes == problem.evaluate(sequence).peak_bytes - 1


def test_what_is_computed_again_is_shared_where_that_is_asked_for() -> None:
    """The whole forward given up: each backward node computes all before it again, or one chain serves them all."""
    problem = Problem(unit_chain(8))

    def count(share: float) -> int:
        lives = Lives(problem, once(problem))
        forward = [v for v in lives.movable if problem.producer[v] < problem.boundary]
        assert lives.evict([span for v in forward for span in lives.spans(v)], share)
        return len(checked(problem, lives).nodes)

    assert len(once(problem).nodes) < count(100.0) <= 2 * len(problem) < count(0.0)


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=100)
def test_an_exchange_is_within_the_budget_or_is_taken_back(seed: int, overwriting: bool) -> None:
    generator = random.Random(seed)
    graph = random_graph(seed, 7, 7, overwriting=overwriting)
    problem = Problem(graph)
    lives = Lives(problem, recomputing_sequence(problem, seed))
    for _ in range(8):
        before = checked(problem, lives)
        budget = problem.evaluate(before).peak_bytes
        lives.mark()
        if _exchange(lives, budget, 2 * lives.seconds, 2.0, generator):
            verify(graph, problem.expand(checked(problem, lives)), budget)
        else:
            lives.undo()
            assert checked(problem, lives) == before


def test_an_exchange_holds_what_is_dear_instead_of_what_is_cheap() -> None:
    """There is room for one of two values only, and giving the cheap one up saves the dear one."""
    problem = Problem(unit_chain(8))
    for node in range(problem.boundary):
        problem.seconds[node] = 1.0 if node == 2 else 10.0
    lives = Lives(problem, once(problem))
    (cheap,), (dear,) = (lives.spans(problem.writes[node][0]) for node in (2, 4))
    assert lives.seconds_again(cheap) == 1.0 and lives.seconds_again(dear) == 10.0
    assert lives.evict([dear])
    budget = lives.peak()
    lives.fill(budget, time.monotonic() + 60)
    assert lives.repeated == {4}, "no room to hold both"
    lives.mark()
    assert _exchange(lives, budget, math.inf, 0.0, random.Random(0))
    assert lives.peak() <= budget and lives.repeated == {2}


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_the_search_never_makes_it_worse(seed: int) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    budget = int(0.85 * problem.evaluate(once(problem)).peak_bytes)
    start = solve(graph, budget, "descent")
    if start.schedule is None:
        return
    sequence = lower_peak(problem, once(problem), budget, time.monotonic() + 60)
    if problem.evaluate(sequence).peak_bytes > budget:
        return
    better, attempts = improve(problem, sequence, budget, time.monotonic() + 60, patience=30)
    lives = Lives(problem, sequence)
    assert attempts or not any(lives.spans(v) for v in lives.movable)
    assert problem.evaluate(better).seconds <= problem.evaluate(sequence).seconds
    verify(graph, problem.expand(better), budget)


def test_the_search_finds_checkmates_optimum_on_a_chain() -> None:
    problem = Problem(unit_chain(12))
    worst = lower_peak(problem, once(problem), 7, time.monotonic() + 60)
    better, _ = improve(problem, worst, 7, time.monotonic() + 60, patience=200)
    assert problem.evaluate(worst).seconds > problem.evaluate(better).seconds == 32


def test_a_gradient_that_only_waits_is_computed_later() -> None:
    """What it is made of waits instead, and nothing is computed twice."""
    problem = Problem(joined_branches())
    budget = 27
    start = lower_peak(problem, once(problem), budget, time.monotonic() + 60)
    assert problem.evaluate(start).peak_bytes > budget  # nothing of the forward can be given up
    lives = Lives(problem, once(problem))
    small = next(v for v in lives.movable if problem.name(problem.producer[v]) == "small")
    assert lives.evict(lives.spans(small))
    lives.fill(budget, time.monotonic() + 60)
    assert lives.peak() <= budget
    assert sorted(checked(problem, lives).nodes) == list(range(len(problem)))
