"""The largest batch size in few solves: schedules move between batch sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.planner import AtHand, RematConfig, make_plan
from lightning_remat.planner import _make as making
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.solvers import (
    OpSequence,
    Problem,
    Solution,
    largest_batch_size,
    max_batch_size,
    moved,
    one_extra_forward,
    plain_batch_size,
    solve,
)
from lightning_remat.solvers.portfolio import _largest_batch as searching
from tests.helpers.graphs import PARAMETERS, chain_at, random_graph, unit_chain

BUDGET = 1000 + PARAMETERS


def grown(seed: int) -> Any:
    """A random graph at any batch size; its parameters and their gradients stay as they are."""
    base = random_graph(seed, overwriting=False)
    fixed = {t.storage for t in base.tensors if t.role is TensorRole.PARAMETER}
    fixed |= {base.tensors[t].storage for t in base.backward_outputs}

    def at(size: int) -> ComputationGraph:
        storages = tuple(b if s in fixed else b * size for s, b in enumerate(base.storages))
        ops = tuple(
            dataclasses.replace(op, seconds=0.5 + op.seconds * size, workspace_bytes=op.workspace_bytes * size)
            for op in base.ops
        )
        return base.replace(storages=storages, ops=ops)

    return at


def plain_peak(graph: ComputationGraph) -> int:
    problem = Problem(graph)
    return problem.evaluate(problem.captured).peak_bytes


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a solve."""
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Solution:
        calls.append(1)
        return solve(*args, **options)

    monkeypatch.setattr(searching, "solve", counted)
    return calls


def test_as_large_as_by_bisection_in_fewer_solves(solved):
    bisected = max_batch_size(chain_at, BUDGET, precision=0.03, start=1)
    words: list[str] = []
    found = largest_batch_size(chain_at, BUDGET, progress=words.append)
    assert found.batch_size >= bisected.batch_size / 1.03 and found.batch_size <= 200
    assert len(solved) == found.solves <= 3 < len(bisected.tried)
    assert words and all("batch size of" in one for one in words)


@pytest.mark.parametrize("solves", [0, 1, 2])
def test_no_more_solves_than_asked_for(solves, solved):
    found = largest_batch_size(chain_at, BUDGET, method="milp", solves=solves, time_limit=5.0)
    assert len(solved) == found.solves == solves
    assert found.batch_size >= 100  # as it is


def test_a_schedule_at_hand_takes_the_place_of_solves(solved):
    best = solve(chain_at(3), 3 * 5 + PARAMETERS, "milp")
    sequence = OpSequence.of_solution(chain_at(3), best)
    assert sequence is not None
    found = largest_batch_size(chain_at, BUDGET, method="no_remat", known=[sequence], solves=0)
    assert found.batch_size == 200 and solved == []
    assert sequence in found.sequences
    other = OpSequence.of_solution(unit_chain(9), solve(unit_chain(9), 10**6, "no_remat"))
    assert other is not None
    assert largest_batch_size(chain_at, BUDGET, method="no_remat", known=[other], solves=0).batch_size == 100


@pytest.mark.parametrize("budget", [PARAMETERS + 1, PARAMETERS + 3])
def test_where_not_one_fits(budget):
    assert largest_batch_size(chain_at, budget, solves=1, time_limit=0.5).batch_size == 0


def test_the_limit_is_an_answer(solved):
    assert largest_batch_size(chain_at, BUDGET, at_most=64).batch_size == 64
    assert solved == []  # they fit as they are


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 40))
def test_what_is_found_is_shown_by_a_schedule(seed: int, plain: int) -> None:
    at = grown(seed)
    budget = plain_peak(at(plain))
    found = largest_batch_size(at, budget, solves=1, time_limit=0.05, at_most=4 * plain)
    assert found.batch_size >= plain
    graph = at(found.batch_size)
    if plain_peak(graph) > budget:
        there = moved(found.sequences, graph, budget)
        assert there is not None and there.schedule is not None  # verified at the budget
        assert there.peak_bytes <= budget
        assert there.seconds <= one_extra_forward(graph) * (1 + 1e-8)


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 30))
def test_one_captured_size_says_what_fits_as_it_is(seed: int, captured: int, plain: int) -> None:
    """Never too much, where all that grows does so in proportion."""
    at = grown(seed)
    budget = plain_peak(at(plain))
    size = plain_batch_size(at(captured), captured, budget)
    assert size == 1 or plain_peak(at(size)) <= budget
    assert size <= 1 << 20


def test_parameters_are_not_taken_to_grow():
    assert plain_batch_size(chain_at(8), 8, BUDGET) == 100


@given(st.integers(0, 10_000))
def test_sequences_go_by_the_names_of_ops(seed: int) -> None:
    graph = random_graph(seed, overwriting=False)
    problem = Problem(graph)
    named = OpSequence.of(problem, problem.captured)
    assert named.on(problem) == problem.captured
    plain = solve(graph, problem.evaluate(problem.captured).peak_bytes, "no_remat")
    again = OpSequence.of_solution(graph, plain)
    assert again is not None and again.on(problem) is not None
    assert OpSequence(("no such op", *named.ops), named.boundary).on(problem) is None
    if any(problem.reads):
        assert OpSequence(named.ops[::-1], len(named.ops) - named.boundary).on(problem) is None


def test_a_schedule_is_lowered_to_the_budget():
    graph = chain_at(10)
    plain = OpSequence.of(Problem(graph), Problem(graph).captured)
    found = moved([plain], graph, 60 + PARAMETERS)
    assert found is not None and found.peak_bytes <= 60 + PARAMETERS < plain_peak(graph)
    assert moved([plain], graph, 20 + PARAMETERS) is None
    assert moved([], graph, BUDGET) is None


# -- plans from what is at hand -----------------------------------------------------------------------------------------


TIGHT, ROOMY = 50 + PARAMETERS, 60 + PARAMETERS  # 24 and 21 evaluations


def dear(graph: ComputationGraph, _budget_bytes: int) -> Solution:
    return solve(graph, TIGHT, "milp")


def test_what_suffices_is_taken_without_a_solve(tmp_path, monkeypatch):
    graph, cache, config = chain_at(10), PlanCache(tmp_path), RematConfig(budget=ROOMY)
    expected = dear(graph, ROOMY)
    with monkeypatch.context() as patch:
        patch.setattr(making, "solve", None)
        plan = make_plan(graph, config, cache=cache, at_hand=AtHand(lambda *_: expected, suffices=True))
    assert plan.schedule == expected.schedule and plan.predicted_seconds == 24
    assert list(tmp_path.rglob("plan-*")) == []  # later runs look for something cheaper
    for none_or_dearer in (AtHand(lambda *_: None, suffices=True), AtHand(dear)):
        assert make_plan(graph, config, at_hand=none_or_dearer).predicted_seconds == 21


def test_no_plan_is_dearer_than_what_is_at_hand():
    graph, config = chain_at(10), RematConfig(budget=ROOMY, solver="no_remat")
    best = solve(graph, ROOMY, "milp")
    alone = make_plan(graph, config)
    plan = make_plan(graph, config, at_hand=AtHand(lambda *_: best))
    assert plan.predicted_seconds == best.seconds == 21 < alone.predicted_seconds
    assert plan.schedule == best.schedule and plan.lower_bound_seconds <= best.seconds
    asked: list[int] = []
    fits = make_plan(graph, RematConfig(budget=BUDGET), at_hand=AtHand(lambda *_: asked.append(1)))
    assert asked == [] and not fits.rematerializes  # nothing is looked for where the step fits as it is
