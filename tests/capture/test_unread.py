"""Inputs of which an op reads the shape only: the same bits from a stand-in that takes no memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture.rewritings._unread import _SHAPE_ONLY, stand_in
from lightning_remat.measure import peak_memory

aten = torch.ops.aten
X = torch.randn(2, 3, 12, 16)
POOLED, WHERE = functional.max_pool2d(X, 2, return_indices=True)
ADAPTED, THERE = functional.adaptive_max_pool2d(X, (5, 7), return_indices=True)
X3 = torch.randn(2, 3, 8, 8, 6)
POOLED3, WHERE3 = functional.max_pool3d(X3, 2, return_indices=True)
ADAPTED3, THERE3 = functional.adaptive_max_pool3d(X3, 3, return_indices=True)
SMALL3 = functional.avg_pool3d(X3, 2)
LINE = torch.randn(2, 3, 20)
CALLS: list[tuple[Any, ...]] = [
    (aten.max_pool2d_with_indices_backward.default, POOLED, X, [2, 2], [2, 2], [0, 0], [1, 1], False, WHERE),
    (aten.max_pool3d_with_indices_backward.default, POOLED3, X3, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, WHERE3),
    (aten.avg_pool2d_backward.default, POOLED, X, [2, 2], [2, 2], [0, 0], False, True, None),
    (aten.avg_pool3d_backward.default, SMALL3, X3, [2] * 3, [2] * 3, [0] * 3, False, True, None),
    (aten._adaptive_avg_pool2d_backward.default, ADAPTED, X),
    (aten._adaptive_avg_pool3d_backward.default, ADAPTED3, X3),
    (aten.adaptive_max_pool2d_backward.default, ADAPTED, X, THERE),
    (aten.adaptive_max_pool3d_backward.default, ADAPTED3, X3, THERE3),
    (aten.reflection_pad1d_backward.default, functional.pad(LINE, (2, 1)), LINE, [2, 1]),
    (aten.reflection_pad2d_backward.default, functional.pad(X, (2, 1, 3, 0)), X, [2, 1, 3, 0]),
    (aten.reflection_pad3d_backward.default, functional.pad(X3, (1,) * 6), X3, [1] * 6),
    (aten.replication_pad1d_backward.default, functional.pad(LINE, (2, 1)), LINE, [2, 1]),
    (aten.replication_pad2d_backward.default, functional.pad(X, (2, 1, 3, 0)), X, [2, 1, 3, 0]),
    (aten.replication_pad3d_backward.default, functional.pad(X3, (1,) * 6), X3, [1] * 6),
]


def test_all_are_tried() -> None:
    assert {call[0] for call in CALLS} == _SHAPE_ONLY


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_the_same_bits(call: tuple[Any, ...], dtype: torch.dtype, channels_last: bool) -> None:
    target, grad, x, *rest = call
    if dtype is torch.bfloat16 and target is aten.avg_pool3d_backward.default:
        pytest.skip("torch has no such kernel")
    grad, x = grad.to(dtype), x.to(dtype)
    if channels_last and x.dim() == 4:
        grad, x = (one.contiguous(memory_format=torch.channels_last) for one in (grad, x))
    expected = target(grad, x, *rest)
    got = target(grad, stand_in(tuple(x.shape), x.stride(), dtype), *rest)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()


def test_a_stand_in_takes_no_memory() -> None:
    shape = (1 << 20, 64)
    assert peak_memory(lambda: stand_in(shape, (64, 1), torch.float32).sum()) < 1 << 16
    one = stand_in((3, 5), (1, 3), torch.bfloat16)
    assert (one.shape, one.stride(), one.dtype, one.device.type) == ((3, 5), (1, 3), torch.bfloat16, "cpu")
    assert not one.any()
    assert stand_in((0, 4), (4, 1), torch.float64).numel() == 0


class Pools(nn.Module):
    """What convolutions, pooling and padding read is not needed otherwise: nothing here keeps its own input or output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding_mode="reflect", padding=1)
        self.first.weight.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = functional.avg_pool2d(self.first(images + self.shift), 2)
        return functional.adaptive_avg_pool2d(functional.max_pool2d(self.second(h), 2), 3).square().mean()


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_nothing_is_kept_for_its_shape(budget: Any) -> None:
    torch.manual_seed(0)
    module = Pools()
    other = copy.deepcopy(module)
    x = torch.randn(4, 3, 32, 48)
    step = rematerialize(other, budget=budget, cost_model="unit", solver="greedy")
    for call in (module, step):
        call(x).backward()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    assert step.plan is not None
    graph = step.plan.graph
    reads = {op.target: [graph.tensors[t].shape for t in op.inputs] for op in graph.ops if "backward" in op.target}
    for pool in ("avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "reflection_pad2d_backward"):
        assert len(reads[f"aten.{pool}.default"]) == 1, "the gradient and nothing else"
    assert len(reads["aten.max_pool2d_with_indices_backward.default"]) == 2
    frozen = next(op for op in reversed(graph.ops) if op.target == "aten.convolution_backward.default")
    assert [graph.tensors[t].shape for t in frozen.inputs] == [(4, 8, 32, 48), (8, 3, 3, 3)]
