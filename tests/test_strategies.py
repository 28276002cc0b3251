"""Strategies that recover from running out of memory: the run ends with the numbers of one that was never disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_remat.callbacks import RematCallback
from lightning_remat.errors import ConfigError
from lightning_remat.strategies import RematDDPStrategy, RematStrategy
from tests.helpers.failing import failing
from tests.helpers.training import Classifier, Validated, assert_same, callback, fit, loader, trainer


def undisturbed(make: Callable[[], Any] = Classifier, **options: Any) -> dict[str, Any]:
    return fit(make, train=lambda: loader(32), **options).results


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("times", [1, 3])
def test_the_run_goes_on_with_the_same_bits(where, times):
    remat, strategy = callback(0.6), RematStrategy(retries=3)
    with failing(where, times) as calls:
        run = fit(Classifier, remat, strategy=strategy, train=lambda: loader(32))
    assert len(calls) > times
    assert strategy.recoveries == times
    assert_same(undisturbed(), run.results)
    budgets = [plan.budget_bytes for plan in remat.plans]
    assert len(budgets) > 1 and budgets == sorted(budgets, reverse=True)


class Greedy(pl.Callback):
    """From the second batch on the plain step takes all memory; what was captured does not."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        def plain(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA: Tried to allocate 1 GiB")

        if batch_idx == 1:
            (remat,) = (one for one in trainer.callbacks if isinstance(one, RematCallback))
            assert remat._step is not None
            remat._step.function = plain


def test_a_plain_step_that_fits_is_planned_when_it_does_not():
    """With "auto" nothing is swapped in where the plain step seems to fit."""
    remat, strategy = callback("auto", solver="auto"), RematStrategy()
    run = fit(Classifier, remat, Greedy(), strategy=strategy, train=lambda: loader(32))
    assert strategy.recoveries == 1
    assert remat.plan.rematerializes and sum(remat.runs) >= 3
    expected, found = undisturbed(), run.results
    assert_same(expected["state_dict"], found["state_dict"])
    assert_same(expected["random"], found["random"])


def test_accumulated_gradients_are_kept():
    options = {"accumulate_grad_batches": 2}
    strategy = RematStrategy()
    with failing("backward", times=1, after=1):  # the second batch, whose gradients are added to the first's
        run = fit(Classifier, callback(0.6), strategy=strategy, train=lambda: loader(32), **options)
    assert strategy.recoveries == 1
    assert_same(undisturbed(**options), run.results)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_logs_metrics_and_validation(precision):
    expected = fit(Validated, train=lambda: loader(32), val=True, max_epochs=2, precision=precision).results
    strategy = RematStrategy()
    with failing("forward", after=2), failing("backward", after=3):
        run = fit(
            Validated,
            callback(0.6),
            strategy=strategy,
            train=lambda: loader(32),
            val=True,
            max_epochs=2,
            precision=precision,
        )
    assert strategy.recoveries == 2
    assert_same(expected, run.results)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_so_many_retries_the_original_error_comes_out(where):
    with failing(where, times=100), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        fit(Classifier, callback(0.9), strategy=RematStrategy(retries=2), train=lambda: loader(32))
    assert "Make the batch smaller" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_nothing_smaller_is_found_the_original_error_comes_out(where):
    with failing(where, times=100), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        fit(Classifier, callback("min"), strategy=RematStrategy(retries=50), train=lambda: loader(32))
    assert "Make the batch smaller" in "\n".join(caught.value.__notes__)


def test_other_errors_come_out_as_they_are():
    strategy = RematStrategy()
    with failing("backward", kind=RuntimeError), pytest.raises(RuntimeError, match="Tried to allocate") as caught:
        fit(Classifier, callback(0.6), strategy=strategy, train=lambda: loader(32))
    assert strategy.recoveries == 0 and not hasattr(caught.value, "__notes__")


class FailingOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        class Fails(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
                return loss

        return Fails(self.parameters(), lr=0.1)


def test_in_the_optimizer_the_original_error_comes_out():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1 GiB") as caught:
        fit(FailingOptimizer, callback(0.6), strategy=RematStrategy(), train=lambda: loader(32))
    assert "optimizer" in "\n".join(caught.value.__notes__)


def test_by_name_a_callback_is_added():
    run = fit(Classifier, strategy="remat", train=lambda: loader(32))
    assert isinstance(run.trainer.strategy, RematStrategy)
    (added,) = [one for one in run.trainer.callbacks if isinstance(one, RematCallback)]
    assert added.plans and added.config.budget == "auto"
    assert_same(undisturbed(), run.results)


def test_options_of_the_callback():
    strategy = RematStrategy(budget=0.5, cost_model="unit", measure=False, artifacts=False)
    run = fit(Classifier, strategy=strategy, train=lambda: loader(32))
    (added,) = [one for one in run.trainer.callbacks if isinstance(one, RematCallback)]
    assert added.plan.rematerializes
    with pytest.raises(ConfigError, match="in one place"):
        fit(Classifier, callback(0.5), strategy=RematStrategy(budget=0.5), train=lambda: loader(32))
    with pytest.raises(ConfigError, match="retries"):
        RematStrategy(retries=-1)


def test_several_devices_are_refused_by_name():
    with pytest.raises(ConfigError, match="remat_ddp"):
        trainer(strategy="remat", devices=2)


def test_names_and_devices():
    assert trainer(strategy="remat").strategy.root_device == torch.device("cpu")
    strategy = pl.Trainer(strategy="remat_ddp", accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, RematDDPStrategy) and len(strategy.parallel_devices) == 2


class Normalized(Classifier):
    """Its step changes buffers, counters and lists, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4))
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        self.seen.append(float(loss.detach()))
        return {"loss": loss, "steps": self.steps}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_everything_that_the_step_changes_is_put_back(where):
    expected = fit(Normalized, train=lambda: loader(32))
    strategy = RematStrategy()
    with failing(where, after=1):
        run = fit(Normalized, callback(0.9), strategy=strategy, train=lambda: loader(32))
    assert strategy.recoveries == 1
    assert_same(expected.results, run.results)
    assert run.module.steps == expected.module.steps == 4
