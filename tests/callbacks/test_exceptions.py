"""Fits that fail or are interrupted, in a hook or in a step: nothing is left behind, and the next fit is a usual one."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_remat.callbacks import RematCallback
from tests.helpers.journal import Failure, Journal, RecordingCallback, RecordingModule
from tests.helpers.small import Checked, Small, quick, saving, two
from tests.helpers.training import Classifier, assert_clean, assert_ran, assert_same, callback, loader, trainer

# -- in hooks ---------------------------------------------------------------------------------------------------------


FAILURES: dict[str, list[Failure]] = {
    "before anything is planned": [
        ("callback", "setup", 1),
        ("module", "configure_optimizers", 1),
        ("module", "on_fit_start", 1),
        ("callback", "on_sanity_check_end", 1),
        ("module", "on_train_start", 1),
        ("last", "on_train_start", 1),
        ("callback", "on_train_epoch_start", 1),
        ("module", "on_train_batch_start", 1),
    ],
    "around a step": [
        ("last", "on_train_batch_start", 2),
        ("module", "optimizer_step", 2),
        ("module", "on_train_batch_end", 1),
    ],
    "within a step": [
        ("callback", "on_before_backward", 1),
        ("module", "backward", 2),
        ("module", "on_after_backward", 1),
        ("callback", "on_before_optimizer_step", 2),
    ],
    "around an epoch": [
        ("module", "on_validation_start", 2),
        ("module", "on_train_epoch_end", 1),
        ("module", "on_save_checkpoint", 1),
        ("module", "on_train_end", 1),
        ("module", "teardown", 1),
    ],
}


def failing_fits(failures: Sequence[Failure], error: BaseException, folder: Any, *remat: RematCallback) -> list[Any]:
    """A trainer's fits of one module, each with another failure, and a last one without; what each has called and left."""
    journal = Journal()
    journal.error = error
    torch.manual_seed(0)
    module = RecordingModule(journal)
    torch.manual_seed(7)
    around = (RecordingCallback(journal), RecordingCallback(journal, "last"))
    runner = journal.trainer = trainer(around[0], *remat, around[1], saving(folder), enable_checkpointing=True)
    found = []
    for failure in (*failures, None):
        runner.fit_loop.max_epochs = runner.fit_loop.epoch_progress.current.processed + 1
        journal.fails, journal.calls = failure, []
        module.train()  # what fails in a validation stays there
        if failure is None:
            runner.fit(module)
        else:
            with pytest.raises((type(error), SystemExit)) as raised:
                runner.fit(module)
            assert raised.value is error or isinstance(error, KeyboardInterrupt)
        assert journal.fails is None, failure
        assert (journal.hooks.count("on_exception") > 0) == (failure is not None)
        assert_clean(runner, module)
        assert not torch.autograd._profiler_enabled()
        assert all(one.training_step is None and one.failures == () for one in remat)
        found.append(
            {
                "failure": failure,
                "calls": journal.calls,
                "state": {name: value.clone() for name, value in module.state_dict().items()},
                "gradients": [p.grad.clone() if p.grad is not None else None for p in module.parameters()],
                "metrics": dict(runner.callback_metrics),
                "steps": (runner.global_step, runner.current_epoch),
                "random": torch.random.get_rng_state(),
            }
        )
    return found


# Lightning's own remark on a folder that is used a second time.
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize("where", FAILURES)
def test_hooks_that_fail_leave_nothing_behind(where, tmp_path):
    remat, error = quick(), ValueError("the user's own")
    plain = failing_fits(FAILURES[where], error, tmp_path / "plain")
    scheduled = failing_fits(FAILURES[where], error, tmp_path / "remat", remat)
    assert_same(plain, scheduled)
    assert_ran(remat, 1)
    assert remat.runs == (2,)  # of the last fit


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Lightning does not want to be interrupted again once it was."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_an_interrupt_in_a_hook_leaves_nothing_behind(tmp_path):
    """While a step's memory is measured, too."""
    failures = [("callback", "on_before_backward", 2)]
    remat = quick(measure=True)
    plain = failing_fits(failures, KeyboardInterrupt(), tmp_path / "plain")
    scheduled = failing_fits(failures, KeyboardInterrupt(), tmp_path / "remat", remat)
    assert_same(plain, scheduled)
    assert_ran(remat, 1)
    assert remat.measured_peak_bytes


class FailsTwice(pl.Callback):
    """Fails, and again where it is told of its failure: the callbacks after it are told nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("the first")

    def on_exception(self, *_: Any) -> None:
        raise RuntimeError("the second")


def test_a_fit_after_one_that_was_not_ended():
    remat, worse = quick(), FailsTwice()
    runner = trainer(worse, remat)
    with pytest.raises(RuntimeError, match="the second"):
        runner.fit(Small(), two())
    runner.callbacks.remove(worse)
    module = Small()
    runner.fit(module, two())
    assert any(remat.runs)
    assert_clean(runner, module)


# -- in steps ---------------------------------------------------------------------------------------------------------


class BreaksAtOnce(Checked):
    """The very first step fails, while it is captured."""

    breaks = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.breaks:
            raise ValueError("the user's own")
        return loss


def test_a_first_step_that_fails_leaves_nothing_behind():
    def twice(*remat: RematCallback) -> dict[str, Any]:
        torch.manual_seed(0)
        module = BreaksAtOnce()
        runner = trainer(*remat)
        with pytest.raises(ValueError, match="the user's own"):
            runner.fit(module, loader(16), loader(8))
        assert_clean(runner, module)
        module.breaks = False
        runner.fit(module, loader(16), loader(8))
        assert_clean(runner, module)
        return {"state": module.state_dict(), "metrics": dict(runner.callback_metrics)}

    remat = quick()
    assert_same(twice(), twice(remat))
    assert_ran(remat, 1)


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
