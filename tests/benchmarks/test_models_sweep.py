"""The sweep over architectures: what a row says of one captured whole or in parts, not installed, not repeatable, dead."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from benchmarks.architectures import ARCHITECTURES, Architecture, OfPositions, Training, WithLoss
from benchmarks.models import RESULTS, Planned, Row, examine, in_own_process, main, read, table, write
from tests.helpers.places import ROOT


@pytest.fixture(autouse=True)
def _quick_to_collect() -> Iterator[None]:
    """What is there already is no garbage: each measured step looks for some."""
    gc.freeze()
    yield
    gc.unfreeze()


class Layers(nn.Module):
    """Some layers with dropout and batch norm, cut in two where ``breaks``."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.breaks = self.half(), self.half(), breaks

    @staticmethod
    def half() -> nn.Sequential:
        made = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        return nn.Sequential(*(module for layer in made for module in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def mean_square(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, y)


def training(module: nn.Module) -> Training:
    batch = {"x": torch.randn(256, 32), "targets": {"y": torch.randn(256, 32)}}
    return Training(WithLoss(module, mean_square), batch)


def test_a_row_of_what_holds() -> None:
    row = examine(Architecture("torch", "layers", lambda: training(Layers())), [0.6], time_limit=0.5)
    assert row.captured == "whole" and row.troubles() == []
    assert [one.asked for one in row.planned] == [0.6] and row.planned[0].rematerializes
    assert all((one.measured_peak_bytes or 0) <= (one.budget_bytes or 0) for one in row.planned)
    assert row.eager_peak_bytes and row.planned[0].budget_bytes and row.planned[0].budget_bytes < row.eager_peak_bytes
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.long
def test_a_row_of_what_is_captured_in_parts() -> None:
    row = examine(Architecture("torch", "two", lambda: training(Layers(breaks=True))), ["min"], time_limit=0.5)
    assert row.captured == "3 parts" and not row.planned[0].differs and not row.planned[0].exception
    assert any("graph_break" in reason for reason in row.planned[0].reasons)
    assert "graph_break" in table([row])


def test_where_a_share_is_infeasible_the_smallest_budget_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(_architecture: Architecture, asked: float | str, *_others: Any) -> Planned | None:
        return Planned(asked) if asked in ("min", 1.0) else None

    monkeypatch.setattr(models, "_plan", plan)
    row = examine(Architecture("torch", "layers", lambda: training(Layers())))
    assert [one.asked for one in row.planned] == ["min", 1.0]


class Counting(nn.Module):
    """Another number each time that one is made."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = float(next(self.numbers)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_what_cannot_be_compared_says_why() -> None:
    def missing() -> Training:
        import no_such_library

        return no_such_library

    def broken() -> Training:
        return training(OfPositions(nn.Linear(3, 3)))

    rows = [
        examine(Architecture("torch", name, build), shares=[])
        for name, build in [("a", missing), ("b", broken), ("c", lambda: training(Counting()))]
    ]
    assert [row.trouble[:32] for row in rows] == [
        "not installed (No module named '",
        "does not train in eager mode: Ru",
        "eager mode does not repeat its o",
    ]


def dies(connection: Any) -> None:
    os._exit(3)


def hangs(connection: Any) -> None:
    time.sleep(60)


@pytest.mark.parametrize(("work", "trouble"), [(dies, "exit code 3"), (hangs, "not done after 0.5 s")])
def test_a_process_that_dies_or_hangs_is_a_row(work: Any, trouble: str) -> None:
    architecture = Architecture("torch", "dead", lambda: training(Layers()))
    context = multiprocessing.get_context("fork")
    patience = 60.0 if work is dies else 0.5
    row = in_own_process(context, architecture, work, patience)
    assert trouble in row.trouble and row.seconds < 30


def test_other_bits_excesses_and_predictions_are_troubles() -> None:
    good = {"graphs": 1, "budget_bytes": 100, "predicted_peak_bytes": 99, "measured_peak_bytes": 99}
    planned = [
        Planned(0.8, **good),
        Planned(0.6, **{**good, "measured_peak_bytes": 103}, differs=["w"]),
        Planned("min", **good, exception="ScheduleError: no"),
    ]
    row = Row("torch", "a", planned=planned)
    assert row.troubles() == [
        "at 0.6: other bits: w",
        "at 0.6: 3.0% over the budget",
        "at 0.6: peak predicted with an error of -3.9%",
        "at min: ended with ScheduleError: no",
    ]
    assert "DIFFER" in table([row]) and "0 of which hold" in table([row])


def test_rows_are_kept_and_the_last_of_each_counts(tmp_path: Path) -> None:
    rows = [Row("torch", "a", trouble="old"), Row("torch", "b"), Row("torch", "a")]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in rows))
    assert read(lines) == [rows[2], rows[1]]
    write(tmp_path / "rows.json", read(lines))
    assert read(tmp_path / "rows.json") == [rows[2], rows[1]]


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    names = [(one.library, one.name) for one in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 80
    assert sum(library == "transformers" for library, _ in names) >= 60
    assert main(["--list", "--only", "transformers/GPT2"]) == 0
    assert capsys.readouterr().out == "transformers/GPT2LMHeadModel\n"


def test_the_table_of_the_docs_is_that_of_the_rows() -> None:
    page = ROOT / "docs" / "models.md"
    rows = read(RESULTS)
    assert page.read_text(encoding="utf-8").endswith("\n" + table(rows) + "\n")
    assert not [row.name for row in rows for one in row.planned if one.differs or one.exception]
