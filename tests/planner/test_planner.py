"""Budgets to plans, plans to files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lightning_remat.errors import BudgetError, ConfigError, GraphError, InfeasibleBudgetError
from lightning_remat.planner import Plan, RematConfig, make_plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.solvers import Status, find_smallest
from lightning_remat.solvers.portfolio import _auto
from tests.helpers.graphs import random_graph, unit_chain


def test_a_share_is_of_what_lies_between_floor_and_baseline() -> None:
    graph = unit_chain(16).replace(device="cpu")
    plan = make_plan(graph, RematConfig(budget=0.5))
    assert plan.baseline_peak_bytes == 18
    assert plan.budget_bytes == graph.floor_bytes + -(-(18 - graph.floor_bytes) // 2)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.rematerializes
    assert plan.overhead == pytest.approx(plan.predicted_seconds / 33 - 1)
    assert 0 < plan.saving < 1
    assert make_plan(graph, RematConfig(budget=1.0)).rematerializes is False


def test_min_is_the_smallest_found_and_below_it_the_error_names_it() -> None:
    graph = unit_chain(12).replace(device="cpu")
    smallest = find_smallest(graph).peak_bytes
    plan = make_plan(graph, RematConfig(budget="min"))
    assert plan.budget_bytes == plan.predicted_peak_bytes == smallest
    with pytest.raises(InfeasibleBudgetError, match=r"smallest feasible budget found is \d bytes, set by ") as caught:
        make_plan(graph, RematConfig(budget=2))
    assert caught.value.smallest_bytes == smallest
    assert caught.value.op in {op.name for op in graph.ops}
    with pytest.raises(BudgetError, match="over what the device has"):
        make_plan(graph, RematConfig(budget="900TiB"))


def test_auto_leaves_a_step_that_fits_alone() -> None:
    plan = make_plan(unit_chain(4).replace(device="cpu"), RematConfig())
    assert plan.solver == "no_remat"
    assert plan.status is Status.OPTIMAL
    assert plan.overhead == 0


def test_plans_are_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for seed in range(5):
        plan = make_plan(random_graph(seed).replace(device="cpu"), RematConfig(budget="min", time_limit=3.0))
        plan.save(path)
        assert Plan.load(path) == plan
        assert "predicted peak" in plan.summary()
        assert plan.timeline().peak_bytes == plan.predicted_peak_bytes
        assert plan.baseline_timeline().peak_bytes == plan.baseline_peak_bytes
    data = json.loads(path.read_text())
    for change, message in (
        ({"version": 9}, "version 9"),
        ({"format": "x"}, "not a plan"),
        ({"status": 1}, "malformed"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(GraphError, match=message):
            Plan.load(path)
    path.write_text("{")
    with pytest.raises(GraphError, match="not a JSON file"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": 1}, r"unknown option 'budgets'; the options are budget, solver, "),
        ({"solver": "gurobi"}, "choose one of ap_greedy, "),
        ({"solver": "greedy", "solver_options": {"gap": 1}}, "has no option 'gap'"),
        ({"solver": "greedy", "solver_options": ["gap"]}, r"solver_options=\['gap'\]: give a mapping"),
        ({"time_limit": 0}, "positive number of seconds"),
        ({"time_limit": "soon"}, "cannot be read"),
        ({"margin": 1.0}, "share of the device"),
        ({"cost_model": "guess"}, "profile"),
        ({"budget": "8 gigs"}, "Accepted"),
        ({"budget": 1.5}, "not in"),
    ],
)
def test_malformed_options_say_what_is_accepted(options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, BudgetError), match=message):
        RematConfig.from_mapping(options)


@pytest.mark.long
def test_an_interrupt_is_said_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_auto, "improve", interrupted)
    monkeypatch.setattr(_auto, "CLOSED_GAP", -1.0)
    config = RematConfig(budget=8, solver_options={"exact_up_to": 0, "seconds": 0.5})
    graph, cache = unit_chain(24), PlanCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        plan = make_plan(graph, config, cache=cache)
    assert plan.predicted_peak_bytes <= 8
    assert [r.message for r in caplog.records if "interrupted" in r.message] == [
        "Planning was interrupted: the best plan so far is used. Interrupt again to end what runs."
    ]
    assert not list(tmp_path.iterdir())
