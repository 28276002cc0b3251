"""The bound by what is held at several moments, and the schedules from it."""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.bounds import _binding_moments
from lightning_remat.solvers.bounds._binding_moments import bound, choose, is_near, likely
from lightning_remat.solvers.bounds._linear_program import MomentsProgram, is_chain, needed_at_the_boundary
from lightning_remat.solvers.bounds._minimum_cut import BACKWARD_AFTER_FORWARD, CrossingProgram
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused, once, required
from lightning_remat.solvers.common._registry import run_algorithm
from lightning_remat.solvers.common._rollout import rollout
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


def proven(problem: PlainProblem, budget_bytes: int, moments: list[int], whole: bool = False) -> float | None:
    with contextlib.closing(MomentsProgram(problem, moments)) as program:
        return program.bound(budget_bytes, whole=whole)


def any_chain(problem: PlainProblem, seed: int) -> list[int]:
    """Some nodes that may serve as moments together."""
    rng = random.Random(seed)
    early = needed_at_the_boundary(problem)
    nodes = [node for node in required(problem) if node >= problem.boundary or node in early]
    rng.shuffle(nodes)
    chosen: list[int] = []
    for node in nodes[: rng.randint(1, 6)]:
        together = sorted([*chosen, node])
        chosen = together if is_chain(problem, together) else chosen
    return chosen


@given(st.integers(0, 10_000), st.integers(0, 10), st.booleans())
@settings(max_examples=60)
def test_no_schedule_in_any_order_is_cheaper_whatever_the_moments(seed: int, choice: int, whole: bool) -> None:
    problem = Problem(random_graph(seed, 5, 4))
    moments = any_chain(problem, choice)
    peak = problem.evaluate(once(problem)).peak_bytes
    for budget in range(peak, max(0, peak - 8), -2):
        best, least = cheapest_of_any_order(problem, budget), proven(problem, budget, moments, whole)
        if least is None:
            assert math.isinf(best)
        else:
            assert least <= best + 1e-6


@pytest.mark.parametrize(
    ("seed", "overwriting", "budget", "moments"),
    [(901251, False, 32, [1, 4, 5, 6]), (986980, True, 28, [3]), (318575, True, 37, [5])],
)
def test_what_runs_once_may_wait_for_the_backward(
    seed: int, overwriting: bool, budget: int, moments: list[int]
) -> None:
    """An op of the forward that may not run again, but draws nothing, runs where its result is wanted, as the verifier says."""
    problem = Problem(random_graph(seed, 5, 4, overwriting=overwriting))
    early = needed_at_the_boundary(problem)
    assert not all(problem.recomputable[node] or node in early for node in range(problem.boundary))
    best = cheapest_of_any_order(problem, budget)
    for whole in (False, True):
        least = proven(problem, budget, moments, whole)
        assert least is not None and 0 < least <= best + 1e-6


def any_sequence(problem: PlainProblem, rng: random.Random) -> NodeSequence:
    """All that must run, in some order, with values dropped at random and computed again when they are read."""
    nodes: list[int] = []
    present: set[int] = set()

    def run(node: int) -> None:
        if (
            node in nodes
            and (not problem.recomputable[node] or rng.random() < 0.5)
            and present.issuperset(problem.writes[node])
        ):
            return
        for v in rng.sample(problem.reads[node], len(problem.reads[node])):
            make(v)
        for v in problem.reads[node]:
            make(v)
        nodes.append(node)
        present.update(problem.writes[node])

    def make(value: int) -> None:
        if value not in present:
            run(problem.producer[value])

    def run_all(targets: list[int], ends: tuple[int, ...]) -> None:
        rng.shuffle(targets)
        for node in targets:
            run(node)
            lost = [
                v for v in sorted(present) if problem.producer[v] >= 0 and problem.recomputable[problem.producer[v]]
            ]
            present.difference_update([v for v in lost if rng.random() < 0.3])
        for v in (*ends, *ends):
            make(v)

    early = needed_at_the_boundary(problem)
    effects = {n for n in range(problem.boundary) if problem.random[n] or not problem.recomputable[n]}
    run_all([n for n in required(problem) if n < problem.boundary and n in early | effects], problem.forward_outputs)
    for v in (*problem.forward_transient, *problem.forward_outputs):
        make(v)
    boundary = len(nodes)
    present.update(problem.tangents)
    run_all([n for n in required(problem) if n >= problem.boundary], problem.finals)
    return NodeSequence(tuple(nodes), boundary)


@given(st.integers(0, 10_000), st.integers(0, 10))
@settings(max_examples=80)
def test_a_schedule_is_not_cheaper_than_the_bound_at_its_own_peak(seed: int, choice: int) -> None:
    """Larger graphs than brute force can do, where a result may take the memory of an input, which it leaves out."""
    problem = Problem(random_graph(seed, 8, 8))
    sequence = drop_unused(problem, any_sequence(problem, random.Random(choice)))
    evaluation = problem.evaluate(sequence)
    least = proven(problem, evaluation.peak_bytes, any_chain(problem, choice))
    assert least is not None and least <= evaluation.seconds + 1e-6


@given(st.integers(0, 10_000), st.integers(0, 10))
@settings(max_examples=40)
def test_one_moment_more_is_never_below_the_crossing_alone(seed: int, choice: int) -> None:
    problem = Problem(random_graph(seed, 7, 7))
    moments = any_chain(problem, choice)[:1]
    budget = int(0.8 * problem.evaluate(once(problem)).peak_bytes)
    with contextlib.closing(CrossingProgram(problem)) as program:
        crossing = program.solve(program.room(budget))
    least = proven(problem, budget, moments)
    if crossing is None:
        assert least is None
    elif least is not None:
        assert least >= crossing - 1e-5


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_branching_never_lowers_the_bound(seed: int) -> None:
    problem = Problem(random_graph(seed, 7, 7))
    budget = int(0.8 * problem.evaluate(once(problem)).peak_bytes)
    for node in likely(problem, budget)[:2]:
        share, whole = proven(problem, budget, [node]), proven(problem, budget, [node], whole=True)
        if share is not None and whole is not None:
            assert whole >= share - 1e-5


def skips(depth: int) -> PlainProblem:
    """Down with halving sizes and up again, each level read by its mirror; a backward that needs every input again."""
    sizes = [2**level for level in range(depth, 0, -1)]
    up = sizes[::-1]
    count = 2 * depth
    nbytes = [*sizes, *up, 0]  # the results, then the loss
    reads: list[tuple[int, ...]] = [() if node == 0 else (node - 1,) for node in range(count)]
    for node in range(depth + 1, count):
        reads[node] = (node - 1, count - 1 - node)
    reads.append((count - 1,))
    boundary = count + 1
    for node in range(count - 1, -1, -1):  # the gradient of the result of each node
        before = len(nbytes) - 1
        reads.append((before, node, *reads[node]))
        nbytes.append(nbytes[node])
    nodes = len(reads)
    return PlainProblem(
        reads=reads,
        writes=[(v,) for v in range(nodes)],
        seconds=[1.0] * nodes,
        workspace=[0] * nodes,
        is_backward=[node >= boundary for node in range(nodes)],
        recomputable=[True] * nodes,
        random=[False] * nodes,
        nbytes=nbytes,
        producer=list(range(nodes)),
        tangents=[],
        boundary=boundary,
        forward_outputs=(count,),
        forward_transient=(),
        finals=(nodes - 1,),
        base_bytes=0,
        forward_extra_bytes=0,
    )


def test_where_long_skip_connections_bind_the_bound_is_above_the_crossings() -> None:
    problem = skips(5)
    peak = problem.evaluate(once(problem)).peak_bytes
    budget = int(0.8 * peak)
    chosen, least = choose(problem, budget, time.monotonic() + 10)
    crossing = proven(problem, budget, [])
    assert crossing is not None and chosen[-1]
    assert least > crossing + 0.1
    assert bound(problem, budget, time.monotonic() + 10) >= least


def test_on_a_chain_one_moment_counts_what_the_first_backward_node_holds_beside() -> None:
    """Of 8 results 4 fit beside the loss, but while the first gradient is made it takes the place of one of them."""
    problem = Problem(unit_chain(8).replace(forward_outputs=(8,)))
    assert proven(problem, 5, []) == pytest.approx(17 + 4, abs=1e-3)
    assert proven(problem, 5, [9]) == pytest.approx(17 + 5, abs=1e-3)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_schedules_are_within_the_budget_and_over_the_bound(seed: int) -> None:
    graph = random_graph(seed, 8, 8)
    problem = Problem(graph)
    peak = problem.evaluate(once(problem)).peak_bytes
    for budget in (peak, peak * 8 // 10):
        solution = solve(graph, budget, "moments", branching_seconds=0.2)  # verifies
        assert solution.peak_bytes <= budget
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.lower_bound_seconds <= solution.seconds * (1 + 1e-9)


def test_the_method_says_what_its_bound_speaks_of() -> None:
    graph = unit_chain(12).replace(forward_outputs=(12,))
    solution = solve(graph, 9, "moments")
    assert solution.bound_scope == BACKWARD_AFTER_FORWARD
    assert solution.schedule is not None and solution.lower_bound_seconds > 25
    assert solve(graph, 1, "moments").status is Status.INFEASIBLE


def test_branching_decides_what_is_held_and_what_runs() -> None:
    problem = skips(6)
    budget = int(0.7 * problem.evaluate(once(problem)).peak_bytes)
    moments = next([node] for node in likely(problem, budget) if proven(problem, budget, [node]) is not None)
    share = proven(problem, budget, moments)
    with contextlib.closing(MomentsProgram(problem, moments)) as program:
        whole = program.bound(budget, whole=True)
        phases = [one for (_, (before, end)), one in program._runs.items() if end - before == 1]
        decided = [float(one.x) for one in (*program._held.values(), *phases) if not isinstance(one, float)]
    assert share is not None and whole is not None and whole > share + 0.01
    assert decided and all(min(value, 1 - value) < 1e-6 for value in decided)


def test_before_a_moment_that_writes_over_memory_another_is_likely_too() -> None:
    found = 0
    for seed in range(60):
        problem = Problem(random_graph(seed, 8, 8, overwriting=True))
        order = once(problem).nodes
        budget = int(0.6 * problem.evaluate(once(problem)).peak_bytes)
        nodes = likely(problem, budget)
        early = needed_at_the_boundary(problem)
        assert len(set(nodes)) == len(nodes) and set(nodes) <= set(required(problem))
        assert all(node >= problem.boundary or node in early for node in nodes)
        before = order[order.index(nodes[0]) - 1] if nodes and nodes[0] != order[0] else -1
        if before >= problem.boundary and problem.overwrites[nodes[0]]:
            assert before in nodes
            found += 1
    assert found > 5


def test_a_moment_is_held_by_what_the_schedule_holds() -> None:
    """The values that a solution in whole values holds at the crossing fit there."""
    problem = skips(4)
    budget = int(0.8 * problem.evaluate(once(problem)).peak_bytes)
    with contextlib.closing(MomentsProgram(problem, likely(problem, budget)[:1])) as program:
        assert program.bound(budget, whole=True) is not None
        held = program.held_at(program.crossing)
        assert sum(problem.nbytes[v] for v in held) <= budget - program.fixed_bytes(program.crossing)
        assert set(problem.forward_outputs) <= held


def test_a_known_schedule_near_the_bound_is_the_answer_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(120).replace(forward_outputs=(120,))
    problem, deadline = Problem(graph), time.monotonic() + 30
    known = run_algorithm("crossing", problem, 40, deadline).sequence
    assert known is not None and problem.evaluate(known).seconds == 323
    monkeypatch.setattr(_binding_moments, "schedules", None)  # called, it would fail
    answer = run_algorithm("moments", problem, 40, deadline, known=known)
    assert answer.sequence == known
    assert answer.lower_bound_seconds == pytest.approx(323, abs=1e-3)


def test_a_known_schedule_far_from_the_bound_is_not_the_answer() -> None:
    problem = Problem(unit_chain(24).replace(forward_outputs=(24,)))
    dear = drop_unused(problem, rollout(problem, []))
    budget = problem.evaluate(dear).peak_bytes
    answer = run_algorithm("moments", problem, budget, time.monotonic() + 30, known=dear)
    assert answer.sequence is not None
    assert problem.evaluate(answer.sequence).seconds < problem.evaluate(dear).seconds
    assert problem.evaluate(answer.sequence).peak_bytes <= budget


def test_where_nothing_is_cheap_enough_what_is_known_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, deadline = Problem(unit_chain(120).replace(forward_outputs=(120,))), time.monotonic() + 30
    known = run_algorithm("crossing", problem, 40, deadline).sequence
    monkeypatch.setattr(_binding_moments, "schedules", None)  # called, it would fail
    answer = run_algorithm("moments", problem, 40, deadline, known=known, below_seconds=320.0)
    assert answer.sequence == known
    assert answer.lower_bound_seconds == pytest.approx(322, abs=1e-3)  # the crossing's


def test_no_moment_is_tried_once_the_bound_is_near_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = skips(5)
    budget = int(0.8 * problem.evaluate(once(problem)).peak_bytes)
    tried: list[list[int]] = []
    solved = _binding_moments.solve_program

    def counted(problem: PlainProblem, nodes: list[int], *args: Any, **options: Any) -> float:
        tried.append(list(nodes))
        return solved(problem, nodes, *args, **options)

    monkeypatch.setattr(_binding_moments, "solve_program", counted)
    _, least = choose(problem, budget, time.monotonic() + 10)
    assert len(tried) > 2
    tried.clear()
    _, again = choose(problem, budget, time.monotonic() + 10, known_seconds=least)
    assert again == least and tried[0] == [] and is_near(least, again)
    assert len(tried) == 1 + min(i for i, node in enumerate(likely(problem, budget), 1) if [node] == tried[-1])
    for enough in ({"known_seconds": 1.0}, {"below_seconds": 1.0}):  # whatever is proven is near, or too much
        tried.clear()
        choose(problem, budget, time.monotonic() + 10, **enough)
        assert tried == [[]]


def test_the_likeliest_moment_may_take_longer_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = skips(5)
    budget = int(0.8 * problem.evaluate(once(problem)).peak_bytes)
    deadlines: list[float] = []

    def nothing(problem: PlainProblem, nodes: list[int], budget_bytes: int, deadline: float, **options: Any) -> float:
        deadlines.append(deadline)
        return 0.0

    monkeypatch.setattr(_binding_moments, "solve_program", nothing)
    soon, late = time.monotonic() + 10, time.monotonic() + 30
    choose(problem, budget, soon, likeliest_deadline=late)
    assert deadlines[:2] == [late, late] and set(deadlines[2:]) == {soon}
