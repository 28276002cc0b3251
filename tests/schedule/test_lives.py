"""The lives of what a schedule holds add up to what it holds."""

from __future__ import annotations

import pytest

from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.schedule import Compute, Schedule, lives, simulate
from lightning_remat.solvers import Problem, find_smallest
from tests.helpers.graphs import random_graph
from tests.helpers.host_copies import with_copies
from tests.helpers.plans import small_transformer


def held(graph: ComputationGraph, schedule: Schedule) -> list[int]:
    """Bytes at each step, added up from lives."""
    found = lives(graph, schedule)
    always = graph.input_bytes + graph.resident_bytes
    sums = []
    for index, step in enumerate(schedule.steps):
        before = graph.forward_resident_bytes if index < schedule.boundary else 0
        workspace = graph.ops[step.op].workspace_bytes if isinstance(step, Compute) else 0
        sums.append(always + before + workspace + sum(one.nbytes for one in found if one.begin <= index <= one.end))
    return sums


@pytest.mark.parametrize("seed", range(40))
def test_lives_add_up_to_the_timeline(seed: int) -> None:
    graph = random_graph(seed).replace(resident_bytes=3, forward_resident_bytes=2)
    problem = Problem(graph)
    smallest = find_smallest(graph, 1.0).schedule
    assert smallest is not None
    for schedule in (problem.expand(problem.captured), smallest):
        assert held(graph, schedule) == simulate(graph, schedule).during.tolist()


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_lives_of_what_waits_on_the_host(share: float) -> None:
    graph = small_transformer(blocks=3).replace(host=Host(2**40, 1e12, 1e12), device="cuda")
    problem = Problem(graph)
    schedule = with_copies(graph, problem.expand(problem.captured), share)
    timeline = simulate(graph, schedule)
    assert timeline.host_bytes > 0 and held(graph, schedule) == timeline.during.tolist()


def test_what_is_computed_again_lives_twice() -> None:
    graph = next(g for g in map(random_graph, range(200)) if _computed_again(g))
    schedule = find_smallest(graph, 1.0).schedule
    assert schedule is not None
    again = {op for op, count in schedule.evaluations.items() if count > 1 and not graph.is_view[op]}
    made = [one.op for one in lives(graph, schedule)]
    assert any(made.count(op) > 1 for op in again)


def _computed_again(graph: ComputationGraph) -> bool:
    schedule = find_smallest(graph, 1.0).schedule
    assert schedule is not None
    made = [one.op for one in lives(graph, schedule)]
    return len(set(made)) < len(made) and any(n > 1 for op, n in schedule.evaluations.items() if not graph.is_view[op])
