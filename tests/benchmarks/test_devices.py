"""The simulation of several devices: what follows from its rules whatever the numbers."""

from __future__ import annotations

import pytest

from benchmarks.devices import (
    DEVICES,
    FOLDER,
    Ready,
    Unit,
    buckets,
    ddp_seconds,
    exchanged,
    fsdp_seconds,
    gradients,
    units,
)
from benchmarks.graphs import load
from lightning_remat.graph import TensorRole
from lightning_remat.solvers import solve

MADE = [Ready(0.01 * i, 2**22) for i in range(1, 101)]


def test_buckets_take_gradients_in_order_and_lose_none() -> None:
    found = buckets(MADE)
    assert sum(one.nbytes for one in found) == 100 * 2**22
    assert found[0] == Ready(0.01, 2**22) and found[-1].seconds == MADE[-1].seconds
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)


def test_one_device_exchanges_nothing() -> None:
    assert exchanged(2**30, 1) == 0
    assert ddp_seconds(MADE, 1.0, 1, beside=True) == ddp_seconds(MADE, 1.0, 1, beside=False) == 1.0
    assert fsdp_seconds([Unit(2**30, 1.0, 2.0)] * 3, 1) == 9.0


@pytest.mark.parametrize("devices", DEVICES)
def test_what_runs_beside_the_backward_takes_no_longer_than_after_it(devices: int) -> None:
    beside, after = (ddp_seconds(MADE, 1.0, devices, beside=beside) for beside in (True, False))
    last = buckets(MADE)[-1]
    assert 1.0 + 2 * exchanged(last.nbytes, devices) <= beside < after
    assert after == pytest.approx(1.0 + sum(2 * exchanged(one.nbytes, devices) for one in buckets(MADE)))


@pytest.mark.parametrize("devices", DEVICES)
def test_units_wait_for_their_parameters(devices: int) -> None:
    parts = [Unit(2**28, 0.001, 0.002)] * 4
    alone, exchange = sum(part.forward + part.backward for part in parts), exchanged(2**28, devices)
    assert fsdp_seconds(parts, devices) >= max(alone + 2 * exchange, 3 * 4 * exchange)
    idle = [Unit(0, part.forward, part.backward) for part in parts]
    assert fsdp_seconds(idle, 1) == pytest.approx(alone)


def test_a_recorded_graph_has_its_blocks_as_units_and_all_its_gradients() -> None:
    graph = load(FOLDER / "gpt2.json.xz")
    schedule = solve(graph, 2**50, "no_remat").schedule
    assert schedule is not None
    parts, made = units(graph, schedule), gradients(graph, schedule)
    parameters = {t.storage for t in graph.tensors if t.role is TensorRole.PARAMETER}
    assert len(parts) == 13 and sum(part.nbytes for part in parts) == sum(graph.storages[s] for s in parameters)
    assert sum(part.forward + part.backward for part in parts) == pytest.approx(graph.seconds)
    assert sum(one.nbytes for one in made) == pytest.approx(graph.gradient_bytes, rel=1e-5)
    assert 0 < made[0].seconds < made[-1].seconds <= graph.seconds * (1 + 1e-9)
