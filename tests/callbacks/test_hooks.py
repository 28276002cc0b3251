"""RematCallback among the hooks and the callbacks: each is called when and as it would be without it, wherever it stands."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_remat.callbacks import RematCallback
from lightning_remat.errors import ConfigError
from tests.helpers.journal import OF_CALLBACKS, OF_MODULES, Journal, RecordingCallback, RecordingModule
from tests.helpers.small import Small, quick, saving, two
from tests.helpers.training import Run, assert_clean, assert_ran, assert_same, compare, fit, loader, trainer

# -- what is called ---------------------------------------------------------------------------------------------------


class CountsItsSteps(RecordingModule):
    """Five steps an epoch; they are noted in a list, since nothing else can be written to while a step is captured."""

    samples = 40

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)


def recorded_run(*callbacks: pl.Callback, method: str = "fit", **options: Any) -> tuple[Journal, Any]:
    """What is called in a run with one listener before these callbacks, and one after."""
    journal = Journal()
    torch.manual_seed(0)
    module = CountsItsSteps(journal)
    around = (RecordingCallback(journal, "first"), RecordingCallback(journal, "last"))
    journal.trainer = trainer(around[0], *callbacks, around[1], **options)
    torch.manual_seed(7)
    getattr(journal.trainer, method)(module)
    return journal, module


def test_a_fit_calls_the_same_hooks_in_the_same_order(tmp_path):
    """With a sanity check, accumulation, clipping, validation inside the epochs, and a checkpoint after each step."""

    def run(name: str, *remat: RematCallback) -> tuple[Journal, Any]:
        return recorded_run(
            *remat,
            saving(tmp_path / name, every_n_train_steps=1, save_top_k=-1),
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            val_check_interval=2,
            enable_checkpointing=True,
        )

    remat = quick()
    plain, one = run("plain")
    scheduled, other = run("remat", remat)
    assert_ran(remat)
    assert plain.calls == scheduled.calls
    assert one.seen == other.seen == [0, 1, 2, 3, 4] * 2
    assert_same(one.state_dict(), other.state_dict())
    assert_clean(scheduled.trainer, other)
    # Whatever can be called in a fit has been.
    never = {"on_exception", "load_state_dict", "on_load_checkpoint", "test_dataloader", "predict_dataloader"}
    never |= {hook for hook in (*OF_MODULES, *OF_CALLBACKS) if hook.startswith(("on_test", "on_predict"))}
    assert {*OF_MODULES, *OF_CALLBACKS} - {*plain.hooks} == never
    counts = [
        plain.hooks.count(hook) for hook in ("on_sanity_check_start", "on_save_checkpoint", "on_validation_start")
    ]
    assert counts == [2, 3 * 6, 3 * 5]  # of two callbacks, and of the module too


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_without_a_fit_the_same_hooks_are_called_and_nothing_is_planned(method):
    plain, _ = recorded_run(method=method)
    remat = quick()
    scheduled, module = recorded_run(remat, method=method)
    assert plain.calls == scheduled.calls and "setup" in plain.hooks and "on_train_start" not in plain.hooks
    assert remat.plans == () and remat.training_step is None
    assert_clean(scheduled.trainer, module)


# -- where it stands --------------------------------------------------------------------------------------------------


class Other(pl.Callback):
    pass


def bringing(*callbacks: pl.Callback) -> Any:
    """A module that brings its own callbacks."""
    return type("Bringing", (Small,), {"configure_callbacks": lambda _: list(callbacks)})


@pytest.fixture(scope="module")
def plain() -> Run:
    """Two batches without the callback."""
    return fit(Small, train=two)


ORDERS = [("remat", "checkpoint", "other"), ("checkpoint", "other", "remat"), ("other", "remat", "checkpoint")]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_checkpoints_stay_last_wherever_it_stands(order, plain, tmp_path):
    callbacks = {"remat": quick(), "checkpoint": saving(tmp_path), "other": Other()}
    run = fit(Small, *(callbacks[name] for name in order), train=two, enable_checkpointing=True)
    assert_ran(callbacks["remat"], 1)
    assert_same(plain.results, run.results)
    names = [name for one in run.trainer.callbacks for name, known in callbacks.items() if one is known]
    assert names == [*(name for name in order if name != "checkpoint"), "checkpoint"]
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


@pytest.mark.parametrize("brought", [("remat",), ("checkpoint", "remat", "other")], ids=" ".join)
def test_a_module_may_bring_it(brought, plain, tmp_path):
    callbacks = {"remat": quick(), "checkpoint": saving(tmp_path), "other": Other()}
    given = [one for name, one in callbacks.items() if name not in brought]
    run = fit(bringing(*(callbacks[name] for name in brought)), *given, train=two, enable_checkpointing=True)
    assert_ran(callbacks["remat"], 1)
    assert_same(plain.results, run.results)
    assert run.trainer.callbacks[-1] is callbacks["checkpoint"]
    assert {*callbacks.values()} <= {*run.trainer.callbacks}


class Special(RematCallback):
    pass


@pytest.mark.parametrize("kind", [RematCallback, Special])
def test_what_a_module_brings_takes_the_place_of_the_trainers(kind, plain):
    own = kind(0.9, solver="greedy", cost_model="unit", measure=False, artifacts=False)
    given = quick("min")
    run = fit(bringing(own), given, train=two)
    assert_ran(own, 1)
    assert_same(plain.results, run.results)
    assert given.plans == () and given not in run.trainer.callbacks
    run.trainer.fit(run.module, loader(16))  # asks the module again, and has nothing left to train
    assert [one for one in run.trainer.callbacks if isinstance(one, RematCallback)] == [own]
    assert_clean(run.trainer, run.module)


class Rated(Small):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def test_a_learning_rate_finder_searches_before_it_plans(tmp_path):
    """Lightning puts it first, and takes the callbacks away while it searches."""
    options = {"train": lambda: loader(160), "max_steps": 2, "default_root_dir": tmp_path, "remat": quick()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own use of schedulers and checkpoints in its search
        one, other, remat = compare(
            Rated, plans=1, callbacks=lambda: [LearningRateFinder(num_training_steps=16)], **options
        )
    assert isinstance(other.trainer.callbacks[0], LearningRateFinder) and remat.runs == (2,)
    assert one.module.lr == other.module.lr != 0.01
    assert list(tmp_path.iterdir()) == []


def test_two_in_one_trainer_are_refused():
    with pytest.raises(ConfigError, match="more than one RematCallback"):
        trainer(quick(), quick()).fit(Small(), two())
