"""The clock of the solvers: seconds, or counted work, which ends a search at the same place every time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_remat.errors import BudgetError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem, Solution, available, find_smallest, plan_curve, solve
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._clock import clock, limited, program_limits
from tests.helpers.graphs import random_graph, unit_chain


@pytest.fixture(autouse=True)
def _searches_end_by_work() -> None:
    """What it does elsewhere is what is tested here."""


def tight(graph: ComputationGraph) -> int:
    problem = Problem(graph)
    least = find_smallest(graph, work_limit=1.0).peak_bytes
    return (least + problem.evaluate(problem.captured).peak_bytes) // 2


def told(solution: Solution) -> tuple[Any, ...]:
    return solution.schedule, solution.seconds, solution.status, solution.lower_bound_seconds


def slowly(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Each look at the real clock finds that more time has gone by."""
    steps = iter(range(10**9))
    real = time.monotonic
    monkeypatch.setattr(_clock.time, "monotonic", lambda: real() + by * next(steps))


@pytest.mark.parametrize(
    "method", [name for name in available() if name != "moccasin"]
)  # a process, whose clock is real
def test_counted_work_ends_every_method_alike_on_a_slow_machine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, 12, 12)
    budget = tight(graph)
    fast = solve(graph, budget, method, time_limit=1e6, work_limit=0.2)
    slowly(monkeypatch, 0.01)
    assert told(solve(graph, budget, method, time_limit=1e6, work_limit=0.2)) == told(fast)


@pytest.mark.long
def test_less_work_is_less_search() -> None:
    graph = unit_chain(60)
    looks = []
    for work in (0.01, 1.0):
        with limited(1e6, work) as deadline:
            begun = clock()
            assert deadline > begun
            while clock() < deadline:
                pass
            looks.append(round((clock() - begun) / _clock.A_LOOK))
    assert looks == [10, 1000] or looks == [11, 1001], looks
    few = find_smallest(graph, work_limit=0.01)
    many = find_smallest(graph, work_limit=10.0)
    assert many.peak_bytes <= few.peak_bytes


def test_the_time_limit_holds_beside_it() -> None:
    begun = time.monotonic()
    with limited(0.05, 1e9) as deadline:
        while clock() < deadline:
            pass
        assert max(deadline, clock() + 0.5) < clock()  # whatever is asked for then is late too
        assert program_limits(10.0)[0] == 0.0
    assert time.monotonic() - begun < 30


def test_a_program_counts_and_is_told_its_nodes() -> None:
    assert program_limits(3.0) == (3.0, None)
    with limited(100.0, 10.0):
        begun = clock()
        seconds, nodes = program_limits(2.0, 1000)
        assert nodes == 200 and 90 < seconds <= 100
        assert clock() - begun == pytest.approx(1000 * _clock.A_ROW + _clock.A_LOOK)


@pytest.mark.parametrize("call", [solve, find_smallest, plan_curve])
def test_limits_are_positive(call: Any) -> None:
    arguments = (100,) if call is solve else ()
    with pytest.raises(BudgetError, match="a time limit of 0: give a positive number of seconds"):
        call(unit_chain(3), *arguments, time_limit=0)
    with pytest.raises(BudgetError, match="a work limit of -1"):
        call(unit_chain(3), *arguments, work_limit=-1)
