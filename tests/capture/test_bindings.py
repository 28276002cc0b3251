"""What lowered code calls in the place of an operator is, at torch's dispatcher, the call that the operator makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.capture._torch._bindings import quickest
from lightning_remat.capture._torch._running import boxed

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """Notes the calls that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, str(args), str(kwargs or {})))
        return func(*args, **(kwargs or {}))


def attention(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    h = aten.addmm.default(b, aten.view.default(x, [-1, 8]), aten.t.default(w))
    q, k = aten.split.Tensor(aten.view.default(h, [2, 3, 8]), 4, 2)
    s = aten.mul.Scalar(aten.bmm.default(q, aten.transpose.int(k, 1, 2)), 0.5)
    s = aten._softmax.default(aten.add.Tensor(s, 1), -1, False)
    s = aten.mul.out(s, aten.full_like.default(s, 2.0), out=s)
    n, mean, rstd = aten.native_layer_norm.default(aten.bmm.default(s, q), [4], None, None, 1e-5)
    return aten.sum.dim_IntList(n, [0, 1], True), aten.cat.default([mean, rstd], -1), aten.pow.Tensor_Scalar(n, 2.0)


def convolutions(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    x, w = aten.view.default(x, [2, 3, 4, 2]), aten.expand.default(aten.view.default(b, [8, 1, 1, 1]), [8, 3, 1, 1])
    h = aten.convolution.default(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    h, mean, rstd = aten._native_batch_norm_legit.no_stats(h, b, b, True, 0.1, 1e-5)
    h = aten.relu_.default(aten.clone.default(h, memory_format=torch.channels_last))
    g = aten.threshold_backward.default(h, h, 0)
    grads = aten.convolution_backward.default(
        g, x, w, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    ones = aten.ones.default([2], dtype=torch.int64, device=x.device, pin_memory=False)
    return (
        aten.mean.dim(h, [2, 3]),
        grads[0],
        grads[1],
        mean,
        aten.add.Tensor(ones, rstd.numel()),
        aten.mul.Tensor(h, 2.0),
    )


@pytest.mark.parametrize("function", [attention, convolutions])
def test_the_same_calls_arrive(function):
    inputs = torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    results, calls = [], []
    for run in (torch.fx.Interpreter(module).boxed_run, boxed(module)):
        with torch.no_grad(), Calls() as seen:
            results.append(run(list(inputs)))
        calls.append(seen.seen)
    assert calls[0] == calls[1] != []
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_what_arrives_as_another_op_is_called_as_it_is():
    def function(x: torch.Tensor) -> Any:
        return aten.mul.Scalar(x, 2.0), aten.mul.Tensor(x, x), aten.alias.default(x)

    graph = make_fx(function, tracing_mode="fake")(torch.ones(2)).graph
    scalar, product, alias = (node for node in graph.nodes if node.op == "call_function")
    assert quickest(scalar) is scalar.target._op  # `torch.mul` makes a tensor of the number first
    assert quickest(product) is not product.target._op
    assert quickest(alias) is alias.target._op  # there is no `torch.alias`


def test_an_operator_of_someone_else_is_called_as_it_is():
    with torch.library._scoped_library("bindings_test", "DEF") as library:
        library.define("mul(Tensor x, Tensor y) -> Tensor")
        library.impl("mul", lambda x, y: x * y + 1, "CompositeExplicitAutograd")
        own = torch.ops.bindings_test.mul.default
        module = make_fx(lambda x: own(x, x))(torch.ones(2))
        assert boxed(module)([torch.ones(2)]).tolist() == [2.0, 2.0]
