"""The batch size finder in a whole run: what it must leave as it was, and what must follow the size that it has found.

    python -m tests.callbacks.test_batch_size_finder_cases FOLDER

is the run of two processes that a test starts.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.parsing import lightning_getattr
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from tests.helpers.failing import failing
from tests.helpers.places import ROOT
from tests.helpers.training import Validated, assert_clean, assert_ran, assert_same, callback, loader, trainer

SAMPLES = 72
BEFORE = 8
MOST = 24  # of the finder
BUDGET = 12_400  # bytes; 24 samples take more without rematerialization
SMALLER = 12_050  # and 23 too
BUCKETS = 4 * (16 * 16 + 16 + 16 * 4 + 4)  # of the gradients of two processes


def data(samples: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    """A loader that Lightning can make again with another sampler."""
    return DataLoader(loader(samples).dataset, batch_size=batch_size, **options)


class Sized(Validated):
    """Its training loader has a batch size that can be set, the others have their own."""

    samples = SAMPLES

    def __init__(self, batch_size: int = BEFORE) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4))
        self.batch_size = batch_size
        self.sizes: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return data(self.samples, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return data(12, 4)

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    test_step = validation_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InBoth(Sized):
    """Has the batch size as an attribute and in its hyperparameters."""

    def __init__(self, batch_size: int = BEFORE) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters("batch_size")


class Data(pl.LightningDataModule):
    """Has it twice too. One validation loader has a size of its own; training drops what is less than a batch."""

    def __init__(self, batch_size: int = BEFORE) -> None:
        super().__init__()
        self.save_hyperparameters("batch_size")
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return data(SAMPLES + 5, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [data(12, 4), data(SAMPLES, self.batch_size)]


class Brings(InBoth):
    """Brings its own callbacks, and asks for the number of steps."""

    own: tuple[pl.Callback, ...] = ()

    def configure_callbacks(self) -> list[pl.Callback]:
        return list(self.own)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # the loader is made for it, before the search
        return super().configure_optimizers()


def pair(budget: Any = BUDGET) -> tuple[RematCallback, RematBatchSizeFinder]:
    return callback(budget, solver="greedy"), RematBatchSizeFinder(max_val=MOST)


def assert_found(module: Any, remat: RematCallback, finder: RematBatchSizeFinder, size: int = MOST) -> None:
    """This size was found and trained with, and what was planned for it ran."""
    assert_ran(remat)
    assert finder.found is not None and finder.found.plan.rematerializes
    assert finder.optimal_batch_size == module.batch_size == size
    assert module.sizes and {*module.sizes} == {size}
    assert_clean(module.trainer, module)


# -- one run, and what it leaves as it was ----------------------------------------------------------------------------


class Snapshot(pl.Callback):
    """All that a search could leave behind, as it is when this callback's turn comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.facts = {
            "progress": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
            "limits": (trainer.max_steps, trainer.min_steps, trainer.max_epochs, trainer.min_epochs),
            "batches": [getattr(trainer, f"limit_{name}_batches") for name in ("train", "val", "test", "predict")],
            "accumulation": trainer.accumulate_grad_batches,
            "state": (trainer.state.fn, trainer.state.stage, trainer.state.status),
            "callbacks": [id(one) for one in trainer.callbacks],
            "loggers": [id(one) for one in trainer.loggers],
            "logged": [list(one.calls) for one in trainer.loggers],
            "metrics": (
                dict(trainer.callback_metrics),
                dict(trainer.logged_metrics),
                dict(trainer.progress_bar_metrics),
            ),
            "loop": copy.deepcopy(trainer.fit_loop.state_dict()),
            "files": sorted(str(path) for path in self.folder.rglob("*")),
            "optimizers": copy.deepcopy([one.state_dict() for one in trainer.optimizers]),
            "schedulers": copy.deepcopy([one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]),
            "module": copy.deepcopy(pl_module.state_dict()),
            "modes": [part.training for part in pl_module.modules()],
            "gradients": [(p.grad, p.requires_grad) for p in pl_module.parameters()],
            "attributes": sorted(vars(pl_module)),
            "strategy": sorted(vars(trainer.strategy)),
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        }


class Written(Logger):
    """Keeps what it is told."""

    name, version = "written", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls += metrics

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("hparams")


@dataclasses.dataclass
class Fitted:
    """A run whose finder stands between two snapshots."""

    module: Brings
    datamodule: Data
    trainer: pl.Trainer
    remat: RematCallback
    finder: RematBatchSizeFinder
    before: Snapshot
    after: Snapshot
    logger: Written
    folder: Path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("fitted")
    torch.manual_seed(0)
    remat, finder = pair()
    before, after, logger = Snapshot(folder), Snapshot(folder), Written()
    module, datamodule = Brings(), Data()
    module.own = (before, finder, remat, after)
    runner = trainer(
        ModelCheckpoint(folder / "checkpoints"),
        logger=logger,
        enable_checkpointing=True,
        default_root_dir=folder,
        max_steps=7,
        max_epochs=2,
        limit_val_batches=2,
        reload_dataloaders_every_n_epochs=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        runner.fit(module, datamodule=datamodule)
    return Fitted(module, datamodule, runner, remat, finder, before, after, logger, folder)


def test_the_trainer_is_as_it_was_before_the_search(fitted):
    assert_found(fitted.module, fitted.remat, fitted.finder)
    assert fitted.before.facts["limits"][:3:2] == (7, 2) and fitted.before.facts["batches"][1] == 2
    assert_same(fitted.before.facts, fitted.after.facts)


def test_nothing_is_logged_or_written_before_the_training(fitted):
    assert fitted.after.facts["logged"] == [[]] and fitted.after.facts["files"] == []
    assert {"loss_step", "val_loss/dataloader_idx_0", "remat/budget_GiB"} <= {*fitted.logger.calls}
    files = [path.name for path in fitted.folder.rglob("*") if path.is_file()]
    assert files == ["epoch=1-step=6.ckpt"] and fitted.trainer.global_step == 6


def test_neither_callback_is_saved(fitted):
    assert fitted.finder.state_dict() == fitted.remat.state_dict() == {}
    saved = torch.load(fitted.trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert [key.partition("{")[0] for key in saved["callbacks"]] == ["ModelCheckpoint"]
    assert isinstance(fitted.trainer.callbacks[-1], ModelCheckpoint)


def test_whoever_has_the_size_is_told(fitted):
    """As by Lightning's `lightning_setattr`: attributes and hyperparameters, of module and datamodule."""
    holders = (fitted.module, fitted.module.hparams, fitted.datamodule, fitted.datamodule.hparams)
    assert {holder.batch_size for holder in holders} == {MOST}
    assert lightning_getattr(fitted.module, "batch_size") == MOST and fitted.finder.found.before == BEFORE
    path = fitted.trainer.checkpoint_callback.best_model_path
    assert InBoth.load_from_checkpoint(path).hparams.batch_size == MOST


def test_loaders_are_made_with_the_size_but_for_one_with_its_own(fitted):
    """In the second epoch too, for which they are made again."""
    runner = fitted.trainer
    assert runner.train_dataloader.batch_size == MOST
    assert runner.num_training_batches == len(runner.train_dataloader) == SAMPLES // MOST
    assert fitted.module.sizes == [MOST] * 6
    assert [one.batch_size for one in runner.val_dataloaders] == [4, MOST] and runner.num_val_batches == [2, 2]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_other_loops_are_left_alone(fitted, method):
    """With a finder of their own, and after a fit with one."""
    plain = Sized(MOST)
    plain.load_state_dict(fitted.module.state_dict())
    expected = getattr(trainer(), method)(plain)
    module, (remat, finder) = copy.deepcopy(plain), pair()
    module.batch_size = BEFORE
    assert_same(expected, getattr(trainer(remat, finder), method)(module))
    assert module.batch_size == BEFORE and finder.found is None and remat.plans == ()
    found, runs = fitted.finder.found, fitted.remat.runs
    quiet = trainer(fitted.remat, fitted.finder)
    assert_same(expected, getattr(quiet, method)(fitted.module))
    assert fitted.module.batch_size == MOST and fitted.finder.found is found and fitted.remat.runs == runs


# -- other runs -------------------------------------------------------------------------------------------------------


def outcome(runner: pl.Trainer, module: Sized) -> dict[str, Any]:
    """All numbers that a run ends with."""
    return {
        "state": module.state_dict(),
        "sizes": module.sizes,
        "optimizers": [one.state_dict() for one in runner.optimizers],
        "schedulers": [one.scheduler.state_dict() for one in runner.lr_scheduler_configs],
        "metrics": dict(runner.callback_metrics),
        "random": torch.get_rng_state(),
        "progress": (runner.global_step, runner.current_epoch),
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resumed_run_is_that_of_a_module_made_with_the_size(precision, tmp_path):
    """Parameters, optimizer, learning rates, metrics and random numbers: without either callback, and bit for bit."""
    first, path = trainer(limit_train_batches=2, precision=precision), tmp_path / "first.ckpt"
    first.fit(Sized())
    first.save_checkpoint(path)

    def run(*callbacks: pl.Callback, batch_size: int) -> tuple[Sized, dict[str, Any]]:
        torch.manual_seed(0)
        module = Sized(batch_size)
        runner = trainer(*callbacks, precision=precision, max_epochs=2, limit_train_batches=2)
        torch.manual_seed(7)
        runner.fit(module, ckpt_path=path)
        return module, outcome(runner, module)

    mixed = precision == "bf16-mixed"
    remat, finder = pair("1MiB" if mixed else BUDGET)  # what a processor's own kernels take beside is not known here
    module, found = run(remat, finder, batch_size=BEFORE)
    if mixed:
        assert finder.optimal_batch_size == module.batch_size == MOST and any(remat.runs) and remat.failures == ()
    else:
        assert_found(module, remat, finder)
    assert found["progress"] == (4, 2)
    assert_same(run(batch_size=MOST)[1], found)


# -- what fails -------------------------------------------------------------------------------------------------------


class Fails(InBoth):
    """Cannot do with more than so many samples."""

    at_most = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > self.at_most:
            raise ValueError("the user's own")
        return loss


def out_of_memory(_: str) -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def test_a_search_that_fails_puts_the_size_back(tmp_path):
    """At a batch that is predicted from, and at one that is confirmed; one that is out of memory is made smaller."""
    remat, finder = pair(SMALLER)
    torch.manual_seed(0)
    module = Fails()
    runner = trainer(remat, finder, limit_train_batches=2, default_root_dir=tmp_path)
    state, numbers = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    for at_most in (BEFORE // 2, BEFORE):
        module.at_most = at_most
        with pytest.raises(ValueError, match="the user's own"):
            runner.fit(module)
        assert finder.found is None
        assert module.batch_size == module.hparams.batch_size == BEFORE and module.sizes == []
        assert all(p.grad is None for p in module.parameters())
        assert_same(state, module.state_dict())
        assert_same(numbers, torch.get_rng_state())
        assert_clean(runner, module)
        assert not torch.autograd._profiler_enabled() and list(tmp_path.iterdir()) == []
    module.at_most = MOST
    with failing("backward", after=0, kind=out_of_memory) as calls:  # the first backward is that of a confirming step
        runner.fit(module)
    assert len(calls) > 1
    assert_found(module, remat, finder, MOST - 1)


def test_holders_of_different_sizes_get_their_own_back(tmp_path):
    """The search fails at a batch that is predicted from."""
    remat, finder = pair(SMALLER)
    module = Fails()
    module.batch_size = 2 * BEFORE
    module.at_most = 1
    with pytest.raises(ValueError, match="the user's own"):
        trainer(remat, finder, default_root_dir=tmp_path).fit(module)
    assert (module.batch_size, module.hparams.batch_size) == (2 * BEFORE, BEFORE)


class Draws(Sized):
    """Its loader shuffles with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def train_dataloader(self) -> DataLoader[Any]:
        return data(self.samples, self.batch_size, shuffle=True, generator=self.draws)


def test_a_generator_of_ones_own_is_put_back():
    found = []
    for callbacks in (pair(), ()):
        torch.manual_seed(0)
        module = Draws()
        if not callbacks:
            module.batch_size = MOST
        trainer(*callbacks, limit_train_batches=2, num_sanity_val_steps=0).fit(module)
        found.append((module.batch_size, module.draws.get_state()))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


# -- two processes ----------------------------------------------------------------------------------------------------


class Watched(Sized):
    """Writes down which samples come."""

    samples = 4 * MOST

    def __init__(self) -> None:
        super().__init__()
        self.came: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.came += batch[0][:, 0].tolist()


def digest(tensors: Any) -> str:
    """The same for the same bits."""
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """One of two processes: writes what it has found and trained to ``FOLDER/RANK.json``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    module = Watched()
    remat, finder = pair(BUDGET + BUCKETS)
    options = {"limit_val_batches": 0, "num_sanity_val_steps": 0}  # these take the gradients away
    runner = trainer(remat, finder, strategy="ddp", devices=2, default_root_dir=folder, **options)
    runner.fit(module)
    train = runner.train_dataloader
    found = {
        "size": finder.optimal_batch_size,
        "attribute": module.batch_size,
        "before": finder.found.before if finder.found is not None else None,
        "loader": train.batch_size,
        "sampler": [type(train.sampler).__name__, train.sampler.num_replicas, train.sampler.rank],
        "batches": runner.num_training_batches,
        "steps": runner.global_step,
        "sizes": module.sizes,
        "samples": module.came,
        "parameters": digest(module.parameters()),
        "gradients": digest(p.grad for p in module.parameters()),
        "optimizers": digest(value for state in runner.optimizers[0].state.values() for value in state.values()),
        "rematerializes": [plan.rematerializes for plan in remat.plans],
        "runs": remat.runs,
        "failures": remat.failures,
        "clean": "training_step" not in vars(runner.strategy),
    }
    (folder / f"{runner.global_rank}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has found."""
    folder, cache = tmp_path_factory.mktemp("processes"), tmp_path_factory.mktemp("cache")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.test_batch_size_finder_cases", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LIGHTNING_REMAT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "1.json"]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.long
def test_two_processes_find_the_same_size(processes):
    first, second = processes
    assert first["size"] == second["size"] > BEFORE == first["before"] == second["before"]
    for one in processes:
        assert one["attribute"] == one["loader"] == one["size"]
        assert one["failures"] == [] and any(one["rematerializes"]) and all(one["runs"]) and one["clean"]


@pytest.mark.long
def test_the_loaders_of_two_processes_share_the_samples(processes):
    whole = {float(x[0]) for x, _ in loader(Watched.samples).dataset}
    for rank, one in enumerate(processes):
        assert one["sampler"] == ["DistributedSampler", 2, rank]
        assert one["batches"] == one["steps"] == len(one["sizes"]) and one["sizes"][0] == one["size"]
        assert sum(one["sizes"]) == len(one["samples"]) == Watched.samples // 2
    assert {*processes[0]["samples"]} | {*processes[1]["samples"]} == whole


@pytest.mark.long
def test_two_processes_train_one_model(processes):
    first, second = processes
    for name in ("parameters", "gradients", "optimizers"):
        assert first[name] == second[name]


if __name__ == "__main__":
    main()
