"""Copies to the host and back: what they take of time and memory, and what the verifier refuses."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, Host, Op, Phase, Tensor
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step, allocations, simulate, verify
from tests.helpers.graphs import unit_chain

F1, F2, LOSS, B2, B1 = map(Compute, range(5))
SEND, SENT = Copy(0, False, False), Copy(0, False, True)
FETCH, FETCHED = Copy(0, True, False), Copy(0, True, True)


def chain(nbytes: int = 8, to_host: float = 4.0, to_device: float = 8.0) -> ComputationGraph:
    """f1 f2 loss b2 b1, an op a second; f1's result has 4 bytes, others 1. f1's is read by f2, b2 and b1."""
    graph = unit_chain(2)
    return graph.replace(storages=(4, 1, 1, 1, 1), host=Host(nbytes, to_host, to_device, latency=0.5))


def offloaded(*, wait: bool = False) -> Schedule:
    """f1's result waits on the host for the backward; with ``wait``, the copy ends before anything else runs."""
    forward: list[Step] = [F1, SEND, SENT, F2, Free(0), LOSS] if wait else [F1, SEND, F2, SENT, Free(0), LOSS]
    return Schedule((*forward, FETCH, FETCHED, B2, B1), len(forward))


def test_copies_run_beside_the_ops() -> None:
    graph = chain()
    # The copy to the host takes 1.5 seconds from 1 on, f2 is done at 2: half a second is waited for; the fetch takes 1.
    timeline = simulate(graph, offloaded())
    assert timeline.seconds_after.tolist() == [1, 1, 2, 2.5, 2.5, 3.5, 3.5, 4.5, 5.5, 6.5]
    assert timeline.seconds == 6.5 and timeline.host_bytes == 4
    assert simulate(graph, offloaded(wait=True)).seconds == 7.5
    early = Schedule((*offloaded().steps[:6], FETCH, B2, B1), 6)
    with pytest.raises(ScheduleError, match="reads f1_out, which is not present"):
        simulate(graph, early)


def test_a_fetch_takes_memory_when_it_begins() -> None:
    graph = chain()
    timeline = simulate(graph, offloaded())
    assert timeline.during.tolist() == [4, 4, 5, 5, 5, 2, 6, 6, 7, 8]
    assert timeline.saved_bytes == 2
    assert timeline.peak_bytes == verify(graph, offloaded()) == 8
    with pytest.raises(ScheduleError, match=r"step 6 \(the fetch of f1_out\): 6 bytes are held, 1 over"):
        verify(graph, offloaded(), 5)
    requests = allocations(graph, offloaded())
    assert [one.nbytes for one in requests.forward] == [4, 1, 0, 1]
    assert [one.nbytes for one in requests.backward] == [4, 1, 1]
    assert len({one.block for one in (*requests.forward, *requests.backward)}) == 6


def test_the_peak_may_be_where_a_fetch_begins() -> None:
    steps = (F1, SEND, F2, SENT, Free(0), LOSS, FETCH, FETCHED, Free(0), F1, B2, Free(1), Free(2), B1)
    graph = chain().with_costs([1.0] * 5).replace(storages=(4, 1, 1, 1, 1))
    assert verify(graph, Schedule(steps, 6)) == simulate(graph, Schedule(steps, 6)).peak_bytes == 7
    idle = (F1, SEND, SENT, F2, LOSS, B2, Free(1), Free(2), B1, Free(0), Free(3), FETCH, FETCHED)
    host = graph.replace(storages=(9, 1, 1, 1, 1), host=Host(9, 1.0, 1.0))
    assert verify(host, Schedule(idle, 5)) == simulate(host, Schedule(idle, 5)).peak_bytes == 12


def test_copies_in_one_direction_wait_for_one_another() -> None:
    graph = chain()
    other = Copy(1, False, False), Copy(1, False, True)
    steps = (F1, SEND, F2, other[0], other[1], SENT, LOSS, B2, B1)  # 1 to 2.5, then 2.5 to 3.25
    assert simulate(graph, Schedule(steps, 7)).seconds_after.tolist()[4:7] == [3.25, 3.25, 4.25]
    # A fetch does not wait for copies to the host.
    steps = (F1, SEND, SENT, Free(0), F1, F2, other[0], Free(0), FETCH, FETCHED, other[1], LOSS, B2, B1)
    assert simulate(graph, Schedule(steps, 12)).seconds_after.tolist()[8:11] == [4.5, 5.5, 5.5]


def test_a_tensor_is_fetched_as_often_as_it_is_wanted() -> None:
    graph = chain()
    steps = (*offloaded().steps[:9], Free(0), FETCH, FETCHED, B1)
    assert verify(graph, Schedule(steps, 6)) == 8
    assert simulate(graph, Schedule(steps, 6)).seconds == 7.5
    assert Schedule.from_dict(Schedule(steps, 6).to_dict()) == Schedule(steps, 6)


def test_what_is_fetched_belongs_to_the_side_that_fetches_it() -> None:
    graph = chain()
    ops = (*graph.ops[:4], Op("b1", "b1", (3, 0), (4,), Phase.BACKWARD, seconds=1.0, overwritable=(0,)))
    graph = graph.replace(ops=ops, storages=(4, 1, 1, 1, 4))
    steps = offloaded().steps
    assert verify(graph, Schedule((*steps[:9], Compute(4, 0)), 6)) == 7
    with pytest.raises(ScheduleError, match="overwrites f1_out, which the caller holds or the forward saved"):
        verify(graph, Schedule((F1, F2, LOSS, B2, Compute(4, 0)), 3))
    forward = (F1, SEND, F2, SENT, Free(0), FETCH, FETCHED, LOSS, B2, Compute(4, 0))
    with pytest.raises(ScheduleError, match="overwrites f1_out, which the caller holds or the forward saved"):
        verify(graph, Schedule(forward, 8))


REFUSED: list[tuple[list[Step], int, str]] = [
    ([F1, F2, SEND, SENT, LOSS, FETCH], 5, "step 5: .*f1_out is not to be fetched: it is present"),
    ([F1, F2, LOSS, Free(0), FETCH], 3, "step 4: .*f1_out cannot be fetched: it does not lie on the host"),
    ([F1, F2, SEND, FETCH], 4, "step 3: .*f1_out cannot be fetched: it does not lie on the host"),
    ([F1, SENT], 2, "step 1: .*f1_out ends, and has not begun"),
    ([F1, SEND, SENT, SENT], 4, "step 3: .*f1_out ends, and has not begun"),
    ([F1, SEND, SENT, Free(0), FETCHED], 5, "step 4: .*f1_out ends, and has not begun"),
    ([F1, SEND, SEND], 3, "step 2: .*f1_out is under way already"),
    ([F1, SEND, SENT, SEND], 4, "step 3: .*f1_out lies on the host already"),
    ([F1, SEND, SENT, Free(0), FETCH, FETCH], 6, "step 5: .*f1_out is under way already"),
    ([SEND], 1, "step 0: .*f1_out cannot begin: it is not present"),
    ([F1, SEND, Free(0)], 3, "step 2 frees or overwrites f1_out, whose copy has not ended"),
    ([F1, SEND, SENT, Free(0), FETCH, Free(0)], 6, "step 5 frees f1_out, which is not present"),
    ([F1, SEND, SENT, Free(0), FETCH, F2], 6, "step 5: f2 reads or computes f1_out, whose fetch has not ended"),
    ([F1, SEND, SENT, Free(0), FETCH, F1], 6, "step 5: f1 reads or computes f1_out, whose fetch has not ended"),
    ([F1, SEND, F2, LOSS, SENT], 4, "the copy of f1_out has not ended when the forward ends"),
    ([F1, SEND, SENT, F2, Free(0), FETCH, LOSS, FETCHED], 7, "f1_out has not ended when the forward ends"),
    ([F1, F2, LOSS, B2, B1, SEND], 3, "f1_out has not ended when the step ends"),
]


@pytest.mark.parametrize(("steps", "boundary", "message"), REFUSED)
def test_the_verifier_refuses_broken_copies(steps: list[Step], boundary: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(chain(), Schedule(tuple(steps), boundary))


def test_the_verifier_counts_what_lies_on_the_host() -> None:
    steps = (F1, SEND, SENT, Free(0), F1, F2, Copy(1, False, False), Copy(1, False, True), LOSS, B2, B1)
    assert verify(chain(nbytes=5), Schedule(steps, 9))
    with pytest.raises(ScheduleError, match="step 6: the copy of f2_out makes 5 bytes on the host, which has 4"):
        verify(chain(nbytes=4), Schedule(steps, 9))
    for check in (simulate, verify):
        with pytest.raises(ScheduleError, match="f1_out.*host memory"):
            check(chain().replace(host=None), offloaded())


def test_what_is_written_to_stays_on_the_device() -> None:
    make, host = Op("make", "zeros", (), (0,)), Host(8, 1.0, 1.0)
    add = Op("add_", "add_", (0,), (1,), mutates=(0,))
    begin, end = Copy(0, False, False), Copy(0, False, True)
    graph = ComputationGraph((make, add), (Tensor("a", 0), Tensor("c", 0)), (1,), forward_outputs=(1,), host=host)
    with pytest.raises(ScheduleError, match="step 1: the copy of a cannot begin: .* or is written to"):
        verify(graph, Schedule((Compute(0), begin, end, Compute(1)), 4))
    neg = Op("neg", "neg", (0,), (1,), overwritable=(0,))
    graph = ComputationGraph((make, neg), (Tensor("a", 0), Tensor("b", 1)), (1, 1), forward_outputs=(1,), host=host)
    assert verify(graph, Schedule((Compute(0), begin, end, Compute(1, 0)), 4)) == 1
    with pytest.raises(ScheduleError, match="step 2 frees or overwrites a, whose copy has not ended"):
        verify(graph, Schedule((Compute(0), begin, Compute(1, 0), end), 4))


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"shape": (128,), "dtype": "float32"}, True),
        ({"shape": (120,), "dtype": "float32"}, True),  # in a block of 512 bytes
        ({"shape": (512,), "dtype": "bool"}, True),
        ({"shape": (256,), "dtype": "bfloat16"}, True),
        ({"shape": (64,), "dtype": "complex64"}, True),
        ({"shape": (64,), "dtype": "bfloat16", "storage": 1}, False),  # of a larger storage
        ({"shape": (128,), "dtype": "a type without bits"}, False),
    ],
)
def test_what_is_copied_fills_its_storage(changes: dict[str, Any], may: bool) -> None:
    tensor = Tensor("a", **{"storage": 0, **changes})
    op = Op("make", "empty", (), (0,))
    graph = ComputationGraph((op,), (tensor,), (512, 1024), forward_outputs=(0,), device="cuda:0")
    assert graph.copyable == (may,)


def test_views_and_results_that_share_a_storage_are_not_copied() -> None:
    tensors = (Tensor("a", 0), Tensor("a_view", 0), Tensor("b", 1), Tensor("c", 1), Tensor("empty", 2))
    ops = (Op("make", "f", (), (0,)), Op("view", "view", (0,), (1,)), Op("two", "g", (1,), (2, 3, 4)))
    graph = ComputationGraph(ops, tensors, (1, 1, 0), forward_outputs=(2,))
    assert graph.copyable == (True, False, False, False, False)
