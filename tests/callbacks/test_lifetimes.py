"""More than one fit: checkpoints that are saved and resumed, fits one after the other, copies and pickles."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from lightning_remat.callbacks import RematCallback
from lightning_remat.errors import InfeasibleBudgetError
from tests.helpers.small import ONE, Checked, quick, saving, two
from tests.helpers.training import (
    Classifier,
    Run,
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

# -- what is saved ----------------------------------------------------------------------------------------------------


# Lightning's own remarks on a folder that is used a second time.
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning", "ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize("saved_with", [True, False], ids=["saved with it", "saved without it"])
def test_a_checkpoint_goes_from_one_to_the_other(saved_with, tmp_path):
    def trained(remat: Sequence[RematCallback], epochs: int, **more: Any) -> Run:
        callbacks = [saving(tmp_path), *remat]
        return fit(Checked, *callbacks, max_epochs=epochs, train=two, val=True, enable_checkpointing=True, **more)

    remat = quick()
    assert remat.state_dict() == {}
    path = trained([remat] * saved_with, 1).trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=False)
    assert [key.partition("{")[0] for key in saved["callbacks"]] == ["ModelCheckpoint"]
    resumed = trained([remat] * (not saved_with), 2, ckpt_path=path)
    assert_ran(remat, 1)
    assert resumed.trainer.global_step == 4 and resumed.trainer.current_epoch == 2
    assert_same(trained([], 2, ckpt_path=path).results, resumed.results)
    assert remat.state_dict() == {}
    remat.load_state_dict({})
    assert_ran(remat, 1)


def test_the_best_checkpoint_is_loaded_after_a_fit(tmp_path):
    def tested(*remat: RematCallback) -> Any:
        folder = tmp_path / str(len(remat))
        run = fit(Checked, *remat, saving(folder), train=two, val=True, enable_checkpointing=True)
        found = []
        for method in ("validate", "test", "predict"):
            nn.init.zeros_(run.module.net[0].weight)
            found.append(getattr(run.trainer, method)(run.module, loader(12), ckpt_path="best"))
            assert run.module.net[0].weight.any()
        return found, run.module.state_dict()

    remat = quick()
    assert_same(tested(), tested(remat))
    assert_ran(remat, 1)
    assert remat.runs == (2,)


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


def test_nothing_is_kept_of_a_training_that_is_over():
    """As in a search for hyperparameters: one fit after the other in one process."""

    def train() -> list[weakref.ref[Any]]:
        remat = quick()
        run = fit(Checked, remat, max_epochs=1, train=two, val=True)
        assert_ran(remat, 1)
        return [*map(weakref.ref, (run.trainer, run.trainer.lightning_module, remat, *remat.plans))]

    kept = train()
    for _ in range(3):
        gc.collect()
    assert not any(one() for one in kept)


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


# -- copies -----------------------------------------------------------------------------------------------------------


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


def test_the_callback_can_be_copied_and_pickled_after_a_fit_and_keeps_nothing_of_it_alive():
    remat = callback()
    module = weakref.ref(fit(Classifier, remat, train=two).module)
    del remat.log, remat.log_dict  # of the module, which Lightning gives each callback
    for _ in range(3):
        gc.collect()
    assert module() is None
    assert len(remat.plans) == 1 and remat.plan is remat.plans[0]
    for copied in (pickle.loads(pickle.dumps(remat)), copy.deepcopy(remat)):
        assert (copied.plan, copied.plans, copied.runs) == (remat.plan, remat.plans, remat.runs)
    run = fit(Classifier, copied, train=two)
    assert_same(fit(Classifier, train=two).results, run.results)
    assert_ran(copied, 1)


# -- what changes in a fit --------------------------------------------------------------------------------------------


def test_an_epoch_that_updates_batch_norms():
    """The last one of `StochasticWeightAveraging`: they count batches, and average over all of them."""

    def trained(*remat: RematCallback) -> Run:
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=2)
        return fit(Classifier, averaging, *remat, train=lambda: loader(32), max_epochs=3)

    remat = callback(0.5)
    scheduled = trained(remat)
    assert_same(trained().results, scheduled.results)
    assert remat.plans[0].rematerializes and sum(remat.runs) == 16 and not remat.failures


def test_a_budget_that_does_not_fit_at_first_is_an_error():
    with pytest.raises(InfeasibleBudgetError):
        fit(Classifier, callback("1KiB"), train=two)
