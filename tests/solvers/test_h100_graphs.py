"""Graphs that were captured on an H100, with costs measured there, planned on any machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks.graphs import load, main, plan_all
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, Status, find_smallest, solve
from lightning_remat.solvers.bounds._linear_program import MomentsProgram
from tests.helpers.places import DATA

FOLDER = DATA / "h100"

SMALLEST = {"gpt2": 9.4254, "resnet50": 1.81, "unet": 6.05, "mobilenet": 1.236, "vit": 1.36}
"""GiB."""

OVERHEADS = {"gpt2": 0.26, "resnet50": 0.68, "unet": 0.06, "mobilenet": 0.48, "vit": 1.1}
"""At most, at the smallest peak."""


def graph_of(name: str) -> ComputationGraph:
    return load(FOLDER / f"{name}.json.xz")


def budget_at(graph: ComputationGraph, share: float) -> int:
    peak = Problem(graph).evaluate(Problem(graph).captured).peak_bytes
    return graph.floor_bytes + int(share * (peak - graph.floor_bytes))


@pytest.mark.parametrize(
    ("name", "share", "gap"),
    [
        ("resnet50", 0.7, 0.01),
        ("mobilenet", 0.7, 0.01),
        ("gpt2", 0.7, 0.01),
        pytest.param("resnet50", 0.5, 0.01, marks=pytest.mark.slow),
        pytest.param("mobilenet", 0.5, 0.01, marks=pytest.mark.slow),
        pytest.param("vit", 0.7, 0.01, marks=pytest.mark.slow),
        pytest.param("vit", 0.5, 0.01, marks=pytest.mark.slow),
        pytest.param("unet", 0.7, 0.04, marks=pytest.mark.slow),
        pytest.param("unet", 0.5, 0.04, marks=pytest.mark.slow),
    ],
)
def test_shares_are_planned_near_the_bound(name: str, share: float, gap: float) -> None:
    graph = graph_of(name)
    budget = budget_at(graph, share)
    # Time enough for a machine that does other things too; how long it takes is what `benchmarks.graphs` says.
    solution = solve(graph, budget, time_limit=60.0, seconds=20.0)
    assert solution.schedule is not None
    assert verify(graph, solution.schedule, budget) == solution.peak_bytes <= budget
    assert solution.gap <= gap


def test_one_op_that_needs_more_than_the_budget_is_named_at_once() -> None:
    graph = graph_of("gpt2")
    solution = solve(graph, budget_at(graph, 0.5))
    assert solution.status is Status.INFEASIBLE
    assert solution.notes == ("_log_softmax_backward_data alone needs 10,120,289,604 bytes",)


def test_a_search_that_is_stopped_at_once_proves_no_more_than_a_long_one() -> None:
    """CBC's bound is the largest float before it has solved its first relaxation."""
    graph = graph_of("resnet50")
    budget = budget_at(graph, 0.5)
    found = solve(graph, budget, "crossing")
    for seconds in (1e-3, 3e-3, 1e-2, 3e-2, 0.1):
        with contextlib.closing(MomentsProgram(Problem(graph), [292, 329])) as program:
            assert (program.bound(budget, seconds, whole=True) or 0.0) <= found.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_peak_and_what_it_costs(name: str) -> None:
    graph = graph_of(name)
    plain = Problem(graph).evaluate(Problem(graph).captured)
    smallest = find_smallest(graph, 60.0)
    assert smallest.peak_bytes <= SMALLEST[name] * 2**30
    solution = solve(graph, smallest.peak_bytes, time_limit=60.0, known=smallest)
    assert solution.schedule is not None
    assert verify(graph, solution.schedule, smallest.peak_bytes) == solution.peak_bytes
    assert plain.seconds < solution.lower_bound_seconds <= solution.seconds <= smallest.seconds
    assert solution.seconds <= (1 + OVERHEADS[name]) * plain.seconds


def test_the_benchmark_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graphs.json"
    assert main([str(FOLDER), "--networks", "gpt2", "--shares", "1.0", "0.5", "--no-min", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "optimal" in printed and "_log_softmax_backward_data alone needs" in printed
    assert '"load"' in out.read_text()
    (plain,) = plan_all("gpt2", graph_of("gpt2"), [1.0], False, 30.0)
    assert plain["overhead"] == 0 and plain["gap"] == 0
