"""Is the planned step eager's? The check says so where it is, and what differs first where it is not; nothing is left of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_remat import RematWarning, check
from lightning_remat.callbacks import RematCallbackConfig
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.capture._nodes import module_path
from lightning_remat.capture._torch import Exchange, in_backward
from lightning_remat.errors import ConfigError, InfeasibleBudgetError
from lightning_remat.exactness import Cause, FirstDifference, Kind, State, Verdict
from lightning_remat.exactness import _advice as advice
from lightning_remat.exactness._bits import differing, digest, same_bits, sum_of_words
from lightning_remat.runtime import _backend, _graph
from lightning_remat.strategies import RematStrategy
from tests.helpers.failing import failing
from tests.helpers.training import Classifier, assert_clean, assert_same, callback, fit, loader, network

QUICK = {"cost_model": "unit", "solver": "greedy"}


# -- bits -------------------------------------------------------------------------------------------------------------


def test_bits_tell_zeros_and_nans_apart() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert same_bits(quiet, quiet.clone())
    assert not same_bits(quiet, quiet[[1, 0, 2]])
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.5])) == (2, 0.5)
    assert differing(quiet, torch.zeros(3)) == (2, None)
    assert differing(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0])) == (1, 1.0)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 2**20),
)
def test_digests_are_of_bits_alone(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 9, shape, generator=numbers).to(dtype)
    for of in (digest, lambda one: sum_of_words(one.contiguous().reshape(-1))):
        assert of(value) == of(value.clone().reshape(-1))
        assert of(value) == of(torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1 if value.numel() else 0 :])
        if value.numel():
            other = value.clone()
            other.view(-1)[seed % value.numel()] = 0 if other.view(-1)[seed % value.numel()] else 1
            assert of(value) != of(other)


def test_sums_of_words_depend_on_the_place() -> None:
    value = torch.arange(3_000_000, dtype=torch.float32)  # more than a chunk
    assert sum_of_words(value) != sum_of_words(value.flip(0))
    assert sum_of_words(value) == sum_of_words(torch.cat([value[:1], value])[1:])


# -- state ------------------------------------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.total, self.history = 0.0, [1.0]


class Stateful(nn.Module):
    """Keeps everything that a module can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.zeros(4))
        self.count, self.name, self.nothing = 0, "first", None
        self.items, self.table, self.names, self.recent = [1, [2]], {"a": {"b": 1}}, {"x"}, collections.deque([1], 2)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.meter, self.array, self.plain = Meter(), np.zeros(3), torch.zeros(3)
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()

    def disturb(self) -> None:
        self.count, self.name, self.nothing, self.new = 1, "second", 1, 2
        self.items.append(3)
        self.items[1].append(4)
        self.table["a"]["b"] = 2
        self.names.add("y")
        self.recent.append(2)
        self.recent.append(3)
        self.ordered.move_to_end("a")
        self.meter.total = 1.0
        self.meter.history.append(2.0)
        self.array += 1
        self.plain += 1
        self.queue = self.queue + 1  # another tensor in its place
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.norm.running_mean.add_(1)
        self.linear.bias.requires_grad_(False)
        self.linear.train(False)

    def look(self) -> list[object]:
        own = [self.count, self.name, self.nothing, hasattr(self, "new"), self.items, self.table, self.names]
        own += [list(self.recent), list(self.ordered), self.meter.total, self.meter.history, self.array.tolist()]
        of_torch, of_numpy, of_python = self.generators
        drawn = [torch.rand(1, generator=of_torch).item(), of_numpy.random(), of_python.random()]
        drawn += [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
        flags = [self.linear.bias.requires_grad, self.linear.training, self.linear.weight.grad is None]
        return [*own, drawn, flags, self.plain.clone(), {name: one.clone() for name, one in self.state_dict().items()}]


def test_a_state_is_put_back() -> None:
    module, batch = Stateful(), {"x": torch.ones(2, 4), "labels": torch.ones(2)}
    queue, x = module.queue, batch["x"]
    state = State(module, batch)
    before = json.dumps(module.look(), default=str)
    state.restore()
    assert json.dumps(module.look(), default=str) == before, "random numbers too"
    module.disturb()
    module(batch["x"]).backward()
    batch.pop("labels")
    x.zero_()
    assert json.dumps(module.look(), default=str) != before
    state.restore()
    assert json.dumps(module.look(), default=str) == before
    assert module.queue is queue and batch["x"] is x and x.eq(1).all() and list(batch) == ["x", "labels"]


def test_gradients_at_hand_are_kept_as_they_are() -> None:
    module = Stateful()
    module(torch.randn(2, 4)).backward()
    gradient = module.linear.weight.grad
    value = gradient.clone()
    report = check(module, torch.randn(3, 4), **QUICK, budget=1.0)
    assert report.equal
    assert module.linear.weight.grad is gradient and torch.equal(gradient, value)


# -- equal ------------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Captured as two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.parametrize("make", [network, Broken, Stateful], ids=lambda one: one.__name__)
def test_equal(make) -> None:
    torch.manual_seed(0)
    net = make()
    before = json.dumps([*map(str, net.state_dict().items()), torch.get_rng_state().sum().item()])
    report = check(net, torch.randn(8, 4 if make is Stateful else 16), budget=0.8, **QUICK)
    assert report.verdict is Verdict.EQUAL and report.repeats and not report.differences, report.summary()
    assert report.gradients == sum(p.requires_grad for p in net.parameters())
    assert report.buffers == len(list(net.buffers()))
    assert report.plans[0] >= (4 if make is Broken else 1)  # each graph alone, and both together
    assert report.summary().startswith(f"checked: loss, {report.gradients} gradients and")
    assert all(p.grad is None for p in net.parameters())
    after = json.dumps([*map(str, net.state_dict().items())])
    assert json.loads(before)[:-1] == json.loads(after)


def test_a_function_and_its_loss_and_a_batch_by_name() -> None:
    net = network()

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = net(x)
        return {"predicted": predicted, "loss": functional.cross_entropy(predicted, y)}

    batch = {"x": torch.randn(8, 16), "y": torch.arange(8) % 4}
    report = check(step, named=batch, budget=0.8, **QUICK)
    assert report.equal and report.outputs == ("predicted", "loss") and report.gradients == 10
    report = check(lambda x, y: step(x, y), named=batch, loss=lambda out: out["predicted"].sum(), **QUICK)
    assert report.equal and report.gradients == 10


def test_what_cannot_be_checked_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names no module"):
        check(torch.sin, torch.randn(3, requires_grad=True))
    with pytest.raises(ConfigError, match="needs gradients"):
        check(nn.Linear(2, 2).requires_grad_(False), torch.randn(3, 2), **QUICK)
    with pytest.raises(InfeasibleBudgetError):
        check(network(), torch.randn(8, 16), budget=1000, **QUICK)


# -- different --------------------------------------------------------------------------------------------------------


TANH_BACKWARD = (torch.ops.aten.tanh_backward.default, torch.ops.aten.tanh_backward.grad_input)


def wrong_tanh_backward(gradient: torch.Tensor, output: torch.Tensor, **over: torch.Tensor) -> torch.Tensor:
    wrong = TANH_BACKWARD[0](gradient, output) * (1 + 2**-20)
    return over["grad_input"].copy_(wrong) if over else wrong


def planting(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What is lowered for one module's tanh has a wrong gradient."""
    lower = _backend.lower

    def lowered(*args, **kwargs):
        modules = lower(*args, **kwargs)
        for node in modules.backward.graph.nodes:
            if node.target in TANH_BACKWARD and module_path(node) == module:
                node.target = wrong_tanh_backward
        return modules

    for place in (_backend, _graph):
        monkeypatch.setattr(place, "lower", lowered)


def test_a_wrong_gradient_is_found_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planting(monkeypatch, "6")
    report = check(network(), torch.randn(8, 16), budget=0.8, **QUICK)
    assert report.verdict is Verdict.DIFFERENT and report.repeats and not report.equal
    assert report.first is not None
    assert (report.first.op, report.first.module, report.first.backward) == ("wrong_tanh_backward", "6", True)
    assert report.first.cause is Cause.FORM
    names = {one.name for one in report.differences}
    assert {"0.weight", "4.weight", "5.bias"} <= names and "8.weight" not in names and "12.weight" not in names
    assert all(one.kind is Kind.GRADIENT and 0 < one.largest < 1e-4 for one in report.differences)
    assert "the forward of 6" in report.advice[-1]
    report.save(tmp_path / "check.json")
    saved = json.loads((tmp_path / "check.json").read_text())
    assert saved["verdict"] == "different" and saved["first"]["module"] == "6" and saved["summary"] == report.summary()


# A kernel of its own that has other bits while `Planted.drift` says so, on the same input.


class Planted:
    drift = 0.0
    per_call = 0.0
    in_backward = False


@torch.library.custom_op("lightning_remat_tests::planted", mutates_args=())
def planted(x: torch.Tensor) -> torch.Tensor:
    if in_backward() or not Planted.in_backward:
        Planted.drift += Planted.per_call
    return x * (2 + Planted.drift if in_backward() or not Planted.in_backward else 2)


@planted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


planted.register_autograd(lambda ctx, gradient: planted(gradient))


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return planted(x)


def with_planted() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Tanh(), Twice()), nn.Linear(16, 4), nn.Tanh())


@pytest.fixture(autouse=True)
def steady() -> Iterator[None]:
    yield
    Planted.drift = Planted.per_call = 0.0
    Planted.in_backward = False
    LEFT.clear()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_kernel_that_has_other_bits_in_the_planned_step(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Exchange, where)

    def drifting(self: Exchange, args: list[object]) -> object:
        Planted.drift = 2**-20
        try:
            return original(self, args)
        finally:
            Planted.drift = 0.0

    monkeypatch.setattr(Exchange, where, drifting)
    report = check(with_planted(), torch.randn(8, 16), budget=0.8, **QUICK)
    assert report.verdict is Verdict.DIFFERENT and report.first is not None, report.summary()
    assert (report.first.op, report.first.module) == ("lightning_remat_tests.planted.default", "2.1")
    assert report.first.backward == (where == "backward") and report.first.cause is Cause.KERNEL
    assert ("output" in {one.kind.value for one in report.differences}) == (where == "forward")


@pytest.mark.parametrize("backward", [False, True])
def test_eager_mode_that_does_not_repeat_is_not_blamed_on_the_plan(backward: bool) -> None:
    Planted.per_call, Planted.in_backward = 2**-20, backward
    report = check(with_planted(), torch.randn(8, 16), budget=0.8, **QUICK)
    assert report.verdict is Verdict.UNREPEATABLE and report.repeats is False and not report.equal
    assert report.first is not None and (report.first.module, report.first.backward) == ("2.1", backward)
    assert "no operation of torch's own" in report.advice[0] and len(report.advice) == 1
    assert "eager mode, run twice" in report.summary()


class CountsBatches(nn.Module):
    """With a buffer that the loss does not come from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(planted(x.detach().mean()))
        return self.linear(x).tanh().sum()


def test_buffers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Exchange.forward

    def drifting(self: Exchange, args: list[object]) -> object:
        Planted.drift = 1.0
        try:
            return original(self, args)
        finally:
            Planted.drift = 0.0

    monkeypatch.setattr(Exchange, "forward", drifting)
    module = CountsBatches()
    report = check(module, torch.ones(8, 16), budget=1.0, **QUICK)
    assert [(one.kind, one.name, one.largest) for one in report.differences] == [(Kind.BUFFER, "seen", 1.0)]
    assert report.first is not None and report.first.op == "lightning_remat_tests.planted.default"
    assert module.seen.item() == 0


class Nans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * math.nan).sum()


def test_nans_compare_by_their_bits() -> None:
    report = check(Nans(), torch.randn(8, 16), budget=1.0, **QUICK)
    assert report.equal, report.summary()


class Fails(nn.Module):
    """Raises while something is left."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(16, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if LEFT:
            LEFT.pop()
            raise self.error
        return self.linear(x).square().mean()


LEFT: list[None] = []
"""How often `Fails` is still to raise: outside of what is put back."""


def test_eager_mode_out_of_memory() -> None:
    LEFT.append(None)
    report = check(Fails(torch.OutOfMemoryError("CUDA: tried to allocate 1 GiB")), torch.randn(8, 16), **QUICK)
    assert report.verdict is Verdict.UNCHECKED and report.out_of_memory and report.repeats is None
    assert report.summary() == "not checked: eager mode runs out of memory on this batch"


def test_what_else_a_step_raises_comes_out_and_the_state_is_put_back() -> None:
    LEFT.append(None)
    module = Fails(RuntimeError("no paper"))
    module.linear.weight.grad = gradient = torch.ones(4, 16)
    with pytest.raises(RuntimeError, match="no paper"):
        check(module, torch.randn(8, 16), **QUICK)
    assert module.linear.weight.grad is gradient


# -- in a Trainer -----------------------------------------------------------------------------------------------------


class Keeping(Classifier):
    """A metric, a counter, a list, an array and an object of its own, all written to by the step, and a batch that is too."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.count, self.losses, self.meter, self.array = 0, [], Meter(), np.zeros(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.net(x)
        loss = functional.cross_entropy(predicted, y)
        self.count += 1
        self.losses.append(loss.detach())
        self.log("accuracy", self.accuracy(predicted, y))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "accuracy": self.accuracy(predicted, y)}

    def on_train_epoch_end(self) -> None:
        self.seen += [self.count, *self.losses, self.meter.total]


def shuffled():
    return loader(20, shuffle=True)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Keeping, {"train": shuffled, "max_epochs": 2}),
        (Classifier, {"train": lambda: loader(16), "accumulate_grad_batches": 2}),
        (Classifier, {"train": lambda: loader(16), "precision": "bf16-mixed"}),
    ],
    ids=["keeping", "accumulating", "autocast"],
)
def test_training_goes_on_as_without_a_check(make, options, caplog: pytest.LogCaptureFixture) -> None:
    plain, remat = fit(make, **options), callback(0.7, check=True)
    with caplog.at_level("INFO"):
        checked = fit(make, remat, **options)
    assert_same(plain.results, checked.results)
    assert_clean(checked.trainer, checked.module)
    report = remat.check_report
    assert report is not None and report.equal and report.plans[1], report
    assert (report.gradients, report.buffers) == (10, 6)
    assert report.outputs == (("loss", "accuracy") if make is Keeping else ("loss",))
    assert f"{make.__name__}.training_step, {report.summary()}" in caplog.text
    assert sum(remat.runs) == len(plain.recorder.outputs)  # those of the check are none of the training's


class WritesToItsBatch(Classifier):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class Restless(Classifier):
    """Moves its weights and an object of its own in the step, outside of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch, batch_idx):
        self.restless()
        return super().training_step(batch, batch_idx)

    @torch.compiler.disable
    def restless(self) -> None:
        self.meter.total += 1
        self.seen.append(self.meter.total)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("make", [WritesToItsBatch, Restless])
def test_steps_that_change_more_than_they_should(make) -> None:
    plain, remat = fit(make, train=lambda: loader(16)), callback(0.9, check=True)
    assert_same(plain.results, fit(make, remat, train=lambda: loader(16)).results)
    assert remat.check_report is not None and remat.check_report.equal, remat.check_report


def test_a_wrong_plan_is_a_warning_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planting(monkeypatch, "net.6")
    remat = callback(0.7, check=True, artifacts=True)
    with pytest.warns(RematWarning, match=r"(?s)the planned step has others.*in net\.6, in the backward"):
        fit(Classifier, remat, default_root_dir=tmp_path, max_steps=1)
    saved = json.loads((tmp_path / "remat" / "check.json").read_text())
    assert saved["verdict"] == "different" and saved["first"]["module"] == "net.6"
    assert {one["name"] for one in saved["differences"]} >= {"net.0.weight"}


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_not_checked() -> None:
    plain, remat = fit(ByHand, train=lambda: loader(16)), callback(0.9, check=True)
    with pytest.warns(RematWarning, match="not checked: with manual optimization the step itself changes parameters"):
        checked = fit(ByHand, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)
    assert remat.check_report is not None and remat.check_report.verdict is Verdict.UNCHECKED


@pytest.mark.parametrize("room", [3, 0])
def test_fewer_samples_where_eager_mode_runs_out_of_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = TrainingStep.eager

    def limited(self, batch, *others):
        if len(batch[0]) > room:
            raise torch.OutOfMemoryError("CUDA: tried to allocate 1 GiB")
        return eager(self, batch, *others)

    monkeypatch.setattr(TrainingStep, "eager", limited)
    plain, remat = fit(Classifier, train=lambda: loader(16)), callback(0.7, check=True)
    words = (
        contextlib.nullcontext() if room else pytest.warns(RematWarning, match="out of memory, on a single sample too")
    )
    with words:
        checked = fit(Classifier, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)
    report = remat.check_report
    assert report is not None and report.samples == (2 if room else None)
    assert report.equal == bool(room) and remat.runs == (2,)
    if room:
        assert "eager mode runs out of memory on 8 samples: 2 of them were taken" in report.summary()
        assert report.plans[1], "something is evaluated again in the smaller step too"


class RaisesOnce(Classifier):
    def training_step(self, batch, batch_idx):
        if LEFT:
            LEFT.pop()
            raise ValueError("only this once")
        return super().training_step(batch, batch_idx)


def test_a_check_does_not_end_the_training() -> None:
    plain, remat = fit(RaisesOnce, train=lambda: loader(16)), callback(0.9, check=True)
    LEFT.append(None)
    with pytest.warns(RematWarning, match="not checked: ValueError: only this once"):
        checked = fit(RaisesOnce, remat, train=lambda: loader(16))
    assert_same(plain.results, checked.results)


def test_a_step_that_fits_as_it_is_and_one_that_is_only_planned() -> None:
    remat = callback("auto", check=True)
    fit(Classifier, remat, max_steps=1)
    assert remat.check_report is not None and remat.check_report.equal and remat.check_report.plans == (1, 0)
    assert "evaluates nothing again" in remat.check_report.summary()
    remat = callback(0.7, check=True, plan_only=True)
    planned = fit(Classifier, remat)
    assert remat.check_report is not None and remat.check_report.equal and planned.trainer.global_step == 0


def test_the_option_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="check='yes'"):
        RematCallbackConfig(check="yes")  # type: ignore[arg-type]


def test_a_strategy_that_repeats_steps_still_can() -> None:
    """The step is captured in the check, before the strategy runs one: no gradients may be added in its backward."""
    options = {"train": lambda: loader(16), "accumulate_grad_batches": 2}
    plain, remat = fit(Classifier, **options), callback(0.9, check=True)
    with failing("backward", after=5) as calls:
        repeated = fit(Classifier, remat, strategy=RematStrategy(), **options)
    assert len(calls) > 5 and repeated.trainer.strategy.recoveries == 1
    assert_same(plain.results, repeated.results)


# -- advice -----------------------------------------------------------------------------------------------------------

CUDA = advice.Settings(
    cuda=True,
    deterministic=False,
    warn_only=False,
    workspace=False,
    cudnn_attention=True,
    benchmark=False,
    tf32=False,
)
DETERMINISTIC = dataclasses.replace(CUDA, deterministic=True, workspace=True, cudnn_attention=False)


def differs(op: str, cause: Cause = Cause.KERNEL) -> FirstDifference:
    return FirstDifference(op, "net.3", True, cause)


@pytest.mark.parametrize(
    ("op", "settings", "expected"),
    [
        ("aten.index_put_.default", CUDA, [advice.DETERMINISTIC]),
        (
            "aten._scaled_dot_product_flash_attention_backward.default",
            dataclasses.replace(DETERMINISTIC, warn_only=True),
            [advice.WITHOUT_WARN_ONLY],
        ),
        (
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            dataclasses.replace(DETERMINISTIC, cudnn_attention=True),
            [advice.CUDNN_ATTENTION],
        ),
        ("aten.mm.default", dataclasses.replace(DETERMINISTIC, workspace=False), [advice.WORKSPACE]),
        (
            "aten.convolution_backward.default",
            dataclasses.replace(DETERMINISTIC, benchmark=True, tf32=True),
            [advice.BENCHMARK, advice.TF32],
        ),
        ("aten.mm.default", DETERMINISTIC, []),
        ("my_kernels.attend.default", CUDA, [advice.NOT_OF_TORCH.format(op="my_kernels.attend.default")]),
    ],
)
def test_advice_where_eager_mode_does_not_repeat(op: str, settings: advice.Settings, expected: list[str]) -> None:
    assert list(advice.advice(differs(op), repeats=False, settings=settings)) == expected


def test_advice_where_the_plan_differs() -> None:
    left_out = advice.LEAVE_OUT.format(module="net.3")
    assert advice.advice(differs("aten.mm.default", Cause.FORM), True, CUDA) == (left_out,)
    assert advice.advice(differs("aten.mm.default"), True, CUDA) == (advice.DETERMINISTIC, left_out)
    assert advice.advice(None, True, CUDA) == (advice.DETERMINISTIC, advice.CUDNN_ATTENTION)
