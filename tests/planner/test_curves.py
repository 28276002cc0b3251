"""The schedules that graphs of one step may choose from: made once for graphs that are alike."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_remat.graph import ComputationGraph, Op, Phase
from lightning_remat.planner import _curves
from lightning_remat.planner._alike import Alike
from lightning_remat.planner._beside import needing
from lightning_remat.planner._curves import NEEDS, Curves, plain_schedule
from lightning_remat.schedule import OUTSIDE, simulate, verify
from lightning_remat.solvers import Curve, Problem, find_smallest, plan_curve
from tests.helpers.graphs import joined_branches, unit_chain


def with_outside(graph: ComputationGraph) -> ComputationGraph:
    outside = Op(
        name=OUTSIDE, target=OUTSIDE, inputs=graph.forward_outputs, outputs=(), phase=Phase.LOSS, recomputable=False
    )
    return graph.replace(ops=(*graph.ops[: graph.boundary], outside, *graph.ops[graph.boundary :]))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limit of each curve that is made."""
    made: list[float] = []

    def counted(graph: ComputationGraph, points: int, time_limit: float) -> Curve:
        made.append(time_limit)
        return plan_curve(graph, points, time_limit)

    monkeypatch.setattr(_curves, "plan_curve", counted)
    return made


def test_graphs_are_alike_whatever_their_names_and_what_is_held_all_along(limits: list[float]) -> None:
    graph, curves = with_outside(unit_chain(12)), Curves()
    found = curves.schedules(graph, 5.0)
    assert len(limits) == len(NEEDS)
    assert found[0] == plain_schedule(graph)
    held = graph.replace(resident_bytes=graph.resident_bytes + 1000)
    named = graph.replace(
        ops=tuple(op if op.name == OUTSIDE else dataclasses.replace(op, name=f"other.{op.name}") for op in graph.ops)
    )
    for other in (graph, held, named):
        assert curves.schedules(other, 5.0) == found
    assert len(limits) == len(NEEDS)
    assert min(simulate(graph, one).peak_bytes for one in found) < simulate(graph, found[0]).peak_bytes
    for one in found:
        peak_bytes = simulate(graph, one).peak_bytes
        assert verify(held, one, peak_bytes + 1000) == peak_bytes + 1000


def test_other_graphs_are_not(limits: list[float]) -> None:
    graph, curves = with_outside(unit_chain(12)), Curves()
    first, *rest = graph.ops
    slower = graph.replace(ops=(dataclasses.replace(first, seconds=first.seconds + 1.0), *rest))
    for number, other in enumerate((graph, slower, needing(graph, 7), with_outside(joined_branches())), start=1):
        assert curves.schedules(other, 5.0)[0] == plain_schedule(other)
        assert len(limits) == number * len(NEEDS)


def test_what_ended_early_is_made_again_where_there_is_more_time(
    limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, curves = with_outside(unit_chain(12)), Curves()
    counted = _curves.plan_curve

    def stopped(graph: ComputationGraph, points: int, time_limit: float) -> Curve:
        return dataclasses.replace(counted(graph, points, time_limit), solve_seconds=time_limit)

    monkeypatch.setattr(_curves, "plan_curve", stopped)
    for limit in (2.0, 2.0, 1.0, 3.0, 2.5):
        curves.schedules(graph, limit)
    assert limits == [2.0] * len(NEEDS) + [3.0] * len(NEEDS)


def larger(graph: ComputationGraph, times: int) -> ComputationGraph:
    """Every other storage is so many times as large."""
    return graph.replace(storages=tuple(n * (times if i % 2 else 1) for i, n in enumerate(graph.storages)))


def test_schedules_of_other_sizes_stand_in_for_a_curve(limits: list[float]) -> None:
    graph, curves = with_outside(unit_chain(12)), Curves()
    made = curves.schedules(graph, 5.0)
    other = larger(graph, 3)
    found = curves.schedules(other, 5.0, moved=True)
    assert len(limits) == len(NEEDS)
    assert found[0] == plain_schedule(other)
    assert {one.evaluations.total() for one in found} == {one.evaluations.total() for one in made}
    peaks = [simulate(other, one).peak_bytes for one in found]
    assert [verify(other, one) for one in found] == peaks
    assert min(peaks) < 0.7 * peaks[0]
    assert curves.schedules(other, 5.0, moved=True) is found
    assert curves.schedules(other, 5.0) is not found  # its own, where these do not do
    assert len(limits) == 2 * len(NEEDS)
    different = with_outside(unit_chain(11))
    assert curves.schedules(different, 5.0, moved=True)[0] == plain_schedule(different)
    assert len(limits) == 3 * len(NEEDS)


def test_schedules_of_graphs_with_the_same_ops() -> None:
    alone = unit_chain(12)
    graph, known = with_outside(alone), Alike(2)
    for times in (1, 2, 3):
        one = larger(graph, times)
        known.add(one, [find_smallest(one, 1.0).schedule or plain_schedule(one)])
    assert len(known.of(graph)) <= 2 and known.of(with_outside(unit_chain(11))) == []
    moved_to = [sequence.on(Problem(alone)) for sequence in known.of(alone)]
    assert moved_to
    for nodes in moved_to:
        assert nodes is not None
        schedule = Problem(alone).expand(nodes)
        assert verify(alone, schedule) < simulate(alone, plain_schedule(alone)).peak_bytes
