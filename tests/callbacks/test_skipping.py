"""Batches and epochs that are skipped, and fits that are stopped, by the module: as without the callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.small import Small, quick, two
from tests.helpers.training import Classifier, assert_clean, assert_same, compare, fit, loader

# -- what hooks skip --------------------------------------------------------------------------------------------------


class LeavesEpochs(Small):
    """The rest of an epoch is skipped from one of its batches on."""

    leaves_at = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.leaves_at else None


def test_a_module_may_skip_the_rest_of_an_epoch():
    """A skipped batch ends what was measured of it."""
    options = {"train": lambda: loader(40), "max_epochs": 2, "remat": quick(measure=True)}
    one, other, remat = compare(LeavesEpochs, plans=1, **options)
    assert one.trainer.global_step == other.trainer.global_step == sum(remat.runs) == 4
    assert remat.measured_peak_bytes and not torch.autograd._profiler_enabled()


def test_a_fit_whose_epochs_are_all_skipped_plans_nothing():
    class LeavesAtOnce(LeavesEpochs):
        leaves_at = 0

    remat = quick(measure=True)
    run = fit(LeavesAtOnce, remat, train=two, max_epochs=2)
    assert remat.plans == () and run.trainer.global_step == 0
    assert_clean(run.trainer, run.module)
    assert_same(fit(LeavesAtOnce, train=two, max_epochs=2).results, run.results)


# -- what steps skip --------------------------------------------------------------------------------------------------


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 1:
            return None
        return self.loss(batch)


# Lightning's own advice.
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_skips_batches():
    _, scheduled, remat = compare(Skips, train=lambda: loader(32), plans=None)
    assert sum(remat.runs) >= 2 and scheduled.trainer.global_step == 4


class NoSecondLoss(Small):
    """The second step of an epoch computes its loss, and does not return it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


# Lightning's own advice.
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_keeps_its_loss_to_itself():
    options = {"train": lambda: loader(24), "max_epochs": 2, "remat": quick()}
    one, other, remat = compare(NoSecondLoss, plans=None, **options)
    assert [len(outputs) for outputs in other.recorder.outputs] == [1, 0, 1] * 2
    assert one.trainer.global_step == 6 and sum(remat.runs) >= 4


class SkipsTheFirst(Small):
    """Has nothing to learn from the first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx < 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
def test_a_first_batch_that_is_skipped_says_nothing_of_the_others():
    _, _, remat = compare(SkipsTheFirst, plans=None, remat=quick(), train=lambda: loader(32))
    assert remat.failures == ()


# -- what stops -------------------------------------------------------------------------------------------------------


class Stops(Small):
    """Stops the fit in its second batch."""

    where = "training_step"

    def stop(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 1:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stop("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stop("on_train_batch_start", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stop("on_train_batch_end", batch_idx)


@pytest.mark.parametrize(
    ("where", "options", "steps"),
    [
        ("training_step", {"min_epochs": 2}, 6),
        ("on_train_batch_start", {"min_steps": 4}, 4),
    ],
)
def test_a_module_may_stop_the_fit(where, options, steps):
    make = type("StopsThere", (Stops,), {"where": where})
    options = {"train": lambda: loader(24), "max_epochs": 4, "remat": quick(), **options}
    one, other, _ = compare(make, plans=None, **options)
    assert one.trainer.global_step == other.trainer.global_step == steps
    assert other.trainer.should_stop
