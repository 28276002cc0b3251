"""The scripts that redo the papers' tables run, and what they write agrees with what the papers prove."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import kumar
from lightning_remat.solvers import Problem
from tests.helpers.graphs import random_graph

ROUNDING = 1 + 1e-6
PIXELS = {"VGG16": 15.47e9}
"""Multiplications of one forward of one image."""


def written(main: Any, folder: Path, arguments: Sequence[str] = ("--quick",)) -> Any:
    out = folder / "out.json"
    assert main([*arguments, "--out", str(out)]) == 0
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    return json.loads(out.read_text())


def test_gradients_are_held_outside_of_what_is_planned() -> None:
    from benchmarks.papers.hiremate_networks import gradients_resident

    for seed in range(40):
        graph = random_graph(seed, forward_ops=6, backward_ops=8, overwriting=True)
        beside = gradients_resident(graph)
        gradients = {graph.tensors[t].storage for t in graph.backward_outputs} - graph.input_storages
        assert not any(beside.storages[s] for s in gradients)
        assert beside.resident_bytes - graph.resident_bytes == sum(graph.storages[s] for s in gradients)
        plain = Problem(graph).captured
        assert Problem(beside).evaluate(plain).peak_bytes >= Problem(graph).evaluate(plain).peak_bytes


def test_kumar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    data = written(kumar.main, tmp_path)
    assert "TWRemat" in capsys.readouterr().out
    limits = 0
    for one in data["networks"]:
        assert one["edges"] <= one["width"] * one["nodes"]  # as in any graph of that treewidth
        plain = next(point for point in one["points"] if point["method"] == "NoRemat")
        assert plain["relative_length"] == 1
        assert all(point["relative_length"] >= 1 for point in one["points"])
        last = one["points"][-1]
        if last["recursion_limit"] > one["nodes"]:  # TWRemat(n) is NoRemat
            assert (last["relative_length"], last["peak_bytes"]) == (1, plain["peak_bytes"])
            limits += 1
    assert limits == 1


def test_kusumoto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.papers import kusumoto

    data = written(kusumoto.main, tmp_path)
    assert "Table 1" in capsys.readouterr().out
    for row in data["table_1"]:
        approximate = row["methods"]["ApproxDP + MC"]
        assert approximate["peak_bytes"] < row["vanilla_bytes"]
        assert approximate["peak_bytes"] <= approximate["peak_without_liveness_bytes"]
        assert row["vanilla_bytes"] == pytest.approx(row["vanilla_bytes_paper"], rel=0.05)
        assert row["methods"]["ApproxDP + TC"]["overhead_percent"] <= approximate["overhead_percent"]
        sweep = row["approx_sweep"]["reduction_percent"]["time"]
        assert sweep[-1] <= sweep[0]  # a larger budget of the paper's model saves less
    for result in data["figure_4"]:
        assert result["largest_batch"]["ApproxDP + MC"] > result["largest_batch"]["vanilla"]


@pytest.mark.slow
def test_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.papers import offload

    data = written(offload.main, tmp_path)
    assert "recompute" in capsys.readouterr().out
    for one in [*data["chains"], *data["transformers"]]:
        for ways in one["overheads"].values():
            if ways["recompute"] is not None:
                assert ways["bound"] <= ways["both"] * (1 + 1e-6) + 1e-9
                assert ways["both"] <= ways["recompute"]
    assert all(one["overheads"]["1/4"]["both"] < one["overheads"]["1/4"]["recompute"] for one in data["chains"])


@pytest.mark.slow
def test_hiremate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pytorchcv")
    from benchmarks.papers import hiremate

    data = written(hiremate.main, tmp_path)
    assert "Table 4(c)" in capsys.readouterr().out
    assert data["table_4"]


@pytest.mark.slow
def test_checkmate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pytorchcv")
    from benchmarks.papers import checkmate

    data = written(checkmate.main, tmp_path)
    printed = capsys.readouterr().out
    assert "lp_rounding within 1.06 of the best known schedule on 2 of 2" in printed
    for one in data["table_2"]:
        assert one["peak_bytes"] >= one["ops_peak_bytes"]  # a layer holds at least what its ops do
        if one["network"] in PIXELS:  # a forward, and a backward of twice that; two FLOPs a multiplication
            assert one["seconds"] == pytest.approx(3 * 2 * PIXELS[one["network"]] * one["batch"], rel=0.01)
        bounds = [row["own_bound_seconds"] for row in one["budgets"]]
        assert all(bound >= one["seconds"] / ROUNDING for bound in bounds)
        for row in one["budgets"]:
            for method, found in row["solutions"].items():
                assert found["peak_bytes"] <= row["budget_bytes"]
                assert found["seconds"] >= one["seconds"] / ROUNDING
                if method not in checkmate.OTHERS:  # schedules that the program can express
                    assert found["seconds"] >= row["own_bound_seconds"] / ROUNDING, method
            if "chen_sqrt" in row["solutions"]:
                assert row["solutions"]["chen_sqrt"]["seconds"] <= one["one_extra_forward"] * one["seconds"] * ROUNDING
    for one in data["figure_6"]:
        sizes = one["batch_sizes"]
        assert all(sizes[label] >= sizes["no_remat"] for label in ("greedy", "greedy, ops", *checkmate.BASELINES))
