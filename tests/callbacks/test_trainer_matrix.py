"""What a Trainer can be told, cell by cell: bit for bit the run without the callback.

Precision, optimization and the Trainer's own options; cells that need more than a line are in `test_callback` and `test_steps`.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_remat.callbacks import RematCallback
from tests.helpers.small import ONE
from tests.helpers.training import (
    Classifier,
    Validated,
    assert_ran,
    assert_same,
    callback,
    compare,
    fit,
    loader,
    network,
    trainer,
)


def _ema() -> WeightAveraging:
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.9))


class Plateau(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), 0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class WarmUp(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.NAdam(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class OwnStep(Classifier):
    """Overrides what Lightning does around the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class Lbfgs(Classifier):
    """Its optimizer runs the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Gan(Classifier):
    """Generator and discriminator take turns, with toggled optimizers and one scheduler each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = network(2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generator, discriminator = self.optimizers()
        real, fake = torch.ones(len(x)), torch.zeros(len(x))

        def judged(values: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return nn.functional.binary_cross_entropy_with_logits(self.discriminator(values).mean(1), label)

        self.toggle_optimizer(generator)
        made = self.net(x).repeat(1, 4)
        loss = judged(made, real)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        other = (judged(x, real) + judged(self.net(x).repeat(1, 4).detach(), fake)) / 2
        discriminator.zero_grad()
        self.manual_backward(other)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.log_dict({"generator": loss, "discriminator": other}, prog_bar=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), 2e-3) for part in (self.net, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


CELLS: dict[str, dict[str, Any]] = {
    # Precision. (On the CPU Lightning runs "16-mixed" as bfloat16, and says so.)
    "32-true": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    # Optimization.
    "accumulation": {"accumulate_grad_batches": 2, "train": lambda: loader(40), "budget": 0.5},
    "accumulation with mixed precision": {
        "accumulate_grad_batches": 3,
        "precision": "bf16-mixed",
        "remat": callback("min", solver="auto"),
    },
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "scheduler on a plateau": {"make": Plateau, "val": True, "max_epochs": 3},
    "scheduler of steps": {"make": WarmUp, "max_epochs": 2},
    "own hooks": {"make": OwnStep},
    "closure run several times": {"make": Lbfgs},
    "several optimizers": {"make": Gan, "plans": None, "budget": 0.7},
    "EMA": {"callbacks": lambda: [_ema()], "max_epochs": 2},
    # Trainer.
    "limit_train_batches": {"limit_train_batches": 1},
    "limit_val_batches": {"make": Validated, "val": True, "limit_val_batches": 1},
    "fast_dev_run": {"fast_dev_run": 2, "make": Validated, "val": True},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "max_time": {"max_time": "00:01:00:00"},
    "min_steps": {"min_steps": 3, "max_epochs": 2},
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 3},
    "no sanity check": {"make": Validated, "val": True, "num_sanity_val_steps": 0},
    "validation inside epochs": {"make": Validated, "val": True, "val_check_interval": 1},
    "validation every second epoch": {"make": Validated, "val": True, "check_val_every_n_epoch": 2, "max_epochs": 3},
    "deterministic": {"deterministic": True},
    "detect_anomaly": {"detect_anomaly": True},
    "no inference mode": {"make": Validated, "val": True, "inference_mode": False},
    "reloaded loaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "early stopping": {
        "make": Validated,
        "val": True,
        "max_epochs": 4,
        "callbacks": lambda: [EarlyStopping("val_loss", patience=0)],
    },
    "workers": {"train": lambda: loader(16, num_workers=1), "max_epochs": 2},
}


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:User-provided SWA:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:.*CPU.*autocast.*:UserWarning",
    "ignore:the memory of LBFGS's state:lightning_remat.planner.RematWarning",
    "ignore:You passed .*precision='16-mixed'.*:UserWarning",
)
@pytest.mark.parametrize("cell", CELLS)
def test_cell(cell: str) -> None:
    options = {"make": Classifier, **ONE, **CELLS[cell]}
    compare(options.pop("make"), **options)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_tf32_settings(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compare(Classifier, **ONE)
    finally:
        torch.set_float32_matmul_precision(before)


def test_learning_rates_and_checkpoints_are_the_same(tmp_path: Any) -> None:
    def callbacks() -> list[pl.Callback]:
        return [LearningRateMonitor("step"), ModelCheckpoint(tmp_path / "any", monitor="val_loss", save_top_k=1)]

    options = {"logger": None, "enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 2, "val": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory", UserWarning)
        _, scheduled, _ = compare(Plateau, **ONE, callbacks=callbacks, **options)
    assert scheduled.trainer.checkpoint_callback.best_model_path


@pytest.mark.slow
def test_spawned_processes_train_the_same() -> None:
    """The Trainer, its callbacks and the module are pickled; what comes back has the same bits."""
    options = {"strategy": "ddp_spawn", "devices": 2, "train": lambda: loader(32)}
    plain = fit(Classifier, **options)
    scheduled = fit(Classifier, callback(), **options)
    assert_same(plain.module.state_dict(), scheduled.module.state_dict())
    assert_same(dict(plain.trainer.callback_metrics), dict(scheduled.trainer.callback_metrics))


class TestPlanOnly:
    @pytest.mark.long
    def test_it_plans_saves_and_stops(self, tmp_path: Any) -> None:
        remat = RematCallback(0.5, cost_model="unit", plan_only=True)
        torch.manual_seed(0)
        before = Validated().state_dict()
        run = fit(Validated, remat, train=lambda: loader(16), val=True, default_root_dir=tmp_path, min_epochs=1)
        assert_ran(remat, 1)
        assert run.trainer.global_step == 0 and not run.recorder.outputs
        assert_same(before, run.module.state_dict())
        assert (tmp_path / "remat" / "plan-1.json").exists()
        assert run.trainer.limit_train_batches == 1.0

    def test_the_plan_is_that_of_the_training(self) -> None:
        planned, trained = callback(0.5, plan_only=True), callback(0.5)
        for remat in (planned, trained):
            fit(Classifier, remat, train=lambda: loader(16))
        assert planned.plan.schedule == trained.plan.schedule
        assert planned.plan.budget_bytes == trained.plan.budget_bytes

    def test_an_error_of_another_callback_leaves_the_trainer_as_it_was(self) -> None:
        class Fails(pl.Callback):
            def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                raise OSError("no space left")

        remat = callback(0.5, plan_only=True)
        runner = trainer(remat, Fails())
        with pytest.raises(OSError, match="no space left"):
            runner.fit(Classifier(), loader(16))
        assert_ran(remat, 1)
        assert runner.limit_train_batches == 1.0


def test_another_callbacks_training_step_of_the_strategy_stays() -> None:
    seen: list[int] = []

    class Counts(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            around = trainer.strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                seen.append(1)
                return around(*args, **kwargs)

            self.own = trainer.strategy.training_step = training_step  # type: ignore[method-assign]

    counts, remat = Counts(), callback(0.5)
    run = fit(Classifier, counts, remat, train=lambda: loader(16))
    assert_ran(remat, 1)
    assert len(seen) == sum(remat.runs) > 0
    assert vars(run.trainer.strategy)["training_step"] is counts.own
