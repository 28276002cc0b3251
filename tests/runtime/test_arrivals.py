"""Gradients that arrive laid out otherwise than the outputs that they are of: eager's bits from the first step on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._functorch import aot_autograd as functorch_aot
from torch.nn import functional

from lightning_remat import Rematerialized, RematWarning, rematerialize
from lightning_remat.capture._tangents import Layout, alike
from lightning_remat.runtime import _arrivals
from tests.helpers.cases import diagonal

Loss = Callable[[torch.Tensor], torch.Tensor]


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)]
    return nn.Sequential(*layers), torch.randn(3, 3, 17, 15)


def channels_last() -> tuple[nn.Module, torch.Tensor]:
    net, x = convolutions()
    return net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


class Attended(nn.Module):
    """Rows of (batch, tokens, width), by attention, dropout, and a product that is reshaped on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(functional.gelu(self.norm(x)).reshape(-1, 12)).view(*x.shape[:2], 10)


def attention() -> tuple[nn.Module, torch.Tensor]:
    return Attended(), torch.randn(5, 7, 12)


def rows() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(33, 77), nn.LayerNorm(77), nn.GELU(), nn.Linear(77, 33)), torch.randn(64, 33)


class Heads(nn.Module):
    """What is returned lies transposed: a gradient that does not is copied on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.drop = nn.Linear(12, 20), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.project(x)).view(*x.shape[:2], 4, 5).transpose(1, 2)


def heads() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(12, 12), nn.GELU(), Heads()), torch.randn(5, 7, 12)


MAKES = [convolutions, channels_last, attention, rows, heads]


def transposed(y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over a dimension in the middle: its gradient comes transposed."""
    z = y.transpose(1, -1)
    return functional.cross_entropy(z.contiguous(), z.argmin(1))


LOSSES: dict[str, Loss] = {
    "sum": lambda y: 0.3 * y.sum(),
    "mean": lambda y: y.mean(),
    "mean of rows": lambda y: y.mean(0).square().sum(),
    "sum of columns": lambda y: y.sum(-1).sin().sum(),
    "transposed": transposed,
    "gaps": lambda y: torch.cat([y, torch.ones_like(y)], -1).square().mean(),
    "contiguous": lambda y: y.contiguous().sin().sum(),
    "as the output": lambda y: y.square().mean(),
}


class Pair:
    """A module in eager mode, and a copy of it that is planned."""

    def __init__(self, make: Callable[[], tuple[nn.Module, torch.Tensor]], budget: Any) -> None:
        torch.manual_seed(0)
        self.plain, self.x = make()
        self.other = copy.deepcopy(self.plain)
        self.step: Rematerialized = rematerialize(self.other, budget=budget, solver="greedy", time_limit=0.4)
        self.optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (self.plain, self.other)]

    def train(self, loss: Loss, seed: int) -> None:
        """One step of both, whose loss, gradients, parameters and buffers are asserted to be equal."""
        found = []
        for call, optimizer in zip((self.plain, self.step), self.optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            value = loss(call(self.x))
            value.backward()
            found.append(
                [value.detach(), *(p.grad.clone() for p in optimizer.param_groups[0]["params"]), torch.rand(1)]
            )
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        pairs = zip(self.plain.state_dict().values(), self.other.state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        assert self.step.failures == ()


@pytest.mark.long
@pytest.mark.parametrize(("make", "loss"), diagonal(MAKES, list(LOSSES)))
def test_a_loss_outside_has_eagers_bits(make: Callable[[], tuple[nn.Module, torch.Tensor]], loss: str) -> None:
    pair = Pair(make, "min")
    for seed in range(3):
        pair.train(LOSSES[loss], seed)
    assert any(plan.rematerializes for plan in pair.step.plans)


def test_the_gradient_comes_uncopied_and_is_planned_for() -> None:
    pair = Pair(convolutions, 1.0)
    seen: list[tuple[int, ...]] = []
    for seed in range(3):
        pair.train(LOSSES["sum"], seed)
        graph = pair.step.plans[-1].graph
        (tangent,) = [t for t in graph.inputs if graph.tensors[t].role.value == "tangent"]
        seen.append(graph.storages[graph.tensors[tangent].storage])
    output = 3 * 6 * 13 * 11 * 4
    assert seen[0] == output and seen[1:] == [4, 4], "an expanded gradient is one number"


def test_losses_that_take_turns() -> None:
    pair = Pair(convolutions, "min")
    for seed, name in enumerate(["sum", "as the output", "sum of columns", "sum", "gaps", "as the output", "sum"]):
        pair.train(LOSSES[name], seed)
    plans = len(pair.step.plans)
    for seed, name in enumerate(["sum", "as the output", "sum of columns", "gaps"]):
        pair.train(LOSSES[name], seed)
    assert len(pair.step.plans) == plans, "each way is traced once"


def test_more_ways_than_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arrivals, "MOST_LAYOUTS", 1)
    pair = Pair(convolutions, 1.0)
    pair.train(LOSSES["sum"], 0)
    said = r"a gradient lies otherwise in memory .*\(CaptureError: they have come in more than 1 ways\)"
    with pytest.warns(RematWarning, match=said):
        LOSSES["sum of columns"](pair.step(pair.x)).backward()
    runs = pair.step.runs
    pair.step(pair.x).sum().backward()
    assert pair.step.runs == runs, "later calls run as before"


@pytest.mark.parametrize("kind", ["autocast", "accumulated", "retained"])
def test_circumstances(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = convolutions()
    other = copy.deepcopy(plain)
    step = rematerialize(other, budget="min", solver="greedy", time_limit=0.4)
    found = []
    for net, call in ((plain, plain), (other, step)):
        torch.manual_seed(1)
        for _ in range(3):
            if kind != "accumulated":
                net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                y = call(x)
            loss = 0.3 * y.sum()
            loss.backward(retain_graph=kind == "retained")
            if kind == "retained":
                y.mean((2, 3)).square().sum().backward()
            found.append([p.grad.clone() for p in net.parameters()])
    for one, two in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


class InParts(nn.Module):
    """What goes over the breaks comes back transposed, expanded, and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(24, 24), nn.Linear(24, 24), nn.LayerNorm(24)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x)).t()
        torch._dynamo.graph_break()
        h = self.drop(self.second(h.contiguous().sin().t()))
        torch._dynamo.graph_break()
        return 0.7 * self.norm(h + self.first(h)).sum()


@pytest.mark.parametrize("budget", ["min", 1.0])
def test_parts_of_a_step(budget: Any) -> None:
    pair = Pair(lambda: (InParts(), torch.randn(18, 24)), budget)
    for seed in range(4):
        pair.train(lambda y: y, seed)
    assert len(pair.step.plans) > 2


@pytest.mark.long
def test_sizes_that_vary() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6)]
    pair = Pair(lambda: (nn.Sequential(*layers), torch.empty(0)), "min")
    for seed, length in enumerate([20, 24, 31, 17, 40, 22]):
        pair.x = torch.randn(5, 3, length)
        pair.train(LOSSES["transposed" if seed % 3 else "sum"], seed)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    make=st.sampled_from(MAKES),
    names=st.lists(st.sampled_from(sorted(LOSSES)), min_size=2, max_size=4),
    budget=st.sampled_from(["min", 0.7, 1.0]),
)
def test_any_losses_in_any_order(make: Any, names: Sequence[str], budget: Any) -> None:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        pair = Pair(make, budget)
        for seed, name in enumerate(names):
            pair.train(LOSSES[name], seed)


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    expanded=st.sets(st.integers(0, 3)),
)
def test_layouts(shape: list[int], order: Any, expanded: set[int]) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    sizes = [1 if d in expanded else size for d, size in enumerate(shape)]
    value = torch.empty_permuted(sizes, dims).expand(shape)
    layout = Layout.of(value.shape, value.stride())
    assert not layout.strides and alike(shape, layout.at(shape), value.stride())
    assert alike(shape, layout.empty_like(value).stride(), value.stride())
    with_gaps = torch.empty([2 * size for size in shape])[tuple(slice(0, size) for size in shape)]
    other = Layout.of(with_gaps.shape, with_gaps.stride())
    assert alike(shape, other.at(shape), with_gaps.stride())


def test_what_is_replaced_in_torch_is_put_back() -> None:
    before = functorch_aot.run_functionalized_fw_and_collect_metadata
    Pair(rows, 1.0).train(LOSSES["sum"], 0)
    assert functorch_aot.run_functionalized_fw_and_collect_metadata is before
