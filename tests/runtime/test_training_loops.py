"""Training loops of people's own around a scheduled module: which gradients they take, when, how often and under what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_remat import Rematerialized, rematerialize

Tensors = dict[str, torch.Tensor | None]
Step = Callable[[nn.Module, Callable[..., Any]], Tensors]

STEPS = 4
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def train(module: nn.Module, call: Callable[..., Any], step: Step) -> list[Tensors]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        one = step(module, call)
        one |= {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        one |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        found.append(one)
        optimizer.step()
    return found


def compared(module: nn.Module, step: Step, part: str = "") -> tuple[Rematerialized, list[list[str]]]:
    """The module, or a part of it, scheduled; and for each step, what has other bits than in eager mode."""
    torch._dynamo.reset()
    other = copy.deepcopy(module)
    for buffer, one in zip(other.buffers(), module.buffers(), strict=True):
        assert buffer.stride() == one.stride()
    call = rematerialize(other.get_submodule(part), budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    expected, found = train(module, module.get_submodule(part), step), train(other, call, step)
    return call, [
        [name for name, a in one.items() if not (a is b[name] or (a is not None and torch.equal(a, b[name])))]  # type: ignore[arg-type]
        for one, b in zip(expected, found, strict=True)
    ]


def equal(module: nn.Module, step: Step, part: str = "") -> Rematerialized:
    call, others = compared(module, step, part)
    assert others == [[]] * STEPS
    return call


class Layers(nn.Module):
    """Three layers, the second read twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.second(self.first(x).tanh()).sin()).tanh())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).tanh().sin(), self.other(x).sin().tanh()


@pytest.mark.parametrize("vary", [False, True])
def test_a_graph_that_is_retained_later(vary: bool) -> None:
    """Whether the first backward retains it is not known when it is compiled."""
    call = rematerialize(Layers(), budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    for step in range(6):
        loss = call(torch.randn(2 + step * vary, 16)).sum()
        loss.backward(retain_graph=step > 0)
        if step:
            loss.backward()
    assert sum(call.runs) == 6 and not call.failures


def test_a_gradient_of_one_loss_and_the_backward_of_another() -> None:
    """What the first has handed out for the second layer, and nobody took, is none of the second's."""

    def step(module: Any, call: Callable[..., Any]) -> Tensors:
        y = call(torch.randn(8, 16))
        loss = y.abs().mean() + 0.1 * module.second.weight.square().sum()
        (gradient,) = torch.autograd.grad(loss, module.last.weight, retain_graph=True)
        (y.sin().mean() * gradient.norm().detach()).backward()
        return {"gradient": gradient}

    assert not equal(Layers(), step).failures


def test_what_a_backward_begins_from_is_read_several_times() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh() * x.cos() + self.a(x.sin()))

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        x = torch.randn(32, 64, requires_grad=True)
        h = x * 1
        y = call(h)
        torch.autograd.backward([y, h], [torch.randn_like(y), torch.randn_like(h)])
        return {"x": x.grad}

    assert not equal(Reads(), step).failures


def test_a_backward_for_each_output() -> None:
    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        one, other = call(torch.randn(8, 16))
        one.sum().backward()
        other.square().sum().backward()
        return {}

    with pytest.warns(UserWarning, match="two backwards come through one captured graph"):
        equal(Heads(), step)


class Twice(nn.Module):
    """Two backwards in the step come through what saves nothing: representations that are put together (GradCache)."""

    def __init__(self, puts_together: Callable[..., torch.Tensor], apart: bool) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.puts_together, self.apart = puts_together, apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cached = self.layer(x).detach().requires_grad_()
        both = self.puts_together(cached, self.shift)
        if self.apart:
            torch._dynamo.graph_break()
        (both[:4] @ both.T).logsumexp(1).mean().backward()
        (both[4:] @ both.T).logsumexp(1).mean().backward()
        return (self.layer(x) * cached.grad).sum()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("puts_together", [lambda one, _: torch.cat([one, one]), lambda one, shift: one + shift])
def test_two_backwards_in_a_step(puts_together: Callable[..., torch.Tensor], apart: bool) -> None:
    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        loss = call(torch.randn(8, 16))
        loss.backward()
        return {"loss": loss.detach()}

    if apart:
        assert not equal(Twice(puts_together, apart), step).failures
    else:
        with pytest.warns(UserWarning, match="two backwards come through one captured graph"):
            equal(Twice(puts_together, apart), step)


def test_two_backwards_of_what_saves_nothing() -> None:
    def step(module: Any, call: Callable[..., Any]) -> Tensors:
        y = call(torch.randn(8, 16, requires_grad=True))
        y.sin().mean().backward()
        y.square().mean().backward()
        return {}

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -(x + self.shift).roll(1, 0)

    assert not equal(Shifts(), step).failures


@pytest.mark.parametrize("twice", [False, True])
def test_a_checkpoint_around_calls(twice: bool) -> None:
    """What is evaluated again in the backward runs as it did the first time."""

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        x = torch.randn(8, 16, requires_grad=True)
        y = checkpoint(call, x.sin(), use_reentrant=False)
        z = checkpoint(call, y if twice else x.cos(), use_reentrant=False)
        loss = (z * x + y).square().mean()
        loss.backward()
        return {"loss": loss.detach(), "x": x.grad}

    assert not equal(Layers(), step).failures


class Reader(nn.Module):
    """Reads what it is given three times, and so does autocast's cast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return (q * k).tanh() * v


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(32, 16), Reader()


def test_what_was_computed_is_cast_for_each_use() -> None:
    """Eager autocast keeps its copies of leaves alone."""

    def step(module: Any, call: Callable[..., Any]) -> Tensors:
        with torch.autocast(**AUTOCAST):
            y = call(module.embedding(torch.arange(32)))
        y.float().square().mean().backward()
        return {}

    assert not equal(Embedded(), step, "block").failures


def test_a_parameter_in_one_call_and_what_was_computed_in_another() -> None:
    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        x = torch.randn(8, 16, requires_grad=True)
        for one in (x, x.sin()):
            with torch.autocast(**AUTOCAST):
                y = call(one)
            y.float().square().sum().backward()
        return {"x": x.grad}

    with pytest.warns(UserWarning, match="parameters in one call and what was computed in another"):
        equal(Reader(), step)


class Tied(nn.Module):
    """The embedding is the head, twice, and looked up in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a = nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(self.embedding(tokens)).tanh()
        g = self.a(h).sin()
        return functional.linear(h, self.embedding.weight), functional.linear(g, self.embedding.weight)


@pytest.mark.parametrize("calls", [1, 2])
def test_casts_among_what_autograd_adds_up(calls: int) -> None:
    def step(module: Any, call: Callable[..., Any]) -> Tensors:
        losses = []
        for _ in range(calls):
            with torch.autocast(**AUTOCAST):
                a, b = call(torch.randint(0, 50, (4, 12)))
            losses.append(a.float().square().mean() + b.float().square().mean())
        loss = losses[0] + (module.embedding.weight.square().sum() if calls == 1 else losses[1])
        loss.backward()
        return {}

    assert not equal(Tied(), step).failures


def test_expanded_gradients_of_a_weight_that_is_cast_twice() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).tanh() * self.a.weight.sum(0)
            return self.a(h) * self.a.weight.sum(0).cos()

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        with torch.autocast(**AUTOCAST):
            y = call(torch.randn(8, 16))
        y.float().square().mean().backward()
        return {}

    assert not equal(Summed(), step).failures


def test_a_region_without_a_cache_in_one_that_has_one() -> None:
    class Uncached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**AUTOCAST, cache_enabled=False):
                for _ in range(3):
                    x = self.a(x).tanh()
            return x

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        with torch.autocast(**AUTOCAST):
            y = call(torch.randn(8, 16))
        y.float().square().mean().backward()
        return {}

    with pytest.warns(UserWarning, match="how eager adds up its gradients is not known"):
        equal(Uncached(), step)


def test_a_backward_under_autocast_is_noticed() -> None:
    """It is known when the first one begins: later calls run as before."""

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        with torch.autocast(**AUTOCAST):
            call(torch.randn(4, 8, 16)).float().square().mean().backward()
        return {}

    with pytest.warns(UserWarning, match=r"its backward is called under torch\.autocast"):
        call, _ = compared(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), step)
    assert call.runs == (1,)


def test_an_overwritten_buffer_with_gaps_between_its_rows() -> None:
    """Kernels go from row to row there, and compute the last elements of each in another way."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)
            self.register_buffer("average", torch.randn(64, 16)[:, :7])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            mixed = (torch.exp(self.average) * y).tanh() + torch.sigmoid(self.average) * y
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.detach(), alpha=0.1)
            return (mixed + self.average.sum(1, keepdim=True) * y).square().mean()

    def step(_: nn.Module, call: Callable[..., Any]) -> Tensors:
        loss = call(torch.randn(64, 7))
        loss.backward()
        return {"loss": loss.detach()}

    assert not equal(Average(), step).failures


class Asking(torch.optim.SGD):
    """Goes another way where it is compiled, as AdamW does."""

    def step(self, closure: Any = None) -> Any:
        if torch.compiler.is_compiling():
            raise AssertionError("compiled")
        return super().step(closure)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Asking])
def test_an_optimizer_within_what_is_scheduled_is_left_alone(kind: Any, foreach: bool) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
        optimizer = kind(module.parameters(), lr=1e-2, foreach=foreach)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = module(x).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        call: Any = rematerialize(step, budget="min", cost_model="unit") if wrap else step
        losses = [call(torch.randn(8, 16)) for _ in range(STEPS)]
        results.append([*losses, *(p.detach() for p in module.parameters())])
    assert all(map(torch.equal, *results)) and sum(call.runs) == STEPS and not call.failures
