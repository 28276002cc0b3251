"""The batch size finder: what it finds fits, is set where the loader looks, and leaves no other trace."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import InfeasibleBudgetError
from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback, batch_size_finder
from lightning_remat.callbacks.batch_size_trials import Trials
from lightning_remat.callbacks.training_data import TrainingData
from lightning_remat.cost import _profile
from lightning_remat.errors import ConfigError
from lightning_remat.planner import BatchSizes, RematWarning, _make
from lightning_remat.planner._batch_size import SOLVES
from lightning_remat.runtime import _planning
from lightning_remat.solvers.portfolio import _largest_batch
from tests.helpers.failing import failing
from tests.helpers.training import Classifier, assert_same, loader, trainer
from tests.helpers.training import callback as unit_callback

SAMPLES = 4096
BUDGET = 4 * 2**20


def callback(budget: Any = BUDGET, time_limit: float = 1.0) -> RematCallback:
    """With measured costs: what an operation takes while it runs is part of what must fit."""
    return unit_callback(budget, cost_model="profile", time_limit=time_limit)


@pytest.fixture
def equal_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Of measured costs, the bytes alone: every operation takes as long."""

    def seconds_of(run: Callable[[], object], device: torch.device) -> float:
        run()
        return 1e-3

    monkeypatch.setattr(_profile, "seconds_of", seconds_of)
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path / "costs"))


def deep(width: int = 64, layers: int = 4) -> nn.Sequential:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, width), *parts, nn.Dropout(0.1), nn.Linear(width, 4))


class Sized(Classifier):
    """Makes its own loader."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.net = deep()
        self.batch_size = batch_size
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(SAMPLES, self.batch_size, shuffle=True)


class InHparams(Sized):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        del self.batch_size
        self.save_hyperparameters("batch_size")

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(SAMPLES, self.hparams.batch_size)


class Data(pl.LightningDataModule):
    """Holds the batch size itself, or in its hparams."""

    def __init__(self, batch_size: int = 16, hparams: bool = False) -> None:
        super().__init__()
        if hparams:
            self.save_hyperparameters("batch_size")
        else:
            self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(SAMPLES, self.batch_size if hasattr(self, "batch_size") else self.hparams.batch_size)


class Bare(Sized):
    """The loader comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    train_dataloader = pl.LightningModule.train_dataloader


class Sizes(pl.Callback):
    """Batch sizes that the run had."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch[0]) if isinstance(batch, list) else 0)


def run(module: Any, finder: RematBatchSizeFinder, remat: RematCallback | None = None, **options: Any) -> Any:
    """Two steps with what the finder finds; returns the trainer and the batch sizes."""
    sizes = Sizes()
    data = {name: options.pop(name) for name in ("datamodule", "train_dataloaders") if name in options}
    remat = remat or callback(BUDGET)
    runner = trainer(remat, finder, sizes, **{"limit_train_batches": 2, **options})
    runner.fit(module, **data)
    return runner, sizes.seen


def holders() -> dict[str, Any]:
    return {
        "module": lambda: (Sized(), {}),
        "hparams": lambda: (InHparams(), {}),
        "datamodule": lambda: (Bare(), {"datamodule": Data()}),
        "datamodule hparams": lambda: (Bare(), {"datamodule": Data(hparams=True)}),
    }


@pytest.mark.parametrize("holder", holders())
def test_the_largest_is_set_where_the_loader_looks(holder):
    module, data = holders()[holder]()
    finder = RematBatchSizeFinder(max_val=40)
    _, seen = run(module, finder, **data)
    assert finder.found.before == 16
    assert finder.optimal_batch_size == 40 and set(seen) == {40}


@pytest.mark.long
def test_what_is_found_fits_and_is_larger_than_without():
    torch.manual_seed(0)
    torch.set_num_threads(2)
    finder, remat = RematBatchSizeFinder(), callback(BUDGET)
    _, seen = run(Sized(), finder, remat, limit_train_batches=1)
    found = finder.found
    assert found.batch_size == finder.optimal_batch_size > 1.5 * found.without > found.before == 16
    assert set(seen) == {found.batch_size}
    assert found.measured_peak_bytes <= found.plan.budget_bytes == BUDGET
    assert found.measured_peak_bytes == pytest.approx(found.plan.predicted_peak_bytes, rel=0.02)
    assert all(plan.predicted_peak_bytes <= BUDGET and plan.rematerializes for plan in remat.plans)
    assert str(found.batch_size) in found.summary() and "samples a second" in found.summary()
    assert torch.get_num_threads() == 2  # the solvers' searches leave them alone


@pytest.mark.long
def test_a_larger_one_does_not_fit_or_costs_too_much(equal_seconds):
    finder = RematBatchSizeFinder(max_overhead=0.25)
    run(Sized(), finder, callback(time_limit=0.3))
    found = finder.found
    assert found.batch_size > found.without
    assert found.plan.overhead <= 0.26 * 1.05  # what is measured at this size, and what was predicted for it
    assert found.plan.overhead > 0.1 or found.plan.predicted_peak_bytes > 0.95 * BUDGET


@pytest.mark.long
def test_a_wrong_first_prediction_is_corrected(monkeypatch, equal_seconds):
    predicted = BatchSizes.largest

    def found(wrong: float) -> tuple[Any, list[int]]:
        asked: list[int] = []

        def largest(self: BatchSizes, budget_bytes: int, at_most: int) -> int:
            size = predicted(self, budget_bytes, at_most)
            asked.append(size if asked else min(at_most, int(wrong * size)))
            return asked[-1]

        monkeypatch.setattr(BatchSizes, "largest", largest)
        finder = RematBatchSizeFinder(max_overhead=0.2)
        run(Sized(), finder, callback(time_limit=0.3), limit_train_batches=1)
        return finder.found, asked

    right, _ = found(1.0)
    for wrong in (0.6, 1.5):
        corrected, asked = found(wrong)
        assert len(asked) > 1
        assert corrected.batch_size > asked[0] if wrong < 1 else corrected.batch_size < asked[0]
        assert corrected.batch_size == pytest.approx(right.batch_size, rel=0.1)
        assert corrected.measured_peak_bytes <= BUDGET


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the finder does that takes long."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            calls[what] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counting)

    count(Trials, "capture", "captures")
    count(Trials, "confirm", "real steps")
    count(_planning.Planning, "measured", "measurements")
    count(_largest_batch, "solve", "solves of the search")
    count(_make, "find_smallest", "plans")
    count(_make, "solve", "plans")
    return calls


@pytest.mark.long
def test_few_captures_and_solves(equal_seconds, counted):
    """At most four plans' time: as many measurements, and solves of three seconds instead of plans."""
    finder, remat = RematBatchSizeFinder(), callback(time_limit=0.3)
    trained = Sized()
    counts: list[Counter[str]] = []

    class Seen(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            counts.append(counted.copy())

    trainer(remat, finder, Seen(), limit_train_batches=1).fit(trained)
    (found,) = counts
    assert finder.optimal_batch_size > 1.5 * finder.found.without
    assert found["captures"] == 2
    assert 1 <= found["real steps"] <= 2
    # A step that counts itself is captured a second time, with the costs at hand; so is its form with the loss in slices.
    assert found["measurements"] <= 2 * (found["captures"] + 2 * found["real steps"])
    assert found["solves of the search"] <= sum(SOLVES)
    assert found["plans"] == 2  # of what is predicted from, without rematerialization
    assert finder.found.plan.solver == "moved"
    assert remat.plan.predicted_seconds <= finder.found.plan.predicted_seconds * (1 + 1e-9)


@pytest.mark.long
def test_a_captured_batch_that_runs_out_of_memory_is_survived(equal_seconds, counted, monkeypatch):
    """The larger of the two that are predicted from: a smaller one takes its place."""
    sizes: list[int] = []
    batch = TrainingData.batch
    monkeypatch.setattr(TrainingData, "batch", lambda self, size: (sizes.append(size), batch(self, size))[1])
    finder = RematBatchSizeFinder(max_val=100)
    with failing("forward", after=1):
        run(Sized(), finder, callback(time_limit=0.3), limit_train_batches=1)
    assert sizes[:3] == [8, 100, 16] or sizes[0] == 8 < sizes[2] == 16 < sizes[1]
    assert counted["captures"] == 3
    assert finder.optimal_batch_size > 16


@pytest.mark.long
def test_nothing_of_a_step_that_ran_out_of_memory_is_held(equal_seconds, monkeypatch):
    """When the next size is tried, the batch of the last is gone, and so is all that its step has saved."""
    given: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    alive: list[list[int]] = []
    batch = TrainingData.batch

    def watched(self: TrainingData, size: int) -> Any:
        alive.append([number for number, ref in given if ref() is not None])
        made = batch(self, size)
        given.append((size, weakref.ref(made[0])))
        return made

    monkeypatch.setattr(TrainingData, "batch", watched)
    finder = RematBatchSizeFinder(max_val=300)
    with failing("backward", after=0, times=2):  # the first backward is that of a confirming step
        run(Sized(), finder, callback(time_limit=0.3), limit_train_batches=1)
    tried = [size for size, _ in given]
    assert tried[2] > tried[3] > tried[4] == finder.optimal_batch_size
    assert alive == [[]] * len(tried)


@pytest.mark.long
def test_progress_says_what_is_tried(monkeypatch, equal_seconds):
    words: list[str] = []
    monkeypatch.setattr(batch_size_finder.PlanningProgress, "__call__", lambda _, text: words.append(text))
    finder = RematBatchSizeFinder(max_overhead=0.25)
    run(Sized(), finder, callback(time_limit=0.3), limit_train_batches=1)
    said = "\n".join(words)
    for expected in (
        r"^predicting from a batch size of 8: capturing$",
        r"^predicting from a batch size of \d{2,}: measuring operation 1 of \d+",
        r"^between a batch size of \d+ and \d+$",
        r"^confirming a batch size of \d+, try 1 of at most 5: capturing$",
        r"^confirming a batch size of \d+, try 1 of at most 5: running the step$",
    ):
        assert re.search(expected, said, re.MULTILINE), expected


def test_the_run_is_that_of_the_same_batch_size_without_the_finder():
    """Parameters, buffers, random numbers, logs and own state: the search leaves nothing behind."""
    results = []
    for searched in (True, False):
        torch.manual_seed(0)
        module = Sized()
        if searched:
            finder = RematBatchSizeFinder(max_val=50)
            torch.manual_seed(7)
            runner, _ = run(module, finder)
        else:
            module.batch_size = finder.optimal_batch_size
            runner = trainer(limit_train_batches=2)
            torch.manual_seed(7)
            runner.fit(module)
        results.append(
            {
                "state": module.state_dict(),
                "steps": module.steps,
                "metrics": dict(runner.callback_metrics),
                "random": torch.random.get_rng_state(),
            }
        )
    assert_same(*results)
    assert results[0]["steps"] == 2


@pytest.mark.long
def test_max_val_margin_and_the_dataset_are_limits():
    finder = RematBatchSizeFinder(max_val=24)
    run(Sized(), finder)
    assert finder.optimal_batch_size == 24
    finder = RematBatchSizeFinder(max_val=40, margin=0.25)
    run(Sized(), finder)
    assert finder.optimal_batch_size == 30
    finder = RematBatchSizeFinder()
    run(Sized(), finder, callback("2GiB"))
    assert finder.optimal_batch_size == SAMPLES


def test_a_loader_made_from_a_batch_size():
    finder = RematBatchSizeFinder(train_dataloader=lambda size: loader(SAMPLES, size), max_val=40)
    _, seen = run(Bare(), finder, train_dataloaders=loader(SAMPLES, 8))
    assert finder.found.before == 8 < finder.optimal_batch_size and set(seen) == {finder.optimal_batch_size}


@pytest.mark.long
def test_the_effective_batch_size_is_kept():
    finder = RematBatchSizeFinder(keep_effective_batch_size=True)
    runner, seen = run(Sized(batch_size=96), finder, accumulate_grad_batches=4)
    found = finder.found
    assert found.batch_size * found.accumulate_grad_batches == 384
    assert found.batch_size > 96 and set(seen) == {found.batch_size}
    assert runner.accumulate_grad_batches == found.accumulate_grad_batches


class Derived(pl.LightningDataModule):
    """What the loader is made with was computed when the datamodule was set up."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 16

    def setup(self, stage: str) -> None:
        self.batch_size_per_device = self.batch_size // 2

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(SAMPLES, self.batch_size_per_device)


@pytest.mark.long
def test_a_loader_that_does_not_follow_is_refused():
    with pytest.raises(ConfigError, match="batches of 8.*batch_arg_name"):
        run(Bare(), RematBatchSizeFinder(), datamodule=Derived())
    finder = RematBatchSizeFinder(batch_arg_name="batch_size_per_device", max_val=40)
    _, seen = run(Bare(), finder, datamodule=Derived())
    assert set(seen) == {finder.optimal_batch_size}


class Pairs(Sized):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch["image"], batch_idx), "more": 1}

    def train_dataloader(self) -> Any:
        return {"image": loader(SAMPLES, self.batch_size), "text": loader(SAMPLES, self.batch_size)}


@pytest.mark.long
def test_several_loaders_and_outputs_in_a_dict():
    finder = RematBatchSizeFinder(max_val=40)
    runner, _ = run(Pairs(), finder, limit_train_batches=1)
    assert finder.optimal_batch_size > 16 and runner.global_step == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:only a part of Recurrent:lightning_remat.planner.RematWarning")
def test_what_cannot_be_predicted_stays_as_it_is():
    class Recurrent(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 4))
            self.recurrent = nn.LSTM(16, 16, 2)  # holds far more than is predicted

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            packed = nn.utils.rnn.pack_sequence([x])
            return super().training_step((self.recurrent(packed)[0].data, y), batch_idx)

    finder = RematBatchSizeFinder()
    with pytest.warns(RematWarning, match="stays at 16"):
        _, seen = run(Recurrent(), finder, callback(110_000))
    assert finder.found is None and set(seen) == {16}


def test_not_even_one_sample():
    with pytest.raises(InfeasibleBudgetError, match="smallest feasible"):
        run(Sized(), RematBatchSizeFinder(), callback(200_000))


def test_fast_dev_run_looks_for_nothing():
    finder = RematBatchSizeFinder()
    with pytest.warns(RematWarning, match="fast_dev_run"):
        run(Sized(), finder, fast_dev_run=True, limit_train_batches=1.0)
    assert finder.found is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trainer(RematBatchSizeFinder()).fit(Sized()), "has none"),
        (lambda: run(Sized(), RematBatchSizeFinder(), callback(0.5)), "is no size"),
        (lambda: run(Bare(), RematBatchSizeFinder(), train_dataloaders=loader()), "given to fit"),
        (lambda: run(Bare(), RematBatchSizeFinder(), datamodule=Derived(), max_steps=0), None),
        (lambda: run(Bare(), RematBatchSizeFinder(batch_arg_name="size"), datamodule=Data()), "has 'size'"),
        (lambda: RematBatchSizeFinder(max_val=0), "max_val"),
        (lambda: RematBatchSizeFinder(margin=1.0), "margin"),
        (lambda: RematBatchSizeFinder(margin="5%"), "margin"),  # type: ignore[arg-type]
        (lambda: RematBatchSizeFinder(max_overhead=-1), "max_overhead"),
        (lambda: RematBatchSizeFinder(max_overhead="10%"), "max_overhead"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_used_is_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_manual_optimization_is_refused():
    module = Sized()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual optimization"):
        run(module, RematBatchSizeFinder())


def test_validation_needs_no_batch_size():
    runner = trainer(callback(BUDGET), RematBatchSizeFinder())
    dataset = TensorDataset(torch.randn(8, 16), torch.randint(4, (8,)))

    class Checked(Sized):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

    runner.validate(Checked(), DataLoader(dataset, 4))
    assert "val_loss" in runner.callback_metrics
