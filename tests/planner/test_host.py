"""The host's memory that graphs are planned with: how much of it, for which graphs, and without any where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import RematConfig, budget
from lightning_remat.budget import host_bytes, parse_host_budget
from lightning_remat.cost import CostCache
from lightning_remat.errors import BudgetError, InfeasibleBudgetError, RematWarning
from lightning_remat.graph import Host
from lightning_remat.planner import _host, make_plan
from lightning_remat.planner._host import found_host, why_not, with_host
from lightning_remat.planner._plan_cache import PlanCache
from tests.helpers.graphs import unit_chain

CPU, GIB = torch.device("cpu"), 2**30


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_cpu_available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(_host, "copy_speeds", lambda *_: Host(0, 25e9, 20e9, 1e-5))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("given", "processes", "found"),
    [
        (None, 1, 16 * GIB),
        (None, 4, 4 * GIB),
        (0.5, 2, 16 * GIB),
        ("50%", 1, 32 * GIB),
        ("8GiB", 4, 8 * GIB),
        (5, 1, 5),
    ],
)
def test_bytes_of_the_host(given: Any, processes: int, found: int) -> None:
    assert host_bytes(given, processes) == found


@pytest.mark.parametrize("given", ["auto", "min", 0, 1.5, True, "a lot", [1]])
def test_what_cannot_be_used_is_told(given: Any) -> None:
    with pytest.raises(BudgetError, match="host_budget=.*Accepted.*share of what the machine has free"):
        parse_host_budget(given)


def test_processes_of_one_machine_divide_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = RematConfig(offload="host")
    host = found_host(CPU, config, CostCache(tmp_path), processes=8)
    assert host == Host(2 * GIB, 25e9, 20e9, 1e-5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of 8 on four machines
    assert found_host(CPU, config, CostCache(tmp_path), processes=8) == dataclasses.replace(host, bytes=8 * GIB)


def test_without_pinned_memory_plans_are_made_without_and_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: Any) -> Host:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(_host, "copy_speeds", refused)
    with pytest.warns(RematWarning, match=r"offload='host' has no effect: .*\(CUDA error: out of memory\)"):
        assert found_host(CPU, RematConfig(offload="host"), CostCache(tmp_path)) is None


def test_a_graph_has_no_more_than_it_can_use(tmp_path: Path) -> None:
    """So that its plans are found again, however much is free then."""
    graph, host = unit_chain(4), Host(64 * GIB, 25e9, 20e9)
    assert with_host(graph, None) is graph
    most = with_host(graph, host).host
    assert most == dataclasses.replace(host, bytes=sum(graph.storages))
    small = with_host(graph, dataclasses.replace(host, bytes=3))
    assert small.host is not None and small.host.bytes == 3
    cache, config = PlanCache(tmp_path), RematConfig()
    paths = {cache.path(one, 100, config) for one in (graph, small, with_host(graph, host))}
    assert len(paths) == 3
    assert cache.path(with_host(graph, dataclasses.replace(host, bytes=GIB)), 100, config) in paths


def test_why_tensors_stay_on_the_device() -> None:
    assert why_not(symbolic=False, whole=True, sharded=False) == ""
    reasons = [
        why_not(symbolic=True, whole=True, sharded=False),
        why_not(symbolic=False, whole=False, sharded=False),
        why_not(symbolic=False, whole=True, sharded=True),
    ]
    assert len({*reasons, ""}) == 4


def test_the_smallest_budget_is_that_with_copies() -> None:
    """Nothing may run twice: without copies all of it is held."""
    graph = unit_chain(12)
    once = graph.replace(ops=tuple(dataclasses.replace(op, recomputable=False) for op in graph.ops))
    config = RematConfig(budget="min", time_limit=4.0)
    without = make_plan(once, config)
    copied = make_plan(once.replace(host=Host(10**6, 100.0, 100.0)), config)
    assert copied.predicted_peak_bytes < without.predicted_peak_bytes and copied.copies > 0 == without.copies
    budget = copied.predicted_peak_bytes - 1
    with pytest.raises(InfeasibleBudgetError) as told:
        make_plan(copied.graph, dataclasses.replace(config, budget=budget))
    assert budget < told.value.smallest_bytes < without.predicted_peak_bytes
