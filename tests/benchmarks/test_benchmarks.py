"""The peers table and the main example run end to end, and say of this project what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import networks
from benchmarks.common.unavoidable import unavoidable
from benchmarks.comparison.measuring import compare
from benchmarks.comparison.methods import Method, all_methods
from benchmarks.comparison.picture import picture
from benchmarks.comparison.rows import ATEN, CHECKPOINT, EAGER, INDUCTOR, OURS, UNSCHEDULED, Row
from benchmarks.comparison.verdict import Verdict, judge, points, to_match
from lightning_remat import rematerialize
from lightning_remat.solvers import Problem
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain
from tests.helpers.places import ROOT


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A Python script of this repository, in another folder than the repository's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_REMAT_CACHE": str(folder / "costs")}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run on a tiny network with dropout: what it wrote and printed, and where."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("peers")
    options = "--network vit --size tiny --steps 2 --time-limit 0.5 --memory-budgets 0.3 --inductor-budgets --duels 1"
    options += " --deterministic --budgets 1.0 0.01 peers min"
    ended = run(ROOT / "benchmarks" / "peers.py", *options.split(), "--out", folder / "peers.json", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "peers.json").read_text()), ended.stdout, folder


def rows_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (network,) = data["networks"]
    return {row["method"]: row for row in network["rows"]}


@pytest.mark.slow
class TestPeers:
    def test_every_method_has_a_row(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        data, printed, folder = peers
        methods = [method.name for method in all_methods([1.0, 0.01, "min"], memory_budgets=[0.3], inductor_budgets=[])]
        *peer, unscheduled, share, smallest = methods
        opponents = [method for method, row in rows_of(data).items() if row["opponents"]]
        assert opponents and list(rows_of(data)) == [*peer, *opponents, unscheduled, share, smallest]
        assert all(method in printed for method in methods)
        assert {"python", "torch"} <= data["versions"].keys() and data["machine"]["processor"] and data["date"]
        assert data["settings"]["deterministic"] and data["networks"][0]["nondeterministic"] == ""
        assert (folder / "peers.png").stat().st_size > 5000

    def test_eager_is_itself(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        row = rows_of(peers[0])["eager"]
        assert row["bitwise"] and row["gradient_error"] == 0
        assert row["peak_bytes"] > 0 and 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]

    def test_this_project_has_the_bits_of_eager(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        rows = {method: row for method, row in rows_of(peers[0]).items() if row["family"] == OURS}
        ran = {method: row for method, row in rows.items() if row["status"] == "ok"}
        matched = {method for method, row in rows.items() if row["opponents"]}
        assert ran.keys() == {"lightning_remat, unscheduled (share 1)", "lightning_remat, min", *matched}
        for row in ran.values():
            assert row["bitwise"] and row["gradient_error"] == 0 and row["seconds"] > 0 and not row["note"]
            assert row["planning_seconds"] > 0
        assert ran["lightning_remat, min"]["peak_bytes"] < ran["lightning_remat, unscheduled (share 1)"]["peak_bytes"]

    def test_opponents_run_within_the_measured_peaks(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        rows = rows_of(peers[0])
        for row in rows.values():
            for peer in row["opponents"]:
                assert rows[peer]["bitwise"] and rows[peer]["family"] != OURS
                assert row["total_peak_bytes"] <= row["budget_bytes"] <= rows[peer]["total_peak_bytes"]
                # A step in each of two rounds, and a duel.
                assert len(row["round_seconds"]) == len(rows[peer]["round_seconds"]) == 3

    def test_the_verdict_is_written_and_printed(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        data, printed, _ = peers
        rows = [Row.from_dict(row) for row in data["networks"][0]["rows"]]
        verdict = Verdict.from_dict(data["networks"][0]["verdict"])
        assert verdict == judge(rows)
        assert {point.peer for point in verdict.points} == {row.method for row in points(rows)} >= {"eager"}
        assert verdict.smallest_bytes and verdict.unavoidable_bytes and verdict.unavoidable_op
        assert verdict.smallest_bytes == min(row.peak_bytes for row in rows if row.peak_bytes and row.family == OURS)
        assert all(row.unavoidable_bytes <= row.predicted_peak_bytes for row in rows if row.predicted_peak_bytes)
        assert "What holds" in printed and verdict.unavoidable_op.split()[0] in printed

    def test_what_is_infeasible_says_what_is_not(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        row = rows_of(peers[0])["lightning_remat, share 0.01"]
        assert row["status"] == "infeasible" and "the smallest feasible is" in row["note"] and row["seconds"] is None


def test_differences_and_deaths_are_rows() -> None:
    """Methods that are wrong, or die, are told from those that are right."""

    class Wrong(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.inner(*batch)
            return loss + (loss - loss.detach())  # the same loss, twice the gradients

    def dies(*_batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("modified by\nan inplace operation")

    eager, checkpointed, *_ = all_methods([])
    wrong = type(eager)(OURS, "wrong", lambda module, _blocks: Wrong(module))
    dead = type(eager)(OURS, "dead", lambda _module, _blocks: dies)
    workload = networks.build("mobilenet", "tiny")
    rows = {row.method: row for row in compare(workload, [eager, checkpointed, wrong, dead], steps=1)}
    assert rows["eager"].bitwise
    # Recomputing batch norm updates its running statistics twice.
    assert rows[checkpointed.name].same_gradients and not rows[checkpointed.name].same_buffers
    assert rows["wrong"].same_loss and not rows["wrong"].bitwise and rows["wrong"].wrong_gradients
    assert rows["wrong"].gradient_error == pytest.approx(1.0)
    assert rows["dead"].status == "dies" and "modified by" in rows["dead"].note and rows["dead"].seconds is None


def point(method: str, family: str, peak: int, seconds: float, **fields: Any) -> Row:
    """A row that was measured three times, 100 bytes of the network's own beside its peak."""
    right = {"same_loss": True, "same_gradients": True, "same_buffers": True, "round_seconds": [seconds] * 3}
    return Row(method, family, peak_bytes=peak, total_peak_bytes=100 + peak, seconds=seconds, **{**right, **fields})


def ours(method: str, peak: int, seconds: float, **fields: Any) -> Row:
    usual = {"budget_bytes": 100 + peak, "prediction_error": 0.0, "unavoidable_bytes": 150, "unavoidable_op": "op"}
    return point(method, OURS, peak, seconds, **{**usual, **fields})


def measured() -> list[Row]:
    """Rows of which all that is promised holds."""
    return [
        point("eager", EAGER, 1000, 1.0),
        point("checkpoint", CHECKPOINT, 400, 1.4),
        point("budget 0.5", ATEN, 600, 1.2),
        point("wrong", ATEN, 100, 1.0, same_gradients=False),
        point("compiled", INDUCTOR, 200, 0.5),
        ours("at 400", 399, 1.3, budget_bytes=500, opponents=["checkpoint"]),
        ours("at 600", 590, 1.21, budget_bytes=700, opponents=["budget 0.5"]),
        ours("at 1000", 990, 1.0, budget_bytes=1100, opponents=["eager"]),
        ours(UNSCHEDULED, 990, 1.0),
        ours("min", 300, 2.0),
    ]


class TestVerdict:
    def test_right_results_of_the_same_kernels_are_points(self) -> None:
        assert [row.method for row in points(measured())] == ["checkpoint", "budget 0.5", "eager"]

    def test_points_of_nearly_the_same_peak_share_an_opponent(self) -> None:
        rows = [*measured(), point("budget 0.4", ATEN, 403, 1.3), point("budget 0.3", ATEN, 500, 1.5)]
        groups = [[row.method for row in group] for group in to_match(rows)]
        assert groups == [
            ["checkpoint", "budget 0.4"],
            ["budget 0.5"],
            ["eager"],
        ]  # 0.3 takes more of both than another

    def test_eager_is_always_matched(self) -> None:
        rows = [*measured(), point("budget 1", ATEN, 900, 0.9)]
        assert [[row.method for row in group] for group in to_match(rows)][-2:] == [["budget 1"], ["eager"]]

    def test_all_of_it_holds(self) -> None:
        verdict = judge(measured())
        assert verdict.holds and len(verdict.points) == 3
        assert [one.ours for one in verdict.points] == ["at 1000", "at 600", "at 400"]
        assert verdict.points[2].ratio == pytest.approx(1.3 / 1.4) == verdict.points[2].ratio_low
        assert verdict.unavoidable_bytes == 50 and verdict.smallest_peer == "checkpoint"

    @pytest.mark.parametrize(
        ("method", "changes", "trouble"),
        [
            ("at 600", {"seconds": 1.25, "round_seconds": [1.25, 1.3, 1.25, 1.0]}, "slower"),
            ("at 600", {"total_peak_bytes": 701}, "over its budget"),
            ("at 600", {"same_buffers": False}, "other bits"),
            ("at 600", {"prediction_error": -0.02}, "predicted wrongly"),
            ("at 600", {"status": "infeasible", "seconds": None, "round_seconds": []}, "infeasible"),
            ("at 600", {"opponents": []}, "slower"),  # then "at 400" is all there is
            ("min", {"peak_bytes": 330, "total_peak_bytes": 430}, "smallest peak"),
            ("min", {"same_loss": False}, "other bits"),
            (UNSCHEDULED, {"peak_bytes": 1001, "total_peak_bytes": 1101}, "higher than eager"),
        ],
    )
    def test_what_does_not_hold_is_told(self, method: str, changes: dict[str, Any], trouble: str) -> None:
        rows = measured()
        row = next(row for row in rows if row.method == method)
        for name, value in changes.items():
            setattr(row, name, value)
        verdict = judge(rows)
        assert not verdict.holds
        assert any(trouble in text for text in [*verdict.troubles, *verdict.points[1].troubles])
        assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict

    def test_a_peak_near_what_is_unavoidable_is_small_enough(self) -> None:
        rows = measured()
        rows[-1].peak_bytes, rows[-1].total_peak_bytes, rows[-1].budget_bytes = 350, 450, 450
        assert [text[:22] for text in judge(rows).troubles] == ["its smallest peak is o"]
        rows[-1].unavoidable_bytes = 440
        assert judge(rows).holds

    def test_a_dominated_point_need_not_be_matched(self) -> None:
        rows = [*measured(), point("budget 0.3", ATEN, 500, 1.5)]
        (one,) = [one for one in judge(rows).points if one.peer == "budget 0.3"]
        assert one.dominated_by == "checkpoint" and one.ours == "at 400" and one.holds

    @given(st.integers(0, 10_000))
    @settings(max_examples=40, deadline=None)
    def test_no_schedule_peaks_below_the_unavoidable(self, seed: int) -> None:
        graph = random_graph(seed, forward_ops=5, backward_ops=4)
        assert cheapest_of_any_order(Problem(graph), unavoidable(graph).nbytes - 1) == float("inf")

    def test_the_unavoidable_of_a_chain(self) -> None:
        # A backward op reads its successor's result and two of the forward, and writes one; the first and last read fewer.
        found = unavoidable(unit_chain(4))
        assert found.nbytes == 4 and found.op in {"b4", "b3", "b2"}
        assert cheapest_of_any_order(Problem(unit_chain(4)), 4) < float("inf")


@pytest.mark.parametrize("name", ["t5", "mobilenet-v1"])
def test_the_networks_are_one_graph_each(name: str) -> None:
    pytest.importorskip("transformers")
    methods = [
        Method(EAGER, "eager", lambda module, _blocks: module),
        Method(OURS, UNSCHEDULED, lambda module, _blocks: rematerialize(module, 1.0, cost_model="unit")),
    ]
    eager, unscheduled = compare(networks.build(name, "tiny"), methods, steps=1)
    assert eager.bitwise and unscheduled.bitwise and unscheduled.note == ""  # it would say so of more plans than one
    assert unscheduled.peak_bytes and eager.peak_bytes and unscheduled.peak_bytes <= eager.peak_bytes


def test_the_picture_takes_rows_that_were_not_measured(tmp_path: Path) -> None:
    rows = [Row("eager", EAGER, peak_bytes=10, seconds=1.0), Row("dead", OURS, status="dies")]
    assert picture([("a network", rows)] * 4, tmp_path / "peers.png")


@pytest.mark.slow
def test_byte_gpt_trains_with_the_same_bits_in_less_memory(tmp_path: Path) -> None:
    script = ROOT / "examples" / "byte_gpt" / "train.py"
    ended = run(script, "--small", "--steps", "6", "--time-limit", "1", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("bitwise equal") == 2 and "OVER" not in ended.stdout
    peaks = [float(peak) for peak in re.findall(r"│\s+([0-9.]+) MiB │ +[0-9.]+ m?s │", ended.stdout)]
    assert len(peaks) == 3 and peaks[0] > peaks[1] > peaks[2]
    assert len(list(tmp_path.glob("lightning_logs/byte_gpt/budget-*/remat/plan-1.png"))) == 2
