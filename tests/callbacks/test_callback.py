"""RematCallback in a Trainer: the same numbers as without it, and nothing left behind."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat.budget import device_total_bytes
from lightning_remat.callbacks import RematCallback, RematCallbackConfig
from lightning_remat.errors import BudgetError, ConfigError, InfeasibleBudgetError
from lightning_remat.planner import RematWarning
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
    network,
    trainer,
)

ONE = {"train": lambda: loader(16), "plans": 1}  # two batches of one size: one plan, half the time


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


# -- kinds of steps ---------------------------------------------------------------------------------------------------


class Schedulers(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class NoBatchIdx(Classifier):
    def training_step(self, batch):
        return self.loss(batch)


class DataloaderIdx(Classifier):
    def training_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch) * (1 + dataloader_idx)


class ReturnsDict(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits, "name": "step", "batch_idx": 3}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["logits"].sum())
        self.seen.append(outputs["loss"])


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 1:
            return None
        return self.loss(batch)


class OneInTwo(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            loss = loss + self.net[0].weight.square().mean()
        return loss


class ReadsProgress(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.global_step >= 3:
            loss = loss * 2
        if self.current_epoch > 2:
            loss = loss * 2
        return loss


class LogsProgress(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("step", float(self.global_step))
        self.log("epoch", self.current_epoch)
        return self.loss(batch) * min(1.0, self.global_step / 3)


class Frozen(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class ManualTwo(Classifier):
    """Two networks with an optimizer each, in the order of a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = network(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        other = nn.functional.mse_loss(self.other(x), self.net(x).detach())
        second.zero_grad()
        self.manual_backward(other)
        self.log("bias", self.net[0].bias[0])
        second.step()
        self.log_dict({"loss": loss, "other": other})
        self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters())
        second = torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1)]


class ManualToggled(ManualTwo):
    """The same with frozen halves, gradient clipping, a closure and torch's own backward."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = nn.functional.cross_entropy(self.net(x) + self.other(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1)
        first.step()
        self.untoggle_optimizer(first)

        def closure():
            second.zero_grad()
            other = nn.functional.cross_entropy(self.other(x), y)
            other.backward()
            return other

        second.step(closure)


@pytest.mark.parametrize("make", [Schedulers, NoBatchIdx, DataloaderIdx, ReturnsDict, Frozen])
def test_steps(make):
    compare(make, **ONE)


@pytest.mark.filterwarnings(
    "ignore:only a part of ManualToggled:lightning_remat.planner.RematWarning"
)  # not the closure
@pytest.mark.parametrize("make", [ManualTwo, ManualToggled])
def test_manual_optimization_with_two_optimizers(make):
    _, _, remat = compare(make, **{**ONE, "plans": None}, budget=0.7)
    assert len(remat.plans) >= (2 if make is ManualTwo else 1)


def test_a_step_that_depends_on_batch_idx_has_two_graphs():
    _, _, remat = compare(OneInTwo, train=lambda: loader(48), plans=None)
    assert sum(remat.runs) == 6 and len(remat.plans) <= 2


# Lightning's own advice.
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_skips_batches():
    _, scheduled, remat = compare(Skips, train=lambda: loader(32), plans=None)
    assert sum(remat.runs) >= 2 and scheduled.trainer.global_step == 4


@pytest.mark.parametrize(("make", "graphs"), [(ReadsProgress, 3), (LogsProgress, 2)])
def test_global_step_and_current_epoch_do_not_capture_every_step(make, graphs):
    _, _, remat = compare(make, **{**ONE, "plans": None}, max_epochs=5)
    assert sum(remat.runs) == 10
    assert len(remat.plans) <= graphs


# -- kinds of batches -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(loader(16).dataset)


def as_dict() -> Any:
    return DataLoader([{"x": x, "y": y} for x, y in samples()], 8)


def as_dataclass() -> Any:
    def collate(some):
        return Example(torch.stack([x for x, _ in some]), torch.stack([y for _, y in some]))

    return DataLoader(samples(), 8, collate_fn=collate)


class DictBatch(Classifier):
    def loss(self, batch):
        return super().loss((batch["x"], batch["y"]))


class DataclassBatch(Classifier):
    def loss(self, batch):
        return super().loss((batch.x, batch.y))


@pytest.mark.parametrize(("make", "train"), [(DictBatch, as_dict), (DataclassBatch, as_dataclass)])
def test_batches(make, train):
    _, _, remat = compare(make, train=train, plans=1)
    assert remat.runs == (2,)


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
@pytest.mark.parametrize("make", [PyTorchProfiler, SimpleProfiler])
def test_profilers(make, tmp_path):
    plain = fit(Classifier, train=lambda: loader(24))
    remat = callback("min", measure=True)
    scheduled = fit(Classifier, remat, train=lambda: loader(24), profiler=make(dirpath=tmp_path, filename="profile"))
    assert_same(plain.results, scheduled.results)
    assert remat.failures == () and remat.runs and all(remat.runs)
    # Lightning's PyTorchProfiler hooks every layer, and hooks end a graph: there is nothing to recompute in one layer.
    # Only one torch profiler can run: nothing is measured beside it.
    assert (remat.measured_peak_bytes is None) == (make is PyTorchProfiler)
    assert make is PyTorchProfiler or remat.plan.rematerializes


# Lightning's own remark on a checkpoint that is resumed with another folder.
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning", "ignore:Checkpoint directory:UserWarning")
def test_checkpoints_and_resuming(tmp_path):
    def saving(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1)

    def load(name: str) -> dict[str, Any]:
        found = torch.load(tmp_path / name / "epoch=0.ckpt", weights_only=False)
        found["callbacks"] = {re.sub(r"\{.*", "", key): None for key in found["callbacks"]}
        return found

    options = {"train": ONE["train"], "enable_checkpointing": True, "default_root_dir": tmp_path}
    whole = fit(Classifier, saving("plain"), max_epochs=2, **options)
    fit(Classifier, saving("remat"), callback(), max_epochs=1, **options)
    assert_same(load("plain"), load("remat"))
    remat = callback()
    resumed = fit(Classifier, remat, max_epochs=2, ckpt_path=tmp_path / "remat" / "epoch=0.ckpt", **options)
    assert_ran(remat, 1)
    plain = fit(Classifier, max_epochs=2, ckpt_path=tmp_path / "plain" / "epoch=0.ckpt", **options)
    assert_same(plain.results, resumed.results)
    assert whole.trainer.global_step == resumed.trainer.global_step == 4


# -- more than one fit ------------------------------------------------------------------------------------------------


def test_several_fits_with_one_callback_and_one_trainer():
    remat = callback()
    runs = []
    for callbacks in ([], [remat]):
        torch.manual_seed(0)
        module = Classifier()
        runner = trainer(*callbacks)
        data = loader(16)
        for epochs in (1, 2):
            runner.fit_loop.max_epochs = epochs
            runner.fit(module, data)
        assert runner.global_step == 4
        other = Classifier()
        second = trainer(*callbacks)
        second.fit(other, data)
        assert_clean(second, other)
        runs.append([module.state_dict(), other.state_dict()])
    assert_same(*runs)
    assert_ran(remat, 1)
    assert remat.runs == (2,)


def test_two_callbacks_one_after_the_other():
    first, second = callback(0.8), callback("min")
    one = fit(Classifier, first, train=ONE["train"])
    other = fit(Classifier, second, train=ONE["train"])
    assert_same(one.results, other.results)
    assert_ran(first, 1)
    assert_ran(second, 1)
    assert second.plan.budget_bytes < first.plan.budget_bytes
    assert first.runs == second.runs == (2,)


def test_validate_test_and_predict_after_fit():
    plain, scheduled, remat = compare(Validated, **ONE, val=True)
    before = remat.runs
    for method in ("validate", "test", "predict"):
        one = getattr(plain.trainer, method)(plain.module, loader(12))
        other = getattr(scheduled.trainer, method)(scheduled.module, loader(12))
        assert_same(one, other)
    assert remat.runs == before


def test_the_module_can_be_copied_pickled_and_loaded():
    plain, scheduled, _ = compare(Classifier, **ONE)
    assert type(scheduled.module) is Classifier
    assert list(plain.module.state_dict()) == list(scheduled.module.state_dict()) == list(Classifier().state_dict())
    loaded = pickle.loads(pickle.dumps(scheduled.module))
    assert_same(plain.module.state_dict(), loaded.state_dict())
    assert_same(plain.module.state_dict(), copy.deepcopy(scheduled.module).state_dict())


def test_the_callback_can_be_copied_and_pickled_before_a_fit():
    remat = pickle.loads(pickle.dumps(copy.deepcopy(RematCallback(0.25, reserve=7))))
    assert (remat.config.budget, remat.config.reserve, remat.plan, remat.plans) == (0.25, 7, None, ())


# -- things that go wrong ---------------------------------------------------------------------------------------------


class Breaks(Classifier):
    error: type[BaseException] = RuntimeError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        if batch_idx == 1:
            raise self.error("the user's own")
        return loss


class BreaksBetween(pl.Callback):
    def on_train_batch_end(self, *_):
        raise RuntimeError("the user's own")


@pytest.mark.parametrize("where", ["step", "callback"])
def test_an_exception_undoes_everything(where):
    remat = callback(measure=True)
    torch.manual_seed(0)
    module = Breaks() if where == "step" else Classifier()
    runner = trainer(*([] if where == "step" else [BreaksBetween()]), remat)
    with pytest.raises(RuntimeError, match="the user's own"):
        runner.fit(module, loader(16))
    assert_clean(runner, module)
    assert not torch.autograd._profiler_enabled()
    assert remat.runs and remat.failures == ()
    pickle.dumps(module)


def test_keyboard_interrupt_undoes_everything():
    class Interrupted(Breaks):
        error = KeyboardInterrupt

    remat, module = callback(), Interrupted()
    runner = trainer(remat)
    with pytest.raises(SystemExit):
        runner.fit(module, loader(16))
    assert_clean(runner, module)
    assert remat.plans


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": "a lot"}, BudgetError, "Accepted"),
        ({"budget": 1.5}, BudgetError, "share"),
        ({"solver": "magic"}, ConfigError, "choose one of"),
        ({"reserve": -1}, ConfigError, "reserve"),
        ({"margin": 1.0}, ConfigError, "margin"),
        ({"time_limit": 0}, ConfigError, "time_limit"),
        ({"solver_options": {"magic": 1}}, ConfigError, "no option 'magic'"),
        ({"measure": "perhaps"}, ConfigError, "measure"),
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


def test_a_step_that_fits_is_left_alone():
    plain = fit(Classifier)
    remat = callback("auto")
    scheduled = fit(Classifier, remat, max_epochs=1)
    assert_same(plain.results, scheduled.results)
    assert remat.runs == (1, 1)  # the first batch of each size; the second one of 8 ran as it is
    assert not remat.plan.rematerializes and remat.plan.budget_bytes > remat.plan.baseline_peak_bytes


def test_what_cannot_be_captured_trains_as_before():
    class Sparse(Classifier):
        def loss(self, batch):
            x, _ = batch
            weight = torch.ones(8, len(x)).to_sparse().requires_grad_()
            return torch.sparse.mm(weight, self.net(x)).square().sum()

    plain = fit(Sparse, train=ONE["train"])
    remat = callback()
    with pytest.warns(RematWarning, match="runs as before"):
        scheduled = fit(Sparse, remat, train=ONE["train"])
    assert_same(plain.results, scheduled.results)
    assert len(remat.failures) == 1


# Lightning's own warning of what is experimental there.
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
def test_a_step_that_takes_the_iterator():
    class TakesIterator(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    plain = fit(TakesIterator, train=ONE["train"])
    with pytest.warns(RematWarning, match="dataloader_iter"):
        scheduled = fit(TakesIterator, callback(), train=ONE["train"])
    assert_same(plain.results, scheduled.results)
