"""A convolution's backward as two operations, one of which does without the input: eager's bits, whatever the convolution."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.capture.rewritings._unread import stand_in

aten = torch.ops.aten
CASES = {
    "strided": {"stride": 2},
    "padded": {"padding": 2},
    "dilated": {"dilation": 2},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 8},
    "without bias": {"bias": False},
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("case", CASES)
def test_both_halves_give_the_bits_of_the_whole(
    case: str, kind: str, dims: int, dtype: torch.dtype, onednn: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, *[10] * dims, dtype=dtype)
    layer = getattr(nn, f"{kind}{dims}d")(8, 16, 3, dtype=dtype, **CASES[case])
    with torch.backends.mkldnn.flags(enabled=False) if not onednn else contextlib.nullcontext():
        gradient = torch.randn_like(layer(x))
        bias = layer.bias is not None
        options = [layer.stride, layer.padding, layer.dilation, kind != "Conv", [0] * dims, layer.groups]
        arguments = gradient, x, layer.weight, [16] if bias else None, *map(_listed, options)
        whole = aten.convolution_backward.default(*arguments, [True, True, bias])
        weights = aten.convolution_backward.default(*arguments, [False, True, bias])
        instead = stand_in(tuple(x.shape), x.stride(), dtype)
        data = aten.convolution_backward.default(gradient, instead, *arguments[2:], [True, False, False])
    for one, other in zip(whole, (data[0], weights[1], weights[2]), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (torch.equal(one, other) and one.stride() == other.stride())


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Tanh(), nn.Conv2d(8, 4, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).square().mean()


@pytest.mark.parametrize("channels_last", [False, True])
def test_captured_as_two(channels_last: bool) -> None:
    torch.manual_seed(0)
    module = Convolutions()
    x = torch.randn(2, 3, 32, 32)
    if channels_last:
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit", solver="greedy")
    for call in (module, step):
        call(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), other.parameters(), strict=True))
    assert step.plan is not None
    backward = [op for op in step.plan.graph.ops if "convolution_backward" in op.target]
    assert len(backward) == 5  # the first makes no gradient of the images
    made = [len(op.outputs) for op in backward]
    assert sorted(made) == [1, 1, 2, 2, 2]  # weights and bias, or the input's alone
