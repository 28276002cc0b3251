"""Is the planned step eager's? The check says so where it is, and what differs first where it is not; nothing is left of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import check
from lightning_remat.capture._torch import Exchange
from lightning_remat.errors import ConfigError, InfeasibleBudgetError
from lightning_remat.exactness import Cause, Kind, Verdict
from tests.helpers.planted import LEFT, Planted, planted, planting, steady  # noqa: F401 - the fixture runs after each test
from tests.helpers.stateful import Stateful
from tests.helpers.training import network

QUICK = {"cost_model": "unit", "solver": "greedy"}


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


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return planted(x)


def with_planted() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Tanh(), Twice()), nn.Linear(16, 4), nn.Tanh())


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
