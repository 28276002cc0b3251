"""Layer norms as the ops that they are made of, in runs that may have other bits than eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture.fusing._opened import open_layer_norms

aten = torch.ops.aten
NORMS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)


def targets(graph: torch.fx.Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["both", "weight", "none"])
@pytest.mark.parametrize("whole", [False, True])
def test_results_gradients_and_dtypes(dtype: torch.dtype, given: str, whole: bool) -> None:
    """Along the last dimension, and along all of them, where weights have no sum over rows."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16, dtype=dtype) * 2 + 1
    shape = x.shape if whole else x.shape[-1:]
    weight, bias = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    wanted = {"both": (x, weight, bias), "weight": (x, weight), "none": (x,)}[given]

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in tensors]
        made = functional.layer_norm(leaves[0], shape, *leaves[1:])
        return (made, *torch.autograd.grad((made * made.sin()).sum(), leaves))

    module = make_fx(step, tracing_mode="fake")(*wanted)
    expected = module(*wanted)
    assert targets(module.graph).issuperset(NORMS)
    vals = [node.meta["val"] for node in module.graph.output_node().all_input_nodes]
    open_layer_norms(module.graph)
    module.graph.lint()
    assert targets(module.graph).isdisjoint(NORMS)
    for node, val in zip(module.graph.output_node().all_input_nodes, vals, strict=True):
        assert (node.meta["val"].dtype, node.meta["val"].shape) == (val.dtype, val.shape)
    module.recompile()
    found = module(*wanted)
    error = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=error, atol=error)


class Normed(nn.Module):
    """Called with vectors; returns a loss. Layer norms with dropout and a residual around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)
        return self.last(x).square().mean()


def test_they_are_part_of_fast_runs_alone() -> None:
    torch.manual_seed(0)
    module, x = Normed(), torch.randn(8, 32)
    twin = copy.deepcopy(module)
    steps = {
        how: rematerialize(module, 1.0, fuse=how, solver="no_remat", cost_model="flops") for how in ("exact", "fast")
    }
    found = {}
    for how, step in {"eager": twin, **steps}.items():
        module.zero_grad()
        torch.manual_seed(1)
        step(x).backward()
        found[how] = [
            one.grad.clone() for one in (twin if how == "eager" else module).parameters() if one.grad is not None
        ]
    for how in ("exact", "fast"):
        assert steps[how].plan is not None and not steps[how].failures
        norms = sum("layer_norm" in op.target for op in steps[how].plan.graph.ops)
        assert norms == (4 if how == "exact" else 0)
    assert all(map(torch.equal, found["exact"], found["eager"])) and len(found["eager"]) == 8
    for one, other in zip(found["fast"], found["eager"], strict=True):
        torch.testing.assert_close(one, other)
