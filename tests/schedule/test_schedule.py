"""The graph, the contracted problem, the simulator and the verifier agree with one another."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.errors import GraphError, ScheduleError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.schedule import Compute, Free, Schedule, simulate, verify
from lightning_remat.solvers import NodeSequence, Problem
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain

VIEWS = [(), (), (Phase.FORWARD,), (Phase.BACKWARD,), (Phase.FORWARD, Phase.BACKWARD)]


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(VIEWS))
def test_problem_simulator_and_verifier_agree(seed: int, sequence_seed: int, only_views: tuple[Phase, ...]) -> None:
    graph = random_graph(seed, only_views=only_views)
    problem = Problem(graph)
    for sequence in (problem.captured, recomputing_sequence(problem, sequence_seed)):
        evaluation = problem.evaluate(sequence)
        schedule = problem.expand(sequence)
        timeline = simulate(graph, schedule)
        assert timeline.peak_bytes == evaluation.peak_bytes
        assert timeline.seconds == pytest.approx(evaluation.seconds)
        assert verify(graph, schedule) == evaluation.peak_bytes
        assert verify(graph, schedule, evaluation.peak_bytes) == evaluation.peak_bytes
        with pytest.raises(ScheduleError, match="over the budget"):
            verify(graph, schedule, evaluation.peak_bytes - 1)


@given(st.integers(0, 10_000))
def test_json_round_trip(seed: int) -> None:
    graph = random_graph(seed)
    assert ComputationGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    schedule = Problem(graph).expand(Problem(graph).captured)
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_unit_chain_peaks_where_all_activations_are_held() -> None:
    graph = unit_chain(8)
    timeline = simulate(graph, Problem(graph).expand(Problem(graph).captured))
    # f1..f8, the loss and b8 are held while b8 runs.
    assert timeline.peak_bytes == 10
    assert timeline.peak_op == "b8"
    assert timeline.seconds == 17


def test_verifier_names_the_broken_rule() -> None:
    graph = unit_chain(2)  # f1 f2 loss b2 b1
    steps = [Compute(0), Compute(1), Compute(2), Compute(3), Compute(4)]
    assert verify(graph, Schedule(tuple(steps), 3)) == 5
    with pytest.raises(ScheduleError, match="reads f1_out, which is not present"):
        verify(graph, Schedule((steps[0], Free(0), *steps[1:]), 4))
    with pytest.raises(ScheduleError, match="frees f1_out, which is not present"):
        verify(graph, Schedule((Free(0), *steps), 4))
    with pytest.raises(ScheduleError, match="gradient b1_out"):
        verify(graph, Schedule(tuple(steps[:4]), 3))
    pinned = graph.replace(ops=(Op("f1", "f1", (), (0,), recomputable=False), *graph.ops[1:]))
    with pytest.raises(ScheduleError, match="f1 may not run a second time"):
        verify(pinned, Schedule((steps[0], Free(0), *steps), 5))


def test_verifier_keeps_random_ops_in_order_and_mutations_single() -> None:
    tensors = tuple(Tensor(name, i) for i, name in enumerate("abc"))
    first, second = Op("first", "rand", (), (0,), random=True), Op("second", "rand", (), (1,), random=True)
    graph = ComputationGraph((first, second), tensors[:2], (1, 1), forward_outputs=(0, 1))
    verify(graph, Schedule((Compute(0), Compute(1)), 2))
    with pytest.raises(ScheduleError, match="second draws before first"):
        verify(graph, Schedule((Compute(1), Compute(0)), 2))
    with pytest.raises(ScheduleError, match="second is not|second has not run|b is not present"):
        verify(graph, Schedule((Compute(0),), 1))
    make, read = Op("make", "zeros", (), (0,)), Op("read", "neg", (0,), (1,))
    add = Op("add_", "add_", (0,), (2,), mutates=(0,))
    tensors = (Tensor("a", 0), Tensor("b", 1), Tensor("c", 0))
    graph = ComputationGraph((make, read, add), tensors, (1, 1), forward_outputs=(1, 2))
    verify(graph, Schedule((Compute(0), Compute(1), Compute(2)), 3))
    with pytest.raises(ScheduleError, match="after add_ overwrote it"):
        verify(graph, Schedule((Compute(0), Compute(1), Compute(2), Free(1), Compute(1)), 5))
    with pytest.raises(ScheduleError, match="a second time"):
        verify(graph, Schedule((Compute(0), Compute(1), Compute(2), Compute(2)), 4))


def overwriting_chain() -> ComputationGraph:
    """a = f(x), b = g(a) over a, loss(b); gradient = h(tangent, b), which may overwrite b."""
    storages = (4, 2, 2, 1, 1, 2)
    names = ("x", "a", "b", "loss", "tangent", "gradient")
    roles = {"x": TensorRole.PARAMETER, "tangent": TensorRole.TANGENT}
    tensors = tuple(Tensor(n, i, role=roles.get(n, TensorRole.INTERMEDIATE)) for i, n in enumerate(names))
    ops = (
        Op("f", "f", (0,), (1,)),
        Op("g", "g", (1,), (2,), overwritable=(1,)),
        Op("loss", "loss", (2,), (3,), Phase.LOSS),
        Op("h", "h", (4, 2), (5,), Phase.BACKWARD, overwritable=(2,)),
    )
    return ComputationGraph(ops, tensors, storages, inputs=(0, 4), forward_outputs=(3,), backward_outputs=(5,))


def test_a_result_takes_the_memory_of_an_input_that_dies() -> None:
    graph = overwriting_chain()
    schedule = Problem(graph).expand(Problem(graph).captured)
    assert Compute(1, 1) in schedule.steps
    assert Compute(3) in schedule.steps  # b comes from the forward, which may be asked for it again
    timeline = simulate(graph, schedule)
    assert timeline.during[0] == 6 and timeline.during[1] == 6
    again = Problem(graph).expand(NodeSequence((0, 1, 2, 0, 1, 3), 3))  # now h finds a b of the backward
    assert Compute(3, 2) in again.steps
    assert simulate(graph, again).peak_bytes == verify(graph, again) == 8


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Compute(0), Compute(1, 1), Compute(1)], "g reads a, which is not present"),
        ([Compute(0), Compute(1, 0)], "g may not overwrite x"),
        ([Compute(0), Compute(1, 1), Compute(2, 2)], "loss may not overwrite b"),
    ],
)
def test_the_verifier_refuses_what_may_not_be_overwritten(steps: list[Compute], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(overwriting_chain(), Schedule(tuple(steps), len(steps)))


def test_what_the_forward_saved_is_not_overwritten() -> None:
    graph = overwriting_chain()
    schedule = Schedule((Compute(0), Compute(1, 1), Compute(2), Compute(3, 2)), 3)
    with pytest.raises(ScheduleError, match="which the caller holds or the forward saved"):
        verify(graph, schedule)
    kept = graph.replace(forward_outputs=(3, 2))
    with pytest.raises(ScheduleError, match="while the caller holds it"):
        simulate(kept, Schedule((Compute(0), Compute(1, 1), Compute(2), Compute(3, 2)), 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overwritable": (0,), "inputs": (0, 1)}, "must have the size of the output's"),
        ({"overwritable": (3,)}, "does not read"),
        ({"overwritable": (1,), "outputs": ()}, "its first output must lie on a storage of its own"),
    ],
)
def test_impossible_overwriting_is_refused(changes: dict[str, Any], message: str) -> None:
    graph = overwriting_chain()
    ops = (graph.ops[0], dataclasses.replace(graph.ops[1], **changes))
    with pytest.raises(GraphError, match=message):
        ComputationGraph(ops, graph.tensors[:3], graph.storages[:3], inputs=(0,))
