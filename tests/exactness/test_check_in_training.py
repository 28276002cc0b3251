"""The check in a Trainer: training goes on as without it, and what it finds is logged, a warning and a file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_remat import RematWarning
from lightning_remat.callbacks import RematCallbackConfig
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.errors import ConfigError
from lightning_remat.exactness import Verdict
from lightning_remat.strategies import RematStrategy
from tests.helpers.failing import failing
from tests.helpers.planted import LEFT, planting, steady  # noqa: F401 - the fixture runs after each test
from tests.helpers.stateful import Meter
from tests.helpers.training import Classifier, assert_clean, assert_same, callback, fit, loader


class Keeping(Classifier):
    """A metric, a counter, a list, an array and an object of its own, all written to by the step, and a batch that is too."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.count, self.losses, self.meter, self.array = 0, [], Meter(), np.zeros(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.net(x)
        loss = functional.cross_entropy(predicted, y)
        self.count += 1
        self.losses.append(loss.detach())
        self.log("accuracy", self.accuracy(predicted, y))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "accuracy": self.accuracy(predicted, y)}

    def on_train_epoch_end(self) -> None:
        self.seen += [self.count, *self.losses, self.meter.total]


def shuffled():
    return loader(20, shuffle=True)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Keeping, {"train": shuffled, "max_epochs": 2}),
        (Classifier, {"train": lambda: loader(16), "accumulate_grad_batches": 2}),
        (Classifier, {"train": lambda: loader(16), "precision": "bf16-mixed"}),
    ],
    ids=["keeping", "accumulating", "autocast"],
)
def test_training_goes_on_as_without_a_check(make, options, caplog: pytest.LogCaptureFixture) -> None:
    plain, remat = fit(make, **options), callback(0.7, check=True)
    with caplog.at_level("INFO"):
        checked = fit(make, remat, **options)
    assert_same(plain.results, checked.results)
    assert_clean(checked.trainer, checked.module)
    report = remat.check_report
    assert report is not None and report.equal and report.plans[1], report
    assert (report.gradients, report.buffers) == (10, 6)
    assert report.outputs == (("loss", "accuracy") if make is Keeping else ("loss",))
    assert f"{make.__name__}.training_step, {report.summary()}" in caplog.text
    assert sum(remat.runs) == len(plain.recorder.outputs)  # those of the check are none of the training's


class WritesToItsBatch(Classifier):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class Restless(Classifier):
    """Moves its weights and an object of its own in the step, outside of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch, batch_idx):
        self.restless()
        return super().training_step(batch, batch_idx)

    @torch.compiler.disable
    def restless(self) -> None:
        self.meter.total += 1
        self.seen.append(self.meter.total)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("make", [WritesToItsBatch, Restless])
def test_steps_that_change_more_than_they_should(make) -> None:
    plain, remat = fit(make, train=lambda: loader(16)), callback(0.9, check=True)
    assert_same(plain.results, fit(make, remat, train=lambda: loader(16)).results)
    assert remat.check_report is not None and remat.check_report.equal, remat.check_report


def test_a_wrong_plan_is_a_warning_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planting(monkeypatch, "net.6")
    remat = callback(0.7, check=True, artifacts=True)
    with pytest.warns(RematWarning, match=r"(?s)the planned step has others.*in net\.6, in the backward"):
        fit(Classifier, remat, default_root_dir=tmp_path, max_steps=1)
    saved = json.loads((tmp_path / "remat" / "check.json").read_text())
    assert saved["verdict"] == "different" and saved["first"]["module"] == "net.6"
    assert {one["name"] for one in saved["differences"]} >= {"net.0.weight"}


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_not_checked() -> None:
    plain, remat = fit(ByHand, train=lambda: loader(16)), callback(0.9, check=True)
    with pytest.warns(RematWarning, match="not checked: with manual optimization the step itself changes parameters"):
        checked = fit(ByHand, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)
    assert remat.check_report is not None and remat.check_report.verdict is Verdict.UNCHECKED


@pytest.mark.parametrize("room", [3, 0])
def test_fewer_samples_where_eager_mode_runs_out_of_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = TrainingStep.eager

    def limited(self, batch, *others):
        if len(batch[0]) > room:
            raise torch.OutOfMemoryError("CUDA: tried to allocate 1 GiB")
        return eager(self, batch, *others)

    monkeypatch.setattr(TrainingStep, "eager", limited)
    plain, remat = fit(Classifier, train=lambda: loader(16)), callback(0.7, check=True)
    words = (
        contextlib.nullcontext() if room else pytest.warns(RematWarning, match="out of memory, on a single sample too")
    )
    with words:
        checked = fit(Classifier, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)
    report = remat.check_report
    assert report is not None and report.samples == (2 if room else None)
    assert report.equal == bool(room) and remat.runs == (2,)
    if room:
        assert "eager mode runs out of memory on 8 samples: 2 of them were taken" in report.summary()
        assert report.plans[1], "something is evaluated again in the smaller step too"


class RaisesOnce(Classifier):
    def training_step(self, batch, batch_idx):
        if LEFT:
            LEFT.pop()
            raise ValueError("only this once")
        return super().training_step(batch, batch_idx)


def test_a_check_does_not_end_the_training() -> None:
    plain, remat = fit(RaisesOnce, train=lambda: loader(16)), callback(0.9, check=True)
    LEFT.append(None)
    with pytest.warns(RematWarning, match="not checked: ValueError: only this once"):
        checked = fit(RaisesOnce, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)


def test_a_step_that_fits_as_it_is_and_one_that_is_only_planned() -> None:
    remat = callback("auto", check=True)
    fit(Classifier, remat, max_steps=1)
    assert remat.check_report is not None and remat.check_report.equal and remat.check_report.plans == (1, 0)
    assert "evaluates nothing again" in remat.check_report.summary()
    remat = callback(0.7, check=True, plan_only=True)
    planned = fit(Classifier, remat)
    assert remat.check_report is not None and remat.check_report.equal and planned.trainer.global_step == 0


def test_the_option_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="check='yes'"):
        RematCallbackConfig(check="yes")  # type: ignore[arg-type]


def test_a_strategy_that_repeats_steps_still_can() -> None:
    """The step is captured in the check, before the strategy runs one: no gradients may be added in its backward."""
    options = {"train": lambda: loader(16), "accumulate_grad_batches": 2}
    plain, remat = fit(Classifier, **options), callback(0.9, check=True)
    with failing("backward", after=5) as calls:
        repeated = fit(Classifier, remat, strategy=RematStrategy(), **options)
    assert len(calls) > 5 and repeated.trainer.strategy.recoveries == 1
    assert_same(plain.results, repeated.results)
