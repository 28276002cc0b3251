"""Dropping what nobody reads and keeping what fits: the sequences stay correct, in memory and in time."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, required
from lightning_remat.solvers.common._rollout import rollout
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_shorter_sequences_stay_correct_and_within_the_same_peak(seed: int, sequence_seed: int) -> None:
    graph = random_graph(seed, 7, 7)
    problem = Problem(graph)
    sequence = recomputing_sequence(problem, sequence_seed)
    before = problem.evaluate(sequence)
    dropped = drop_unused(problem, sequence)
    kept = keep_longer(problem, dropped, before.peak_bytes, time.monotonic() + 60)
    verify(graph, problem.expand(dropped), before.peak_bytes)
    verify(graph, problem.expand(kept), before.peak_bytes)
    assert len(kept.nodes) <= len(dropped.nodes) <= len(sequence.nodes)
    assert set(required(problem)) <= set(kept.nodes)
    assert drop_unused(problem, dropped) == dropped


def test_with_room_for_everything_nothing_is_repeated() -> None:
    problem = Problem(unit_chain(12))
    sequence = rollout(problem, [])
    assert len(sequence.nodes) > len(problem)
    kept = keep_longer(problem, sequence, problem.evaluate(problem.captured).peak_bytes, time.monotonic() + 60)
    assert sorted(kept.nodes) == list(range(len(problem)))


def test_first_evaluations_with_effects_stay() -> None:
    graph = unit_chain(3)
    unread = graph.replace(backward_outputs=(4,))  # b2 and b1 serve nobody
    assert required(Problem(unread)) == [0, 1, 2, 3, 4]
    ops = list(unread.ops)
    ops[6] = type(ops[6])("b1", "b1", ops[6].inputs, ops[6].outputs, ops[6].phase, random=True)
    assert required(Problem(unread.replace(ops=tuple(ops)))) == list(range(7))
