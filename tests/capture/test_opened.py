"""Norms as the ops that they are made of, in runs that may have other bits than eager mode."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture import _ops as ops
from lightning_remat.capture.fusing import _rules
from lightning_remat.capture.fusing._opened import open_norms
from lightning_remat.capture.rewritings import _batch_norm
from tests.helpers.fused_forms import take_fused

aten = torch.ops.aten
NORMS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
BATCH_NORMS = (aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default)
ERRORS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}


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
    open_norms(module.graph)
    module.graph.lint()
    assert targets(module.graph).isdisjoint(NORMS)
    for node, val in zip(module.graph.output_node().all_input_nodes, vals, strict=True):
        assert (node.meta["val"].dtype, node.meta["val"].shape) == (val.dtype, val.shape)
    module.recompile()
    found = module(*wanted)
    error = ERRORS[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=error, atol=error)


@pytest.fixture
def batch_norms_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules, "LEFT", ())
    monkeypatch.setattr(
        _batch_norm._overwriting, "writes_where_told", lambda *_: False
    )  # a backward of the CPU's alone


@pytest.mark.usefixtures("batch_norms_too")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, True], [True, False, False]], ids=str)
def test_batch_norms(dtype: torch.dtype, given: bool, shape: tuple[int, ...], wanted: list[bool]) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, dtype=dtype) * 2 + 1 for _ in range(2))
    weight, bias, mean, variance = (torch.rand(4, dtype=dtype) for _ in range(4))
    wanted = wanted if given else [wanted[0], False, False]
    inputs = (x, grad, mean, variance, *((weight, bias) if given else ()))

    def step(
        x: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor
    ) -> list[torch.Tensor]:
        weight, bias = affine or (None, None)
        made = BATCH_NORMS[0](x, weight, bias, mean, variance, True, 0.3, 1e-5)
        back = BATCH_NORMS[1](grad, x, weight, None, None, made[1], made[2], True, 1e-5, wanted)
        return [*made, *(one for one, is_wanted in zip(back, wanted, strict=True) if is_wanted)]

    expected = step(*inputs)
    module = make_fx(step, tracing_mode="fake")(*inputs)
    assert targets(module.graph).issuperset(BATCH_NORMS)
    vals = [node.meta["val"] for node in module.graph.output_node().args[0]]
    open_norms(module.graph)
    module.graph.lint()
    assert targets(module.graph).isdisjoint(BATCH_NORMS)
    module.recompile()
    for one, other, val in zip(module(*inputs), expected, vals, strict=True):
        assert (one.dtype, one.shape) == (val.dtype, val.shape)
        torch.testing.assert_close(one, other.to(one.dtype), rtol=ERRORS[dtype], atol=ERRORS[dtype])


@pytest.mark.usefixtures("batch_norms_too")
def test_evaluation_mode_stays() -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return BATCH_NORMS[0](x, None, None, mean, variance, False, 0.1, 1e-5)[0]  # type: ignore[no-any-return]

    module = make_fx(step, tracing_mode="fake")(torch.randn(4, 3), torch.zeros(3), torch.ones(3))
    open_norms(module.graph)
    assert BATCH_NORMS[0] in targets(module.graph)


def test_cudnns_batch_norm() -> None:
    """The same, with its own arguments and results: on the CPU there is none to run."""
    graph = torch.fx.Graph()
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        values = [torch.randn(2, 3, 4), *(torch.rand(3) for _ in range(4)), torch.randn(2, 3, 4)]
        reserve = torch.empty(0, dtype=torch.uint8)
    nodes = [graph.placeholder(f"given_{i}") for i in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    x, weight, bias, mean, variance, grad = nodes

    def items(node: torch.fx.Node, results: tuple[torch.Tensor, ...]) -> list[torch.fx.Node]:
        node.meta["val"] = results
        found = [graph.call_function(operator.getitem, (node, i)) for i in range(len(results))]
        for one, value in zip(found, results, strict=True):
            one.meta["val"] = value
        return found

    norm = graph.call_function(ops.cudnn_batch_norm, (x, weight, bias, mean, variance, True, 0.3, 1e-5))
    made = items(norm, (values[0], *values[3:5], reserve, *values[3:5]))
    arguments = (x, grad, weight, None, None, *made[1:3], 1e-5, made[3])
    back = items(
        graph.call_function(aten.cudnn_batch_norm_backward.default, arguments), (values[0], values[1], values[2])
    )
    graph.output((made[0], *made[1:3], *made[4:], *back))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_rules, "LEFT", ())
        open_norms(graph)
    graph.lint()
    module = torch.fx.GraphModule({}, graph)
    real = [torch.randn(2, 3, 4), *(torch.rand(3) for _ in range(4)), torch.randn(2, 3, 4)]
    expected = BATCH_NORMS[0](*real[:5], True, 0.3, 1e-5)
    gradients = BATCH_NORMS[1](real[5], real[0], real[1], None, None, *expected[1:3], True, 1e-5, [True] * 3)
    for one, other in zip(module(*real), (*expected, *gradients), strict=True):
        torch.testing.assert_close(one, other)


class Convolutional(nn.Module):
    """Called with images; returns a loss. Convolutions and batch norms, one of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.again = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x)).relu()
        return self.again(self.norm(self.second(x)).relu() + x).square().mean()


@pytest.mark.usefixtures("batch_norms_too")
@pytest.mark.parametrize("budget", [1.0, "min"])
def test_batch_norms_in_a_step(budget: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics are updated once a step, also where what they are made of is computed again."""

    take_fused(monkeypatch)
    torch.manual_seed(0)
    module = Convolutional()
    twin = copy.deepcopy(module)
    step = rematerialize(module, budget, fuse="fast", time_limit=1.0, cost_model="flops")
    for number in range(3):
        x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(number))
        for call in (step, twin):
            call(x).backward()
    assert step.plan is not None and not step.failures
    found = [op.target for op in step.plan.graph.ops]
    assert not any("batch_norm" in target for target in found)
    assert found.count("aten.relu.default") == 1  # of the norm whose statistics are read by its second call
    assert "aten.view.default" not in found and found.count("next_statistic") == 6
    for one, other in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


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
