"""Strategies that recover from running out of memory: the run ends with the numbers of one that was never disturbed."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks.module_state import ModuleState
from lightning_remat.errors import ConfigError
from lightning_remat.runtime._accumulate import Accumulator
from lightning_remat.strategies import RematDDPStrategy, RematStrategy, _undo
from tests.helpers.cases import slow_but
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


def test_gradients_that_a_failed_backward_has_added_are_not_added_again(monkeypatch):
    added: list[bool] = []
    add = Accumulator._added

    def fails(self: Accumulator, gradient: torch.Tensor, position: int) -> torch.Tensor | None:
        result = add(self, gradient, position)
        added.append(result is None)
        if added.count(True) in (3, 8) and result is None:
            raise torch.OutOfMemoryError("CUDA: Tried to allocate 1 GiB")
        return result

    monkeypatch.setattr(Accumulator, "_added", fails)
    options, remat, strategy = {"accumulate_grad_batches": 2}, callback(0.8), RematStrategy()
    run = fit(Classifier, remat, strategy=strategy, train=lambda: loader(32), **options)
    assert strategy.recoveries == 2 and remat.plans[0].rematerializes
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


@pytest.mark.long
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


class Taught(Classifier):
    """With a teacher that is moved in each step, as a part of what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def moved(self) -> None:
        pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
        for number, (mine, other) in enumerate(pairs):
            if number % 2:
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)
            else:
                with torch.no_grad():
                    mine.lerp_(other, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.moved()
        return loss + (self.teacher(batch[0]) - self.net(batch[0])).square().mean()

    def elsewhere(self) -> Any:
        """What it holds beside parameters and buffers."""
        return ()


class TaughtOutside(Taught):
    """Several teachers, moved outside of what is captured; two of them are no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=average)
        self.hidden = [copy.deepcopy(self.net)]
        self.shadow = Average(next(self.net.parameters()))

    @torch._dynamo.disable
    def moved(self) -> None:
        self.average.update_parameters(self.net)
        self.shadow.update()
        for teacher in (self.teacher, self.hidden[0]):
            for number, (mine, other) in enumerate(zip(teacher.parameters(), self.net.parameters(), strict=True)):
                if number % 2:
                    mine.data.mul_(0.9).add_(other.data, alpha=0.1)
                else:
                    mine.data = 0.9 * mine.data + 0.1 * other.data

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.moved()
        return Classifier.training_step(self, batch, batch_idx) + self.teacher(batch[0]).square().mean()

    def elsewhere(self) -> Any:
        return dict(self.hidden[0].state_dict()), self.shadow.values["average"], self.shadow.updates


class Average:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.values, self.updates = parameter, {"average": parameter.detach().clone()}, 0

    def update(self) -> None:
        self.updates += 1
        self.values["average"].mul_(0.5).add_(self.parameter.detach(), alpha=1 / (1 + self.updates))


class Odd(Taught):
    """Buffers: tied, expanded, not persistent, replaced by new ones; a batch that is written to; weights that are clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(16))
        self.register_buffer("same", self.center)
        self.register_buffer("wide", torch.zeros(1).expand(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = torch.zeros(16)
        self.other = nn.Module()
        self.other.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.other.calls += 1
        x.mul_(0.5)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)
            self.center.lerp_(x.mean(0), 0.1)
            self.plain = 0.9 * self.plain + self.center
            self.widened()
        self.count = self.count + 1
        loss = Classifier.training_step(self, (x - self.same, y), batch_idx)
        return loss + self.wide.sum() + self.plain.sum() * 1e-3

    @torch._dynamo.disable
    def widened(self) -> None:
        self.wide[:1].add_(1)

    def elsewhere(self) -> Any:
        return self.plain, self.other.calls


def everything(run: Any) -> dict[str, Any]:
    return {**run.results, "elsewhere": run.module.elsewhere()}


@functools.cache
def eager(make: Callable[[], Any]) -> dict[str, Any]:
    return everything(fit(make, train=lambda: loader(32)))


@functools.cache
def graphs(make: Callable[[], Any]) -> int:
    """Captured graphs that a step runs."""
    with failing("forward", times=0) as calls:
        run = fit(make, callback(0.9), strategy=RematStrategy(), train=lambda: loader(32))
    assert_same(eager(make), everything(run))
    return len(calls) // 4


@pytest.mark.parametrize(
    ("make", "where", "step"),
    slow_but(
        {(Taught, "forward", 0), (Taught, "backward", 2), (TaughtOutside, "forward", 2), (Odd, "forward", 0)},
        [
            *itertools.product((Taught, TaughtOutside), ("forward", "backward"), (0, 2)),
            (Odd, "forward", 0),
            (Odd, "backward", 2),
        ],
    ),
)
def test_what_a_step_moves_is_moved_once(make, where, step):
    remat, strategy, several = callback(0.9), RematStrategy(), graphs(make)
    with failing(where, after=step * several + (several - 1 if where == "forward" else 0)) as calls:
        run = fit(make, remat, strategy=strategy, train=lambda: loader(32))
    assert strategy.recoveries == 1 and len(calls) > 4 * several
    assert sum(remat.runs) > 4 * several and not remat.failures
    assert_same(eager(make), everything(run))


class Late(Taught):
    """The teacher is moved from the last step on."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data

    @torch._dynamo.disable
    def moved_late(self, batch_idx: int) -> None:
        if batch_idx == 3 and self.through_data:
            self.teacher[0].weight.data.mul_(0.9)
        elif batch_idx == 3:
            with torch.no_grad():
                self.teacher[0].weight.mul_(0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.moved_late(batch_idx)
        return Classifier.training_step(self, batch, batch_idx) + self.teacher(batch[0]).square().mean()


@pytest.mark.parametrize(("through_data", "repeated", "words"), [(False, 0, "first time"), (True, 1, "second time")])
def test_a_step_is_not_repeated_where_it_cannot_be_undone(through_data, repeated, words):
    strategy = RematStrategy()
    with failing("backward", after=3), pytest.raises(torch.OutOfMemoryError) as caught:
        fit(lambda: Late(through_data), callback(0.9), strategy=strategy, train=lambda: loader(32))
    (note,) = caught.value.__notes__
    assert words in note and "teacher.0.weight" in note and "checkpoint" in note
    assert strategy.recoveries == repeated


class TaughtBetween(Taught):
    """The teacher is moved between the forward and the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Classifier.training_step(self, batch, batch_idx) + self.teacher(batch[0]).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.moved()


@pytest.mark.parametrize("step", [0, 2])
def test_what_a_hook_has_moved_between_forward_and_backward_stays_moved(step):
    strategy = RematStrategy()
    with failing("backward", after=step):
        run = fit(TaughtBetween, callback(0.9), strategy=strategy, train=lambda: loader(32))
    assert strategy.recoveries == 1
    assert_same(eager(TaughtBetween), everything(run))


def copied_bytes(make: Callable[[], Any]) -> int:
    """Of what a step of `Taught` changes: the teacher, and all statistics."""
    module = make()
    return sum(one.nbytes for one in (*module.teacher.parameters(), *module.buffers()))


@pytest.fixture
def memory_of_its_own(monkeypatch):
    """The device is taken for one beside which there is host memory."""
    monkeypatch.setattr(_undo, "is_host", lambda _device: False)


@pytest.mark.usefixtures("memory_of_its_own")
def test_only_what_a_step_changes_is_copied_and_the_plan_counts_it(monkeypatch):
    copied: list[int] = []
    own = ModuleState.__init__

    def counted(self: ModuleState, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        copied.append(sum(self.copy_of(i).nbytes for i in self.copied))

    monkeypatch.setattr(ModuleState, "__init__", counted)
    plain, remat, strategy = callback(1.0), callback(1.0), RematStrategy()
    fit(Taught, plain, train=lambda: loader(48))
    fit(Taught, remat, strategy=strategy, train=lambda: loader(48))
    assert copied[0] == copied[1] > copied[2] == copied[3] == copied[4] == copied[5] == copied_bytes(Taught)
    assert strategy.reserved_bytes == copied_bytes(Taught)
    assert remat.plan.predicted_peak_bytes == plain.plan.predicted_peak_bytes + strategy.reserved_bytes


def test_on_a_cpu_the_plan_counts_all_copies():
    remat = callback(1.0, measure=True)
    fit(Taught, remat, strategy=RematStrategy(), train=lambda: loader(48))
    assert remat.plan.predicted_peak_bytes * 0.9 < remat.measured_peak_bytes <= remat.plan.predicted_peak_bytes * 1.01


@pytest.mark.usefixtures("memory_of_its_own")
@pytest.mark.parametrize("room", [True, False])
def test_a_plan_makes_room_for_copies_if_it_can(room, caplog):
    smallest = callback("min", solver="greedy", time_limit=1.0)
    fit(Taught, smallest, strategy=RematStrategy(), train=lambda: loader(32))
    assert smallest.plan is not None
    budget = smallest.plan.predicted_peak_bytes + (0 if room else -copied_bytes(Taught) // 2)
    remat = callback(budget, solver="greedy", time_limit=1.0)
    run = fit(Taught, remat, strategy=RematStrategy(), train=lambda: loader(32))
    assert_same(eager(Taught), everything(run))
    assert remat.plan is not None and remat.plan.predicted_peak_bytes <= budget
    assert ("host memory" in caplog.text) == (not room)
    assert remat.plans[0].predicted_peak_bytes > budget or not room


def test_nothing_is_copied_where_nothing_is_repeated():
    strategy = RematStrategy(retries=0)
    run = fit(Taught, callback(0.9), strategy=strategy, train=lambda: loader(32))
    assert strategy.reserved_bytes == 0
    assert_same(eager(Taught), everything(run))


def test_a_plan_of_the_first_batch_moves_no_teacher():
    torch.manual_seed(0)
    module = Taught()
    before = copy.deepcopy(module.state_dict())
    remat = callback(0.9, plan_only=True)
    trainer(remat).fit(module, loader(32))
    assert remat.plan is not None
    assert_same(before, module.state_dict())


class Asking(pl.Callback):
    """Asks for a gradient before each backward."""

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, [pl_module.net[0].weight], retain_graph=True)  # type: ignore[index,union-attr]


def test_gradients_are_added_once_where_a_repeated_step_has_several_backwards():
    options: Any = {"accumulate_grad_batches": 2, "train": lambda: loader(32)}
    plain = fit(Classifier, Asking(), **options)
    strategy = RematStrategy(retries=1)
    with failing("backward", after=3):  # the second batch's own one, which adds to the first one's gradients
        repeated = fit(Classifier, callback(0.8), Asking(), strategy=strategy, **options)
    assert strategy.recoveries == 1
    assert_same(plain.results, repeated.results)
