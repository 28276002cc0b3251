"""What a user sees of the callback: scalars, files, pictures, and the terminal."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.console import Console
from torch import nn

from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks import progress as progress_module
from lightning_remat.callbacks.dashboard import _tell_once, measured_metrics, plan_metrics
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.planner import Plan, RematWarning
from lightning_remat.report import format_bytes
from tests.helpers.places import ROOT
from tests.helpers.training import Classifier, assert_ran, assert_same, callback, fit, loader

GIB = 1024**3
PLANNED = {
    "remat/baseline_peak_GiB",
    "remat/budget_GiB",
    "remat/predicted_peak_GiB",
    "remat/predicted_saving_percent",
    "remat/predicted_overhead_percent",
    "remat/planning_seconds",
}
MEASURED = {"remat/measured_peak_GiB", "remat/measured_saving_percent"}


class Large(Classifier):
    """A few MiB of activations over small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])


def large() -> torch.utils.data.DataLoader:
    return loader(5 * 2048, 2048, width=64)


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_have_units_and_the_plan_s_values():
    remat = callback()
    fit(Classifier, remat, train=lambda: loader(16))
    plan = remat.plan
    metrics = plan_metrics(plan)
    assert set(metrics) == PLANNED
    assert metrics["remat/baseline_peak_GiB"] * GIB == plan.baseline_peak_bytes
    assert metrics["remat/budget_GiB"] * GIB == plan.budget_bytes
    assert metrics["remat/predicted_peak_GiB"] * GIB == plan.predicted_peak_bytes
    assert metrics["remat/predicted_saving_percent"] == 100 * plan.saving > 0
    assert metrics["remat/predicted_overhead_percent"] == 100 * plan.overhead > 0
    assert metrics["remat/planning_seconds"] == plan.cost_seconds + plan.solve_seconds > 0
    assert measured_metrics(plan, plan.baseline_peak_bytes // 2)["remat/measured_saving_percent"] == pytest.approx(50)


def test_scalars_and_files_of_a_csv_logger(tmp_path):
    logger = CSVLogger(tmp_path)
    torch.set_num_threads(1)  # ops of several threads have larger workspaces
    remat = callback(measure=True, artifacts=True)
    fit(Classifier, remat, logger=logger, max_epochs=2)
    assert_ran(remat, 2)
    found = [row for row in rows(logger) if row["remat/budget_GiB"]]
    assert [float(row["remat/budget_GiB"]) * GIB for row in found] == [plan.budget_bytes for plan in remat.plans]
    assert [int(row["step"]) for row in found] == [0, 2]  # the first batch of each size
    measured = [row for row in rows(logger) if row["remat/measured_peak_GiB"]]
    assert {int(row["step"]) for row in measured} >= {1, 3, 4, 5}
    assert all(float(row["remat/measured_peak_GiB"]) > 0 for row in measured)
    folder = Path(logger.log_dir) / "remat"
    assert sorted(p.name for p in folder.iterdir()) == [
        f"plan-{number}.{kind}" for number in (1, 2) for kind in ("html", "json", "png")
    ]
    for number, plan in enumerate(remat.plans, start=1):
        assert Plan.load(folder / f"plan-{number}.json") == plan
        assert (folder / f"plan-{number}.png").read_bytes().startswith(b"\x89PNG")
        page = (folder / f"plan-{number}.html").read_text(encoding="utf-8")
        assert format_bytes(plan.predicted_peak_bytes) in page and "At other budgets" not in page


def test_the_measured_peak_is_the_predicted_one_within_two_percent(tmp_path):
    logger = CSVLogger(tmp_path)
    remat = RematCallback(0.5, artifacts=False)
    plain = fit(Large, train=large)
    scheduled = fit(Large, remat, train=large, logger=logger)
    assert_same(plain.results, scheduled.results)
    assert_ran(remat, 1)
    plan = remat.plan
    assert plan.baseline_peak_bytes > 8 * 2**20
    assert remat.measured_peak_bytes <= plan.budget_bytes
    logged = [float(row["remat/measured_peak_GiB"]) * GIB for row in rows(logger) if row["remat/measured_peak_GiB"]]
    assert len(logged) == 4  # every step but the first, which planning disturbed
    assert max(logged) == remat.measured_peak_bytes
    for measured in logged[1:]:  # from then on everything is there: optimizer state, old gradients
        assert math.isclose(plan.predicted_peak_bytes, measured, rel_tol=0.02)


def test_measured_at_the_logging_interval_once_a_step(tmp_path):
    logger = CSVLogger(tmp_path)
    remat = callback(0.5, measure=True)
    fit(
        Classifier,
        remat,
        logger=logger,
        train=lambda: loader(8 * 12),
        accumulate_grad_batches=2,
        log_every_n_steps=3,
    )
    measured = [int(row["step"]) for row in rows(logger) if row["remat/measured_peak_GiB"]]
    assert measured == [0, 2, 5]  # after the plan, and then each third optimizer step once


def test_scalars_and_image_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    remat = callback(measure=True, artifacts=True)
    fit(Classifier, remat, logger=logger, train=lambda: loader(24))
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert set(events.Tags()["scalars"]) >= PLANNED | MEASURED
    assert events.Tags()["images"] == ["remat/memory_timeline"]
    assert events.Scalars("remat/budget_GiB")[0].value == pytest.approx(remat.plan.budget_bytes / GIB)


def test_scalars_picture_and_plan_in_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="remat")
    remat = callback(measure=True, artifacts=True)
    fit(Classifier, remat, logger=logger, train=lambda: loader(24))
    run = logger.experiment
    summary = dict(run.summary)
    assert summary.keys() >= PLANNED | MEASURED
    assert summary["remat/budget_GiB"] == pytest.approx(remat.plan.budget_bytes / GIB)
    files = Path(run.dir)
    wandb.finish()
    pictures = list(files.rglob("media/images/remat/memory_timeline*.png"))
    assert len(pictures) == len(remat.plans)
    (record,) = files.parent.glob("*.wandb")
    deadline = time.monotonic() + 30
    while b"plan-1.json" not in record.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of its own writes the record
    said = record.read_bytes()
    assert b"remat_plan" in said and b"plan-1.json" in said


def test_scalars_picture_and_plan_in_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("remat", tracking_uri=f"file:{tmp_path / 'runs'}")
    remat = callback(measure=True, artifacts=True)
    fit(Classifier, remat, logger=logger, train=lambda: loader(24), default_root_dir=tmp_path)
    client = mlflow.MlflowClient(f"file:{tmp_path / 'runs'}")
    metrics = client.get_run(logger.run_id).data.metrics
    assert metrics.keys() >= PLANNED | MEASURED
    assert metrics["remat/budget_GiB"] == pytest.approx(remat.plan.budget_bytes / GIB)
    found = {Path(file.path).name for file in client.list_artifacts(logger.run_id, "remat")}
    assert found >= {"plan-1.json", "plan-1.png"}


def test_a_logger_that_fails_does_not_end_the_training(tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(logger.experiment, "add_figure", lambda *_args, **_kwargs: 1 / 0)
    remat = callback(artifacts=True)
    with pytest.warns(RematWarning, match="TensorBoardLogger did not take the plan: division by zero"):
        fit(Classifier, remat, logger=logger, train=lambda: loader(16))
    assert remat.runs[0] > 0


def test_no_logger_writes_to_the_default_folder(tmp_path):
    fit(Classifier, callback(artifacts=True), train=lambda: loader(16), default_root_dir=tmp_path)
    assert (tmp_path / "remat" / "plan-1.json").exists()


def test_a_fast_dev_run_writes_nothing(tmp_path):
    fit(Classifier, callback(artifacts=True, measure=True), fast_dev_run=True, default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    remat = callback(artifacts=True)
    with pytest.warns(RematWarning, match="no picture of the plan was made") as caught:
        fit(Classifier, remat, default_root_dir=tmp_path)
    # One text: Python shows it once.
    assert len({str(w.message) for w in caught if issubclass(w.category, RematWarning)}) == 1
    assert_ran(remat, 2)
    assert {p.suffix for p in (tmp_path / "remat").iterdir()} == {".json", ".html"}


def test_without_bokeh_it_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    monkeypatch.setattr(logging.getLogger("lightning_utilities.core.rank_zero"), "propagate", True)
    _tell_once.cache_clear()
    remat = callback(artifacts=True)
    with caplog.at_level("INFO", logger="lightning_utilities.core.rank_zero"):
        fit(Classifier, remat, default_root_dir=tmp_path)
    assert_ran(remat, 2)
    assert sum("pip install 'lightning_remat[report]'" in said for said in caplog.messages) == 1
    assert {p.suffix for p in (tmp_path / "remat").iterdir()} == {".json", ".png"}


def test_a_page_that_cannot_be_made_is_not_in_the_way(tmp_path, monkeypatch):
    def fails(*_args, **_kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(Plan, "report", fails)
    remat = callback(artifacts=True)
    scheduled = fit(Classifier, remat, default_root_dir=tmp_path)
    assert_ran(remat, 2)
    assert_same(fit(Classifier).results, scheduled.results)
    assert {p.suffix for p in (tmp_path / "remat").iterdir()} == {".json", ".png"}


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "remat").write_text("a file is in the way")
    remat = callback(artifacts=True)
    with pytest.warns(RematWarning, match="the plan was not saved in"):
        fit(Classifier, remat, train=lambda: loader(16), default_root_dir=tmp_path)
    assert_ran(remat, 1)


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "remat" / "plan-1.png").mkdir(parents=True)
    remat = callback(artifacts=True)
    with pytest.warns(RematWarning, match="no picture of the plan was made"):
        fit(Classifier, remat, train=lambda: loader(16), default_root_dir=tmp_path)
    assert_ran(remat, 1)
    assert (tmp_path / "remat" / "plan-1.json").exists()


@pytest.mark.long
def test_a_terminal_shows_a_table_of_the_first_plan_and_a_line_for_each_other(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import warnings; warnings.simplefilter('ignore')\n"
        "from tests.helpers.training import *\n"
        "fit(Classifier, callback(artifacts=True, measure=True), val=None, max_epochs=2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    plans = [line for line in lines if line.startswith("Classifier.training_step: ")]
    assert len(plans) == 1 and any("predicted peak" in line and "planned in" in line for line in lines)
    for word in ("ops on cpu", "baseline peak", "budget", "predicted peak", "predicted overhead", "solver", "gap"):
        assert word in plans[0]
    # The rest is Lightning's own.
    rest = [line for line in lines if line not in plans and line.strip() != "Rematerialization"]
    assert not [line for line in rest if "dynamo" in line.lower() or "remat" in line.lower() or "USDT" in line]


def test_progress_without_a_terminal_is_one_log_line_for_each_kind_of_work(caplog):
    progress = PlanningProgress()
    with caplog.at_level("INFO", "lightning_remat"):
        for words in ("capturing", "measuring operation 1 of 9", "measuring operation 2 of 9", "solving"):
            progress(words)
        progress.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "rematerialization: capturing",
        "rematerialization: measuring operation 1 of 9",
        "rematerialization: solving",
    ]


def test_progress_without_a_terminal_is_said_again_when_it_goes_on(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = PlanningProgress()
    with caplog.at_level("INFO", "lightning_remat"):
        for done in range(1, 9):
            progress(f"measuring operation {done} of 9, about {9 - done} s left")
            now[0] += 2.0
    assert [record.getMessage()[19:] for record in caplog.records] == [
        "measuring operation 1 of 9, about 8 s left",
        "measuring operation 4 of 9, about 5 s left",
        "measuring operation 7 of 9, about 2 s left",
    ]


def test_the_seconds_of_a_live_line_run_on_by_themselves(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = PlanningProgress(Console(file=io.StringIO(), force_terminal=True))
    progress("solving")
    now[0] += 3.0
    assert progress.__rich__().plain == "rematerialization: solving (3 s)"
    progress.stop()
