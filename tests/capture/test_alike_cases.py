"""Graphs in which ops are copied are those that are traced, also of what functionalization and autograd make difficult."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from lightning_remat.capture._torch.alike._ops import Forms, OverwrittenError
from tests.capture.test_alike import step_of, traces
from tests.helpers.nets import check, inputs, net

Tensor = torch.Tensor
Body = Callable[[Any, Tensor], Tensor]
BLOCKS: dict[str, tuple[Body, dict[str, nn.Module]]] = {}
"""What comes three times, one after the other, from 32 x 32 numbers to as many, with the modules that it calls."""


def block(**parts: nn.Module) -> Callable[[Body], Body]:
    def noted(body: Body) -> Body:
        BLOCKS[body.__name__] = body, parts
        return body

    return noted


class Doubled(torch.autograd.Function):
    """Writes to its input, and in its backward to a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        gradient.view(-1).mul_(2)
        return gradient


class Wrapped(Tensor):
    """Another tensor, whose ``sin`` is made of ops that are made of others."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Wrapped:
        return Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        if op is torch.ops.aten.sin.default:
            return Wrapped(args[0].reshape(-1).reshape(args[0].shape).contiguous().sin().squeeze(0))
        return tree_map_only(Tensor, Wrapped, op(*args, **kwargs))


class OfWrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Wrapped(torch.ones(32, 32)))


@torch._dynamo.allow_in_graph
def written_by_an_op_of_a_higher_order(x: Tensor) -> Tensor:
    if isinstance(x, FunctionalTensor):
        with torch._C._AutoDispatchBelowAutograd():
            x.replace_(torch._from_functional_tensor((x * 3).elem))  # type: ignore[attr-defined]
        x.commit_update()
        x.sync()
    return x.clone()


@block()
def in_place(self: Any, x: Tensor) -> Tensor:
    y = functional.relu(x.sin() + 1, inplace=True) * 2
    y[:, 0] = 1.0
    z = torch.zeros_like(x)
    z[:, :16] = y[:, 16:]
    z[torch.arange(4)] = y[:4] * 2
    return functional.dropout(z, 0.1, inplace=True).masked_fill_(x < -1, 2.0)


@block()
def written_through_views(self: Any, x: Tensor) -> Tensor:
    y, z = x.sin(), x.cos()
    flat, turned = y.view(-1), z.t()
    y.mul_(2)
    turned[1:].add_(flat[:32])
    return turned + flat.view(32, 32)


@block()
def products_written_to(self: Any, x: Tensor) -> Tensor:
    y = torch.matmul(x.view(4, 8, 32), x).add_(1).relu_()
    z = torch.ops.aten._unsafe_view(x.sin(), [1024]).mul_(2)
    return y.reshape(32, 32) + z.view(32, 32)


@block()
def views(self: Any, x: Tensor) -> Tensor:
    y = x.sin()
    first, second = y.chunk(2, 1)
    z = torch.cat([second, first], 1) + torch.stack(x.cos().unbind(0)[::-1]) + y[:, :1].expand(-1, 32)
    return z.unsqueeze(0).squeeze(0).t() + z.as_strided((32, 16), (32, 2)).repeat(1, 2) + z.detach().diagonal()


@block()
def drawn(self: Any, x: Tensor) -> Tensor:
    x = functional.dropout(x, 0.1) * torch.rand_like(x) + torch.rand(x.shape) + torch.randperm(32)
    return x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.empty_like(x).bernoulli_(0.3).uniform_()


@block()
def constants(self: Any, x: Tensor) -> Tensor:
    one = torch.tensor([1.0] * 32)
    one[0] = 2
    return x * torch.tensor(2.0) + one + torch.tensor(3).item() * x + torch.arange(32) + 0.0 * x + -0.0 * x


@block()
def numbers_of_other_kinds(self: Any, x: Tensor) -> Tensor:
    y = torch.fft.fft(x).abs() + torch.complex(x, x.sin()).conj().imag
    return y + x.double().sin().float() + x.bfloat16().sin() + torch.cat([x, x[:0].sin()]) + x[:, :0].sum()


@block()
def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.sin()
        y.t_()
    return x.sin() * y + x.detach().sin() * x.sin().detach()


@block(layer=nn.Linear(32, 32))
def regions_of_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            z = self.layer(x)
            z.t_()
    return self.layer(x) * y + z


@block()
def function_that_writes(self: Any, x: Tensor) -> Tensor:
    return Doubled.apply(x.sin()) + x  # type: ignore[no-untyped-call,no-any-return]


@block()
def hooks(self: Any, x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient.clone().view(-1).mul_(2).view(32, 32))
    return y.t()


@block()
def checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: functional.dropout(y.sin(), 0.1) * 2, x, use_reentrant=False)  # type: ignore[no-any-return]


@block()
def mapped(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row.sin().mul_(2) * row.softmax(0))(x).t_()  # type: ignore[arg-type,no-any-return]


@block()
def differentiated(self: Any, x: Tensor) -> Tensor:
    jacobians = torch.func.vmap(torch.func.jacrev(lambda row: row.sin() * row.sum()))(x)  # type: ignore[arg-type]
    return jacobians.sum(1) + torch.func.jvp(lambda y: y.sin() * y, (x,), (x.cos(),))[1]  # type: ignore[no-any-return]


@block()
def branches(self: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() * 2, (x,))  # type: ignore[no-any-return]


@block(norm=nn.BatchNorm2d(8), conv=nn.Conv2d(8, 8, 3, padding=1))
def channels_last(self: Any, x: Tensor) -> Tensor:
    y = x.view(8, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    y = functional.relu(self.norm(self.conv(y)), inplace=True)
    return functional.max_pool2d(self.conv(y.contiguous()) + y, 3, 1, 1).reshape(32, 32)


@block(norm=nn.BatchNorm1d(32))
def buffers(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.norm.running_mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.norm.running_mean.view(4, 8)[1].lerp_(x.mean(0)[:8], 0.1)
    return x - self.norm.running_mean  # type: ignore[no-any-return]


@block(attention=nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1))
def attention(self: Any, x: Tensor) -> Tensor:
    y = x.view(4, 8, 32)
    return self.attention(y, y, y)[0].reshape(32, 32)  # type: ignore[no-any-return]


@block(layer=nn.LSTM(32, 32, batch_first=True), cell=nn.GRUCell(32, 32))
def recurrent(self: Any, x: Tensor) -> Tensor:
    """The backward of the layer gives the same tensor for both biases, and for a while two when it comes again."""
    return self.cell(x, self.layer(x.view(4, 8, 32))[0].reshape(32, 32))  # type: ignore[no-any-return]


@block(part=OfWrapped())
def subclass(self: Any, x: Tensor) -> Tensor:
    return x + (self.part.weight.sin() * x.sum()).sum()


@block()
def written_otherwise(self: Any, x: Tensor) -> Tensor:
    y = x.cos()
    z = written_by_an_op_of_a_higher_order(y.view(-1))
    return y + z.view(32, 32)


@block()
def lists(self: Any, x: Tensor) -> Tensor:
    several = torch._foreach_add(torch._foreach_mul([x, x.sin()], 2.0), [x, x])  # type: ignore[attr-defined]
    torch._foreach_mul_(several, 2.0)  # type: ignore[attr-defined]
    return torch.stack(several).sum(0) + torch.where(x > 0, x, 0.0) + x.max(1, keepdim=True)[0]


def forward_of(body: Body) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = body(self, x)
        return self.last(x).square().mean()  # type: ignore[no-any-return]

    return forward


def comparable(graphs: list[Any]) -> list[Any]:
    """Without the numbers of checkpoints, which go on from one trace to the next."""
    return [
        ([(*node[:-1], [one for one in node[-1] if one[0] != "'ac_graph_id'"]) for node in nodes], metadata)
        for nodes, metadata in graphs
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_graph_is_the_one_that_is_traced(name: str) -> None:
    body, parts = BLOCKS[name]

    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        return net(forward_of(body), **copy.deepcopy(parts)), (inputs(),)

    with traces(copying=False) as (as_traced, _, _):
        step_of(make)
    with traces() as (copied, _, _):
        step_of(make)
    if name == "hooks" and torch.__version__.startswith(("2.11", "2.12")) and not as_traced:
        pytest.skip("torch captures nothing of the kind yet")
    assert len(as_traced) == len(copied) == 1
    (nodes, metadata), (others, other_metadata) = comparable(as_traced)[0], comparable(copied)[0]
    assert metadata == other_metadata
    assert [one[:3] for one in nodes] == [one[:3] for one in others]
    assert not [(one, other) for one, other in zip(nodes, others, strict=True) if one != other]


@pytest.mark.parametrize("body", [without_gradients, regions_of_autocast, mapped])
def test_a_trace_that_ends_in_the_middle_leaves_nothing_set(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OverwrittenError("an op in place")

    def regions() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    monkeypatch.setattr(Forms, "_write", fails)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    module = net(forward_of(body), **copy.deepcopy(BLOCKS[body.__name__][1]))
    with traces(planned=True) as (graphs, _, ends), contextlib.nullcontext(regions()) as before:
        check(module, inputs())
        assert len(graphs) == 1 and ends == ["an op in place"]
        assert regions() == before and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    torch.func.grad(torch.sum)(torch.ones(2))  # of no function that is still open


def test_what_sets_more_is_not_copied() -> None:
    with traces() as (graphs, forms, _):
        step_of(lambda: (net(forward_of(differentiated)), (inputs(),)))
    assert len(graphs) == 1 and not forms
