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

from benchmarks import networks
from benchmarks.methods import all_methods
from benchmarks.peers import compare
from benchmarks.present import EAGER, OURS, Row, picture

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A Python script of this repository, in another folder than the repository's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_REMAT_CACHE": str(folder / "costs")}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run on a tiny network with dropout: what it wrote and printed, and where."""
    pytest.importorskip("pytorchcv")
    folder = tmp_path_factory.mktemp("peers")
    options = "--network transformer --size tiny --steps 2 --no-inductor --memory-budgets 0.3 --budgets 1.0 0.01 min"
    ended = run(ROOT / "benchmarks" / "peers.py", *options.split(), "--out", folder / "peers.json", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "peers.json").read_text()), ended.stdout, folder


def rows_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (network,) = data["networks"]
    return {row["method"]: row for row in network["rows"]}


class TestPeers:
    def test_every_method_has_a_row(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        data, printed, folder = peers
        methods = [method.name for method in all_methods([1.0, 0.01, "min"], inductor=False, memory_budgets=[0.3])]
        assert list(rows_of(data)) == methods
        assert all(method in printed for method in methods)
        assert {"python", "torch"} <= data["versions"].keys() and data["machine"]["processor"] and data["date"]
        assert (folder / "peers.png").stat().st_size > 5000

    def test_eager_is_itself(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        row = rows_of(peers[0])["eager"]
        assert row["bitwise"] and row["gradient_error"] == 0
        assert row["peak_bytes"] > 0 and 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]

    def test_this_project_has_the_bits_of_eager(self, peers: tuple[dict[str, Any], str, Path]) -> None:
        rows = {method: row for method, row in rows_of(peers[0]).items() if row["family"] == OURS}
        ran = {method: row for method, row in rows.items() if row["status"] == "ok"}
        assert ran.keys() == {"lightning_remat, unscheduled (share 1)", "lightning_remat, min"}
        for row in ran.values():
            assert row["bitwise"] and row["gradient_error"] == 0 and row["seconds"] > 0 and not row["note"]
            assert row["planning_seconds"] > 0
        assert ran["lightning_remat, min"]["peak_bytes"] < ran["lightning_remat, unscheduled (share 1)"]["peak_bytes"]

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


def test_the_picture_takes_rows_that_were_not_measured(tmp_path: Path) -> None:
    rows = [Row("eager", EAGER, peak_bytes=10, seconds=1.0), Row("dead", OURS, status="dies")]
    assert picture([("a network", rows)] * 4, tmp_path / "peers.png")


def test_byte_gpt_trains_with_the_same_bits_in_less_memory(tmp_path: Path) -> None:
    ended = run(ROOT / "examples" / "byte_gpt" / "train.py", "--small", "--steps", "6", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("bitwise equal") == 2 and "OVER" not in ended.stdout
    peaks = [float(peak) for peak in re.findall(r"│\s+([0-9.]+) MiB │ +[0-9.]+ m?s │", ended.stdout)]
    assert len(peaks) == 3 and peaks[0] > peaks[1] > peaks[2]
    assert len(list(tmp_path.glob("lightning_logs/byte_gpt/budget-*/remat/plan-1.png"))) == 2
