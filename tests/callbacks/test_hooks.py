"""RematCallback among the hooks: each is called when and as it would be without it, and may skip, stop or fail."""

from __future__ import annotations

import functools
import inspect
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback
from lightning_remat.errors import ConfigError
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


def quick(budget: Any = 0.9, **options: Any) -> RematCallback:
    """A callback that plans at once: what it plans is not at issue here."""
    return callback(budget, **{"solver": "greedy", **options})


class Small(Classifier):
    """Quick to capture, and with something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4))


class Checked(Small, Validated):
    """With validation, test and prediction."""


def two() -> Any:
    """Two batches of one size: one plan."""
    return loader(16)


def saving(folder: Any, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **options)


# -- what is called ---------------------------------------------------------------------------------------------------


def hooks_of(*owners: type) -> tuple[str, ...]:
    return tuple(n for owner in owners for n, value in vars(owner).items() if inspect.isfunction(value) and n[0] != "_")


OPTIMIZATION = (
    "configure_callbacks",
    "configure_optimizers",
    "configure_gradient_clipping",
    "clip_gradients",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)
LEGACY = "configure_sharded_model"  # may not stand beside configure_model
OF_MODULES = (*(n for n in hooks_of(ModelHooks, DataHooks, CheckpointHooks) if n != LEGACY), *OPTIMIZATION)
OF_CALLBACKS = hooks_of(pl.Callback)


def fact(value: Any, nested: bool = False) -> Any:
    """What two runs must have in common of an argument: numbers and texts as they are, a tensor's sum, else the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad, value.detach().double().sum().item()
    if isinstance(value, (list, tuple)):
        return [fact(item) for item in value]
    if isinstance(value, Mapping) and not nested:
        return [(key, fact(item, nested=True)) for key, item in value.items()]
    return type(value).__name__


def moment(runner: pl.Trainer | None) -> Any:
    """Where in a run a hook is called."""
    module = runner.lightning_module if runner is not None else None
    if runner is None or module is None:
        return None
    return runner.state.stage, runner.global_step, runner.current_epoch, module.training, torch.is_grad_enabled()


Failure = tuple[str, str, int]
"""Whose hook fails, which, and at which of its calls."""


class Journal:
    """Calls of hooks, in their order; one that is named fails."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.trainer: pl.Trainer | None = None
        self.fails: Failure | None = None
        self.error: BaseException = RuntimeError("the user's own")

    def write(self, owner: str, hook: str, arguments: Any) -> None:
        self.calls.append((owner, hook, moment(self.trainer), fact(arguments)))
        if self.fails is not None and self.fails[:2] == (owner, hook):
            left = self.fails[2] - 1
            self.fails = (owner, hook, left) if left else None
            if not left:
                raise self.error

    @property
    def hooks(self) -> list[str]:
        return [hook for _, hook, *_ in self.calls]


def recording(base: type, hooks: Sequence[str]) -> Any:
    """A subclass whose hooks are written down, and do what they did."""

    def recorded(hook: str) -> Callable[..., Any]:
        original = getattr(base, hook)

        @functools.wraps(original)
        def write_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            told = [value for value in (*args, *kwargs.values()) if not isinstance(value, (pl.Trainer, Module))]
            self.journal.write(self.owner, hook, told)
            return original(self, *args, **kwargs)

        del write_and_call.__wrapped__  # Lightning would look through it, and see a hook that nobody overrides
        write_and_call.__signature__ = inspect.signature(original)
        return write_and_call

    return type(f"Recording{base.__name__}", (base,), {hook: recorded(hook) for hook in hooks})


class Module(Checked):
    """With loaders, a scheduler and steps of its own."""

    owner = "module"
    samples = 16

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def train_dataloader(self) -> Any:
        return loader(self.samples)

    def val_dataloader(self) -> Any:
        return DataLoader(loader(12).dataset, batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Listener(pl.Callback):
    def __init__(self, journal: Journal, owner: str = "callback") -> None:
        self.journal, self.owner = journal, owner

    @property
    def state_key(self) -> str:
        return self.owner


RecordingModule = recording(Module, OF_MODULES)
RecordingCallback = recording(Listener, OF_CALLBACKS)


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


# -- what fails -------------------------------------------------------------------------------------------------------


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


# -- what skips and stops ---------------------------------------------------------------------------------------------


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


# -- what a step returns ----------------------------------------------------------------------------------------------


class Returns(Small):
    """Keeps what its hook is given, and a copy of it as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []
        self.copies: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append(outputs)
        self.copies.append(copied(outputs))


def copied(value: Any) -> Any:
    """The numbers of an output, without its gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


class ReturnsMore(Returns):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        more = {"nested": [logits.argmax(1), {"y": y}], "accuracy": (logits.argmax(1) == y).float().mean()}
        return {"batch": batch_idx, "logits": logits, "loss": loss, "detached": logits.detach(), "none": None, **more}


class ReturnsMoreByHand(ReturnsMore):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return {**output, "loss": output["loss"].detach()}


@pytest.mark.parametrize(("make", "accumulate"), [(Returns, 2), (ReturnsMore, 1), (ReturnsMoreByHand, 1)])
def test_outputs_are_those_of_the_plain_step_and_stay_so(make, accumulate):
    """Of the same kind, detached or not, as without the callback; later steps do not overwrite what a hook keeps."""
    options = {"train": lambda: loader(24), "accumulate_grad_batches": accumulate, "remat": quick()}
    one, other, _ = compare(make, plans=None, **options)
    assert_same(one.module.given, other.module.given)
    assert_same(one.module.copies, other.module.copies)
    assert len(other.module.given) == 3
    assert_same(other.module.copies, [copied(outputs) for outputs in other.module.given])
    assert all(outputs["loss"].grad_fn is None for outputs in other.module.given)
    more = ["batch", "logits", "detached", "none", "nested", "accuracy"]
    assert {*other.module.given[0]} == {"loss", *(more if make in (ReturnsMore, ReturnsMoreByHand) else ())}


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


class SkipsTheFirst(Small):
    """Has nothing to learn from the first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx < 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
def test_a_first_batch_that_is_skipped_says_nothing_of_the_others():
    _, _, remat = compare(SkipsTheFirst, plans=None, remat=quick(), train=lambda: loader(32))
    assert remat.failures == ()


def test_two_in_one_trainer_are_refused():
    with pytest.raises(ConfigError, match="more than one RematCallback"):
        trainer(quick(), quick()).fit(Small(), two())
