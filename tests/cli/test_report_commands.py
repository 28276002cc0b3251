"""``lightning-remat report`` and ``explain``, called in this process."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import pytest

from lightning_remat.cli import _main, main
from lightning_remat.cli._progress import Progress
from lightning_remat.planner import Plan
from lightning_remat.report import format_bytes
from tests.helpers.plans import plan_by_blocks, small_transformer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two plans of one graph, and the graph."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_main, "Progress", partial(Progress, after_seconds=1e6))
    graph = small_transformer(blocks=4)
    graph.save("graph.json")
    plan = plan_by_blocks(graph)
    plan.save("plan.json")
    Path("other").mkdir()
    dataclasses.replace(plan, budget_bytes=plan.budget_bytes + 1024).save("other/plan.json")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


def test_a_plan_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "report", "plan.json", "--time-limit", "1")
    assert (status, out.strip(), err) == (0, "saved to plan.html", "")
    text = Path("plan.html").read_text(encoding="utf-8")
    assert format_bytes(Plan.load("plan.json").predicted_peak_bytes) in text and "At other budgets" in text
    assert run(capsys, "report", "plan.json", "--no-curve", "-o", "short.html")[0] == 0
    assert "At other budgets" not in Path("short.html").read_text(encoding="utf-8")


def test_a_graph_is_planned_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "graph.json", "--budget", "70%", "--time-limit", "1", "--no-curve")
    assert status == 0 and "sets the peak" in out
    assert run(capsys, "report", "graph.json", "--budget", "70%", "--no-curve", "--time-limit", "1")[0] == 0
    assert Path("graph.html").exists()


def test_two_plans_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "report", "--diff", "plan.json", "other/plan.json", "-o", "diff.html")[0] == 0
    text = Path("diff.html").read_text(encoding="utf-8")
    assert "Two plans of one step" in text and "other/plan.json" in text  # names that tell them apart
    assert run(capsys, "report", "--diff", "plan.json", "plan.json", "-o", "diff.html")[0] == 0
    assert "The two plans are the same" in Path("diff.html").read_text(encoding="utf-8")


def test_an_explanation_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "plan.json", "--no-curve")
    assert status == 0
    assert out == Plan.load("plan.json").explain(curve_seconds=0) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "give a plan file, or --diff with two of them"),
        (["report", "plan.json", "--diff", "plan.json", "plan.json"], "give a plan file, or --diff"),
        (["report", "--diff", "plan.json", "graph.json"], "graph.json is not a plan"),
        (["explain", "graph.json"], "graph.json is a graph: give the --budget"),
        (["explain", "plan.json", "--budget", "1GiB"], "plan.json is no graph file"),
        (["explain", "gone.json"], "gone.json"),
        (["report", "plan.json", "--no-curve", "-o", "gone/plan.html"], "gone"),
    ],
)
def test_what_cannot_be_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_file_that_is_no_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.json").write_text("{")
    status, _, err = run(capsys, "explain", "broken.json")
    assert status == 2 and "broken.json is not a JSON file" in err


def test_without_bokeh_the_extra_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    status, _, err = run(capsys, "report", "plan.json", "--no-curve")
    assert status == 2 and "pip install 'lightning_remat[report]'" in err
