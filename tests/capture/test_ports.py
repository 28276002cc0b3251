"""Views that a part of a step reads and hands on: their gradients are added up in eager's order."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture.gradients import _ports

WIDTH = 32
graph_break = torch._dynamo.graph_break


class Net(nn.Module):
    """Layers of one width, and what is done with them."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def of_an_input(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A router reads the tokens that go to the experts."""
    h = net.a(x)
    graph_break()
    tokens = h.flatten(0, 1)
    y = net.b(tokens)
    graph_break()
    return ((net.c(tokens) * y).view_as(h) + net.d(h)).square().mean()


def of_an_input_several_times(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    graph_break()
    tokens = h.flatten(0, 1)
    y = net.b(tokens) + net.c(tokens).tanh()
    graph_break()
    return ((net.c(tokens) * y + net.b(tokens).sin()).view_as(h) + net.d(h)).square().mean()


def of_an_input_read_before(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    graph_break()
    y = net.d(h)
    tokens = h.flatten(0, 1)
    z = net.b(tokens)
    graph_break()
    return ((net.c(tokens) * z).view_as(h) + net.c(h) + y).square().mean()


def of_what_is_computed(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    tokens = h.flatten(0, 1)
    y, z = net.b(tokens), net.d(h)
    graph_break()
    return ((net.c(tokens) * y).view_as(h) + z + net.b(h)).square().mean()


def of_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    graph_break()
    tokens = h.flatten(0, 1)
    pairs = tokens.view(4, -1, WIDTH)
    y = net.b(tokens).view_as(pairs) + net.c(pairs)
    graph_break()
    return (net.c(tokens).view_as(pairs) * y + net.d(pairs)).square().mean()


def chunks(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    p, q = h.chunk(2, 0)
    y = net.b(p) + net.c(q)
    graph_break()
    return (net.c(p) * y + net.d(q) + net.b(q) + net.a(h)[: len(p)]).square().mean()


def slices(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    graph_break()
    p, q = h[:4], h[2:]
    y = net.b(p) + net.c(q)
    graph_break()
    return (net.c(p) * y + net.d(q) + net.b(q) + net.a(h)[: len(p)]).square().mean()


def transposed(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    graph_break()
    t = h.transpose(0, 1)
    y = net.b(t)
    graph_break()
    return (net.c(t) * y + net.d(t) + net.a(h).transpose(0, 1)).square().mean()


def expanded(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x[:1])
    graph_break()
    e = h.expand(6, -1, -1)
    y = net.b(e)
    graph_break()
    return (net.c(e) * y + net.d(e) + net.a(h)).square().mean()


def of_a_parameter(net: Net, x: torch.Tensor) -> torch.Tensor:
    h, w = net.a(x), net.b.weight.t()
    y = h @ w
    graph_break()
    return (y @ w + net.b(h)).square().mean()


def of_the_batch(net: Net, x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(0, 1)
    y = net.a(tokens)
    graph_break()
    return (net.b(tokens) * y + net.c(x.flatten(0, 1))).square().mean()


def changed_later(net: Net, x: torch.Tensor) -> torch.Tensor:
    """In place, by a part, which is refused; what it is a view of changes with it."""
    h = net.a(x)
    graph_break()
    tokens = h.flatten(0, 1)
    y = net.b(tokens.sum(0) + tokens.mean(0) + tokens[:3].sum(0))
    graph_break()
    z = tokens * 0.3
    tokens.mul_(2)
    graph_break()
    return ((net.c(tokens) * y + z).view_as(h) + net.d(h) + h.sin()).square().mean()


def changed_between(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Likewise, by what Dynamo leaves alone."""
    h = net.a(x)
    tokens = h.flatten(0, 1)
    y = net.b(tokens.sum(0) + tokens.mean(0) + tokens[:3].sum(0))
    z = _scaled(tokens)
    return ((net.c(tokens) * y + z).view_as(h) + net.d(h)).square().mean()


@torch._dynamo.disable
def _scaled(tokens: torch.Tensor) -> torch.Tensor:
    z = tokens * 0.3
    tokens.add_(z)
    return z


def not_used_again(net: Net, x: torch.Tensor) -> torch.Tensor:
    """No gradient comes to the view: it is no part of the loss."""
    h = net.a(x)
    tokens = h.flatten(0, 1)
    y = net.b(tokens)
    graph_break()
    return (net.c(tokens).detach() + y + net.d(h).flatten(0, 1)).square().mean()


def alone_used_again(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The view alone leads to the loss, and nothing that the part has computed."""
    h = net.a(x)
    graph_break()
    tokens = h.flatten(0, 1)
    y = net.b(tokens)
    graph_break()
    return (net.c(tokens) + y.detach() + net.d(tokens)).square().mean()


def summed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the view comes expanded; autograd hands over zeros in its place."""
    h = net.a(x)
    y, few = net.b(h), h[:2]
    graph_break()
    return few.sum() + (y * h).square().mean()


BODIES = [
    of_an_input,
    of_an_input_several_times,
    of_an_input_read_before,
    of_what_is_computed,
    of_a_view,
    chunks,
    slices,
    transposed,
    expanded,
    of_a_parameter,
    of_the_batch,
    changed_between,
    not_used_again,
    alone_used_again,
    summed,
]


def trained(module: nn.Module, call: Any, x: torch.Tensor, steps: int = 2, backwards: int = 1) -> list[Any]:
    found: list[Any] = []
    for _ in range(steps):
        module.zero_grad()
        x.grad = None
        loss = call(x * 1 if x.requires_grad else x.clone())
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        found += [loss.detach(), *(p.grad for p in module.parameters()), x.grad]
    return found


def assert_same(one: list[Any], other: list[Any]) -> None:
    differ = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if (a is None) != (b is None)]
    assert not differ
    assert not [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a is not None and not torch.equal(a, b)]


def planned(body: Callable[..., torch.Tensor], budget: float | str = 1.0) -> tuple[Net, Net, Rematerialized]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Net(body)
    other = copy.deepcopy(module)
    return module, other, rematerialize(other, budget=budget, cost_model="unit", solver="greedy", time_limit=0.1)


@pytest.mark.parametrize("body", BODIES)
def test_bits(body: Callable[..., torch.Tensor]) -> None:
    module, other, step = planned(body)
    x = torch.randn(6, 8, WIDTH, requires_grad=True)
    assert_same(trained(module, module, x), trained(other, step, x))
    assert len(step.plans) > 1 and not step.failures


@pytest.mark.filterwarnings("ignore:.*could not be captured.*")
def test_a_part_that_writes_to_a_view_is_refused() -> None:
    module, other, step = planned(changed_later)
    x = torch.randn(6, 8, WIDTH)
    assert_same(trained(module, module, x), trained(other, step, x))
    (failure,) = step.failures
    assert "writes to a view of what an earlier part has computed" in failure
    assert len(step.plans) == 3  # the other parts


@pytest.mark.parametrize("body", [of_an_input, of_what_is_computed, of_a_view, transposed])
def test_a_backward_that_comes_twice(body: Callable[..., torch.Tensor]) -> None:
    module, other, step = planned(body)
    x = torch.randn(6, 8, WIDTH)
    assert_same(trained(module, module, x, backwards=2), trained(other, step, x, backwards=2))


def test_a_gradient_of_some_inputs_alone() -> None:
    """Asked for with ``torch.autograd.grad``: parts that lead to none of them do not run."""
    module, other, step = planned(of_an_input)
    x = torch.randn(6, 8, WIDTH)
    for names in (("a",), ("b", "c"), ("c",), ("d",)):
        found = []
        for net, call in ((module, module), (other, step)):
            weights = [getattr(net, name).weight for name in names]
            found.append([*torch.autograd.grad(call(x), weights)])
        assert_same(*found)


def test_nothing_is_kept() -> None:
    """What a part hands on is let go of with the last that reads it, and without the garbage collector."""
    seen: list[Any] = []

    @torch._dynamo.disable
    def see(*tensors: torch.Tensor) -> None:
        seen.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        graph_break()
        tokens = h.flatten(0, 1)
        y = net.b(tokens).tanh()
        see(h, tokens, y)
        return ((net.c(tokens) + y).view_as(h) + net.d(h)).square().mean()

    module, other, step = planned(body)
    x = torch.randn(6, 8, WIDTH)
    assert_same(trained(module, module, x), trained(other, step, x))
    step(x).backward()  # all is captured
    gc.collect()
    gc.disable()
    try:
        seen.clear()
        loss = step(x)
        assert [one() is not None for one in seen] == [True] * 3
        loss.backward()
        del loss
        assert [one() is None for one in seen] == [True] * 3
        seen.clear()
        step(x)  # and no backward
        assert [one() is None for one in seen] == [True] * 3
    finally:
        gc.enable()


def test_what_needs_a_port() -> None:
    """Only a view whose gradient has several summands, in a part that hands on more of it, or reads it."""
    found: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        ported, views = _ports.with_ports(module)
        assert (ported is module) == (not views)
        found.append(len(views))
        return module.forward

    def ports(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
        torch._dynamo.reset()
        found.clear()
        torch.compile(function, backend=backend)(*inputs)
        return sum(found)

    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert ports(lambda x: (x.view(16), x.sin()), x) == 1
    assert ports(lambda x: (x.t(), x.t().sin()), x) == 1
    assert ports(lambda x: x.t(), x) == 0
    assert ports(lambda x: (x.t(), x.t().sin()), y) == 0  # no gradient
    assert ports(lambda x: (x.sin().t(), x.sin().cos()), x) == 0
    assert ports(lambda x: [(h := x.sin()), h.t(), h.cos()], x) == 1
    assert ports(lambda x: [(h := x.sin()).t(), h.view(16), h.cos()], x) == 2
    assert ports(lambda x: [(h := x.sin()).t(), h.cos()], x) == 0  # AOTAutograd hides what it is a view of
