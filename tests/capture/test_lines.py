"""A lowered graph's code is the code that torch writes, but for the names of what is called."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen

from lightning_remat.capture._torch._lines import Line, code_of
from lightning_remat.capture._torch._running import boxed
from tests.capture.test_bindings import attention, convolutions

aten = torch.ops.aten


def numbers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """Constants of all kinds, results that nobody reads, one that is returned twice."""
    y = aten.clamp.default(x, -math.inf, 2.5)
    aten.mul_.Tensor(y, 2)
    z = aten.full.default([2, 3], math.nan, dtype=torch.float64, device=torch.device("cpu"), pin_memory=False)
    parts = aten.split_with_sizes.default(w, [3, 5], dim=1)
    first = aten.index.Tensor(b, [aten.gt.Scalar(b, 0)])
    return y, parts[1], None, aten.to.dtype(z, torch.float32), y, aten.sum.default(first), 3


def lines_of(graph: torch.fx.Graph) -> list[Line]:
    made: dict[torch.fx.Node, Line] = {}
    for node in graph.nodes:
        made[node] = Line.of(node, made.__getitem__)
    return list(made.values())


@pytest.mark.parametrize("function", [attention, convolutions, numbers])
def test_it_is_what_torch_writes(function):
    graph = make_fx(function, tracing_mode="real")(torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8)).graph
    graph.set_codegen(_BoxedCodeGen())
    torchs = re.sub(r"= [\w.]+\.[\w.]+\(", "= call(", graph.python_code("self").src).replace(" -> _Any_:", ":")
    own, names = code_of(lines_of(graph))
    assert [line for line in torchs.splitlines() if line.strip()] == re.sub(r"call_\d+\(", "call(", own).splitlines()
    assert all(name in names for name in re.findall(r"call_\d+", own))


def test_names_of_its_own_give_way():
    graph = torch.fx.Graph()
    x = graph.placeholder("call_4")
    x.meta["val"] = torch.ones(2)
    half, shape = graph.call_function(aten.mul.Scalar, (x, 0.5)), slice(0, 1)
    graph.output((half, graph.call_function(aten.sin.default, (x,)), graph.call_function(max, ((half, x), shape))))
    code, names = code_of(lines_of(graph))
    assert names["_call_4"] is not None and "call_4" not in names and "slice(0, 1, None)" in code


def test_constants_without_a_short_name():
    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    kinds = frozenset({1, 2})
    x = module.graph.placeholder("x")
    module.graph.output((module.graph.call_function(sum, (kinds, x)), kinds, {"a": x, "b": (x,)}))
    assert boxed(module)([4]) == (7, kinds, {"a": 4, "b": (4,)})
