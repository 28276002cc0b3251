"""RematCallback in a Trainer: the same numbers as without it, whatever the Trainer and the callback are told."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lightning_remat.budget import device_total_bytes
from lightning_remat.callbacks import RematCallback, RematCallbackConfig
from lightning_remat.errors import BudgetError, ConfigError, InfeasibleBudgetError, RematWarning
from tests.helpers.small import ONE, NoBatchIdx
from tests.helpers.training import (
    Classifier,
    Validated,
    assert_clean,
    assert_ran,
    assert_same,
    callback,
    compare,
    fit,
    loader,
    trainer,
)


def test_an_epoch_with_a_smaller_last_batch_and_validation():
    plain, _, remat = compare(Validated, val=True, max_epochs=2)
    assert remat.runs == (4, 2)
    assert [len(plain.recorder.outputs), "val_loss" in plain.trainer.callback_metrics] == [6, True]
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes for plan in remat.plans)


# -- the Trainer's options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "32-true"},
        {"accumulate_grad_batches": 2, "budget": 0.5},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"fast_dev_run": True},
        {"limit_train_batches": 1},
        {"val": True, "val_check_interval": 1},
        {"deterministic": True},
        {"detect_anomaly": True},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in list(options.items())[:1]),
)
def test_options(options):
    compare(Validated if "val" in options else Classifier, **{**ONE, **options})


def test_the_options_of_a_trainer_at_their_defaults(tmp_path):
    options = {"logger": None, "enable_checkpointing": None, "log_every_n_steps": None, "enable_progress_bar": None}
    compare(Classifier, **ONE, **options, default_root_dir=tmp_path)


def test_a_barebones_trainer():
    options = {"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None}
    compare(NoBatchIdx, **ONE, **options)


def test_accumulation_that_begins_later():
    callbacks = lambda: [GradientAccumulationScheduler({1: 2})]  # noqa: E731
    _, _, remat = compare(Classifier, **ONE, budget=0.5, max_epochs=2, callbacks=callbacks)
    graph = remat.plans[0].graph
    assert graph.forward_resident_bytes == 0 and graph.resident_bytes >= graph.gradient_bytes


# -- other callbacks --------------------------------------------------------------------------------------------------


class Ema(pl.Callback):
    """Deep-copies the module at every batch end, calls the copy, and averages."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        average = copy.deepcopy(pl_module)
        with torch.no_grad():
            for p in average.parameters():
                p.mul_(0.5)
            average.eval()
            pl_module.seen.append(average.net(batch[0]).sum())
        pickle.dumps(pl_module.state_dict())
        file = io.BytesIO()
        torch.save(pl_module, file)
        assert not {"log", "training_step"} & set(vars(average))


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [Ema()],
        lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)],
    ],
    ids=["EMA", "SWA"],
)
# Lightning's own use of the scheduler that it makes for the averaged weights.
@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step:UserWarning", "ignore:Swapping scheduler:UserWarning"
)
def test_copies_of_the_module(callbacks):
    compare(Classifier, **{**ONE, "plans": None}, max_epochs=3, callbacks=callbacks, budget="min")


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_progress_bars(bar):
    compare(Classifier, **ONE, callbacks=lambda: [bar()], enable_progress_bar=True)


# Lightning's own advice, on a run that is too short for its profiler's schedule.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden:UserWarning")
@pytest.mark.filterwarnings("ignore:only a part of Classifier:lightning_remat.planner.RematWarning")
def without_names(**where: Any) -> PyTorchProfiler:
    return PyTorchProfiler(record_module_names=False, **where)


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule:UserWarning")
@pytest.mark.parametrize("make", [PyTorchProfiler, without_names, SimpleProfiler])
def test_profilers(make, tmp_path):
    plain = fit(Classifier, train=lambda: loader(24))
    remat = callback("min", measure=True)
    told = pytest.warns(RematWarning, match="record_module_names=False") if make is PyTorchProfiler else nullcontext()
    with told:
        scheduled = fit(
            Classifier, remat, train=lambda: loader(24), profiler=make(dirpath=tmp_path, filename="profile")
        )
    assert_same(plain.results, scheduled.results)
    assert remat.failures == () and remat.runs and all(remat.runs)
    # Only one torch profiler can run: nothing is measured beside it.
    assert (remat.measured_peak_bytes is None) == (make is not SimpleProfiler)
    # Hooks end a graph: there is nothing to recompute in one layer.
    assert remat.plan.rematerializes == (make is not PyTorchProfiler)


# -- the callback's options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": "a lot"}, BudgetError, "Accepted"),
        ({"budget": 1.5}, BudgetError, "share"),
        ({"solver": "magic"}, ConfigError, "choose one of"),
        ({"reserve": -1}, ConfigError, "reserve"),
        ({"reserve": "half"}, ConfigError, "reserve='half': give a number of bytes"),
        ({"reserve": "50%"}, ConfigError, "reserve='50%': give a number of bytes"),
        ({"margin": 1.0}, ConfigError, "margin"),
        ({"time_limit": 0}, ConfigError, "time_limit"),
        ({"solver_options": {"magic": 1}}, ConfigError, "no option 'magic'"),
        ({"measure": "perhaps"}, ConfigError, "measure"),
        ({"offload": "disk"}, ConfigError, "offload='disk'"),
        ({"host_budget": "auto"}, BudgetError, "host_budget='auto'"),
        ({"host_budget": 1.5}, BudgetError, "host_budget=1.5"),
    ],
)
def test_options_that_cannot_be_used(options, error, words):
    with pytest.raises(error, match=words):
        RematCallback(**options)


class TestConfig:
    """One schema for all options, from wherever they come."""

    def test_it_has_every_option_of_the_callback(self) -> None:
        options = inspect.signature(RematCallback).parameters
        fields = {field.name: field.default for field in dataclasses.fields(RematCallbackConfig)}
        assert options.keys() == fields.keys()
        plain = {name for name in options if name != "solver_options"}  # a dict, which no default may be
        assert {name: options[name].default for name in plain} == {name: fields[name] for name in plain}

    def test_a_yaml_file(self, tmp_path: Path) -> None:
        file = tmp_path / "remat.yaml"
        file.write_text(
            "budget: 600MiB\nsolver: greedy\ntime_limit: 5\nreserve: ${oc.decode:'1024'}\nplan_only: true\n"
        )
        remat = RematCallback.from_config(file)
        expected = RematCallbackConfig(budget="600MiB", solver="greedy", time_limit=5.0, reserve=1024, plan_only=True)
        assert remat.config == expected == RematCallback.from_config(str(file)).config

    def test_a_structured_node(self) -> None:
        node = OmegaConf.merge(OmegaConf.structured(RematCallbackConfig), {"budget": 0.5, "measure": False})
        assert RematCallback.from_config(node).config == RematCallbackConfig(budget=0.5, measure=False)
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(OmegaConf.structured(RematCallbackConfig), {"time_limit": "long"})

    def test_a_reserve_with_a_unit(self) -> None:
        assert RematCallback(reserve="2GiB").config.reserve == 2 << 30
        assert RematCallback.from_config({"reserve": "100"}).config.reserve == 100

    def test_off_in_the_yaml_of_a_command_line(self) -> None:
        parser = jsonargparse.ArgumentParser()
        parser.add_class_arguments(RematCallback, "remat")
        parsed = parser.parse_string("remat: {budget: min, tiling: off, fuse: off, offload: off}")
        config = RematCallback(**parsed.remat.as_dict()).config
        assert (config.budget, config.tiling, config.fuse, config.offload) == ("min", "off", "off", "off")

    @pytest.mark.parametrize("source", [None, [("budget", 0.5)], 3])
    def test_other_sources_are_told(self, source: Any) -> None:
        with pytest.raises(ConfigError, match="options must be a mapping, not"):
            RematCallback.from_config(source)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("bugdet: 1\n", "unknown option 'bugdet'; the options are budget, solver"),
            ("time_limit: long\n", "cannot be read"),
            ("- budget\n", "mapping"),
            ("budget: [\n", "cannot be read as a YAML file"),
            (None, "cannot be read as a YAML file"),
        ],
    )
    def test_what_cannot_be_used_is_told(self, text: str | None, words: str, tmp_path: Path) -> None:
        file = tmp_path / "remat.yaml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            RematCallback.from_config(file)


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_over_the_device():
    module, runner = Classifier(), trainer(callback(2 * device_total_bytes("cpu")))
    with pytest.raises(BudgetError, match="has"):
        runner.fit(module, loader(16))
    assert_clean(runner, module)


def test_an_infeasible_budget_names_the_smallest_and_what_sets_it():
    module, runner = Classifier(), trainer(callback(1000))
    with pytest.raises(InfeasibleBudgetError, match="smallest feasible budget found is") as raised:
        runner.fit(module, loader(16))
    assert_clean(runner, module)
    assert raised.value.op and raised.value.module.startswith("net")
    remat = callback(raised.value.smallest_bytes)
    fit(Classifier, remat, train=ONE["train"])
    assert_ran(remat, 1)


class Partly(Classifier):
    """Dynamo sees what comes after the network only."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch):
        x, y = batch
        hidden = torch.compiler.disable(self.net)(x)
        return nn.functional.cross_entropy(hidden * self.scale, y)


def test_an_infeasible_budget_says_what_was_not_captured():
    with pytest.raises(InfeasibleBudgetError) as partly:
        trainer(callback(1000)).fit(Partly(), loader(16))
    assert "What was captured does not read net.0.weight, net.0.bias" in partly.value.__notes__[0]
    with pytest.raises(InfeasibleBudgetError) as whole:
        trainer(callback(1000)).fit(Classifier(), loader(16))
    assert not hasattr(whole.value, "__notes__")


def test_a_step_that_fits_is_left_alone():
    plain = fit(Classifier)
    remat = callback("auto")
    scheduled = fit(Classifier, remat, max_epochs=1)
    assert_same(plain.results, scheduled.results)
    assert remat.runs == (1,)  # the first batch; the second one of 8 ran as it is, and so did the smaller last one
    assert not remat.plan.rematerializes and remat.plan.budget_bytes > remat.plan.baseline_peak_bytes


@pytest.mark.parametrize("name", ["tiling", "fuse", "offload"])
def test_off_in_yaml_is_no(name: str) -> None:
    """YAML reads it as false."""
    assert getattr(RematCallback.from_config(OmegaConf.create(f"{name}: off")).config, name) == "off"
