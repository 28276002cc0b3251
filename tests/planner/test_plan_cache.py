"""Plans kept between runs."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from pathlib import Path

import pytest

from lightning_remat.planner import RematConfig, _make, _plan_cache, make_plan
from lightning_remat.planner._plan_cache import PlanCache
from lightning_remat.solvers import OF_NO_USE, Solution, solve
from tests.helpers.graphs import random_graph, unit_chain

GRAPH = unit_chain(12)


@pytest.mark.parametrize("budget", [9, "min"])
def test_the_second_run_does_not_solve(budget: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RematConfig(budget=budget)
    first = make_plan(GRAPH, config, cache=PlanCache(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1

    def never(*_args: object, **_options: object) -> Solution:
        raise AssertionError("it was solved again")

    for name in ("solve", "find_smallest"):
        monkeypatch.setattr(_make, name, never)
    second = make_plan(GRAPH, config, cache=PlanCache(tmp_path))
    assert second.schedule == first.schedule
    assert (second.predicted_peak_bytes, second.budget_bytes) == (first.predicted_peak_bytes, first.budget_bytes)
    assert (second.predicted_seconds, second.gap, second.solver) == (first.predicted_seconds, first.gap, first.solver)
    assert second.notes[0] == "kept from an earlier run"


def test_a_search_that_was_ended_early_is_kept_for_the_same_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cache = unit_chain(12).replace(forward_outputs=(12,)), PlanCache(tmp_path)
    config = RematConfig(budget=9)
    early = make_plan(graph, config, cache=cache, below_seconds=20.0)
    assert OF_NO_USE in early.notes
    whole = make_plan(graph, config, cache=cache)
    assert whole.notes[0] != "kept from an earlier run" and OF_NO_USE not in whole.notes
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / cache.path(graph, 9, config)).unlink()
    monkeypatch.setattr(_make, "solve", None)  # called, it would fail
    again = make_plan(graph, config, cache=cache, below_seconds=20.0)
    assert again.schedule == early.schedule


def test_the_key_is_what_a_plan_depends_on() -> None:
    cache, config = PlanCache("/nowhere"), RematConfig()
    path = cache.path(GRAPH, 9, config)
    renamed = GRAPH.replace(name="other", ops=tuple(dataclasses.replace(op, name=f"n{op.name}") for op in GRAPH.ops))
    assert cache.path(renamed, 9, config) == path
    assert cache.path(GRAPH, 9, RematConfig(budget=0.5, margin=0.2)) == path  # the budget in bytes says it all
    slower = GRAPH.replace(ops=(dataclasses.replace(GRAPH.ops[0], seconds=2.0), *GRAPH.ops[1:]))
    larger = GRAPH.replace(storages=(2, *GRAPH.storages[1:]))
    others = [
        cache.path(slower, 9, config),
        cache.path(larger, 9, config),
        cache.path(GRAPH, 10, config),
        cache.path(GRAPH, "min", config),
        cache.path(GRAPH, 9, RematConfig(solver="milp")),
        cache.path(GRAPH, 9, RematConfig(time_limit=3.0)),
        cache.path(GRAPH, 9, RematConfig(solver_options={"seconds": 1.0})),
    ]
    assert len({path, *others}) == 1 + len(others)


def spoilt_files() -> dict[str, str]:
    good = solve(random_graph(3), 10**9, "no_remat")
    assert good.schedule is not None
    data = good.to_dict()
    return {
        "cut short": '{"budget_by',
        "nothing": "",
        "a list": "[]",
        "no solution": json.dumps({"budget_bytes": 9}),
        "another version": json.dumps({"budget_bytes": 9, "solution": {**data, "version": 99}}),
        "a field missing": json.dumps(
            {"budget_bytes": 9, "solution": {name: value for name, value in data.items() if name != "method"}}
        ),
        "another graph's": json.dumps({"budget_bytes": 9, "solution": data}),
    }


@pytest.mark.parametrize("kind", sorted(spoilt_files()))
def test_a_spoilt_file_is_said_and_replaced(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, config = PlanCache(tmp_path), RematConfig(budget=9)
    path = cache.path(GRAPH, 9, config)
    path.write_text(spoilt_files()[kind])
    with caplog.at_level(logging.WARNING):
        plan = make_plan(GRAPH, config, cache=cache)
    assert plan.predicted_peak_bytes <= 9
    assert [r.message.startswith(f"The plan in {path} cannot be used") for r in caplog.records] == [True]
    caplog.clear()
    assert make_plan(GRAPH, config, cache=cache).notes[0] == "kept from an earlier run"
    assert not caplog.records


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_path: Path, _text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_plan_cache, "replace_file", full)
    cache = PlanCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        for budget in (9, 10, 11):
            assert make_plan(GRAPH, RematConfig(budget=budget), cache=cache).predicted_peak_bytes <= budget
    assert ["No space left" in record.message for record in caplog.records] == [True]


def test_a_folder_that_is_a_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "plans"
    blocked.write_text("")
    cache = PlanCache(blocked)
    with caplog.at_level(logging.WARNING):
        for budget in (9, 10):
            make_plan(GRAPH, RematConfig(budget=budget), cache=cache)
    assert len(caplog.records) == 1


def test_writers_at_the_same_time_leave_whole_files(tmp_path: Path) -> None:
    config = RematConfig(budget=9)
    solution = solve(GRAPH, 9, "auto")
    path = PlanCache(tmp_path).path(GRAPH, 9, config)
    failures: list[object] = []

    def work() -> None:
        cache = PlanCache(tmp_path)
        for _ in range(50):
            cache.store(path, solution, 9)
            read = cache.load(path, GRAPH)
            if read is None or read.schedule != solution.schedule:
                failures.append(read)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan_cache, "MOST", 3)
    cache = PlanCache(tmp_path)
    for budget in range(7, 13):
        make_plan(GRAPH, RematConfig(budget=budget), cache=cache)
    assert len(list(tmp_path.iterdir())) == 3
    assert cache.load(cache.path(GRAPH, 12, RematConfig()), GRAPH) is not None
