"""Ops whose results lie in memory otherwise than torch's fake tensors say: what the real kernels do.

Tracing decides by strides whether a reshape copies, and a dropout mask is filled in the order of its input's memory. Where
the fake strides are wrong, what was captured fails (a view of what cannot be viewed so) or draws eager's random numbers
for other elements. The ops were found by comparing both on inputs that are permuted, alike or each in another way, on
torch 2.13; ``tests/capture/test_layouts.py`` does so again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _format(x: torch.Tensor) -> torch.memory_format:
    """Channels last where the tensor is so, else contiguous."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and not x.is_contiguous() and x.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def _suggested(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_format(x))


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


Rule = tuple[int, Callable[..., torch.Tensor], bool]
"""Which argument the first result is laid out by, how, and whether on the CPU only."""

_RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: (0, _suggested, True),
    aten._native_batch_norm_legit.default: (0, _suggested, True),
    aten._native_batch_norm_legit.no_stats: (0, _suggested, True),
    aten._native_batch_norm_legit_functional.default: (0, _suggested, True),
    aten._native_batch_norm_legit_no_training.default: (0, _suggested, True),
    aten.native_batch_norm_backward.default: (1, _suggested, True),
    aten.batch_norm_backward.default: (1, _suggested, False),
    aten.cudnn_batch_norm_backward.default: (0, _suggested, False),
    aten.native_layer_norm_backward.default: (1, _contiguous, False),
    aten._log_softmax_backward_data.default: (0, _contiguous, False),
    aten.channel_shuffle.default: (0, _suggested, True),
    aten.roll.default: (0, _suggested, True),
    aten.mse_loss_backward.default: (1, _contiguous, False),
    aten.huber_loss_backward.default: (1, _contiguous, False),
    aten.smooth_l1_loss_backward.default: (1, _contiguous, False),
    aten.binary_cross_entropy_backward.default: (1, torch.empty_like, False),
    aten.rrelu_with_noise_backward.default: (2, torch.empty_like, False),
    aten.log_sigmoid_forward.default: (0, _contiguous, True),
}

_ELEMENTWISE: dict[Any, tuple[int, int]] = {
    aten.native_dropout_backward.default: (0, 1),
    aten.softplus_backward.default: (0, 1),
    aten.hardtanh_backward.default: (0, 1),
    aten.hardswish_backward.default: (0, 1),
    aten.hardsigmoid_backward.default: (0, 1),
    aten.logit_backward.default: (0, 1),
    aten.elu_backward.default: (0, 5),
    aten.copysign.Tensor: (0, 1),
    aten.xlogy.Tensor: (0, 1),
    aten.special_xlog1py.default: (0, 1),
}
"""Ops whose result is laid out as the sum of two of their arguments would be, and the positions of these."""


def real_layout(target: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """A tensor with the strides that the first result of ``target(*args)`` really has; ``None`` where fake ones are right.

    Call it under the fake tensor mode of ``args``.
    """
    if target is aten.max_unpool2d.default and args[0].device.type == "cpu":
        x: torch.Tensor = args[0]
        size = (*x.shape[:-2], *args[2])
        return x.new_empty(size).contiguous(memory_format=_format(x))
    if target in _ELEMENTWISE:
        first, second = _ELEMENTWISE[target]
        return torch.add(args[first], args[second])
    rule = _RULES.get(target)
    if rule is None:
        return None
    index, layout, cpu_only = rule
    x = args[index]
    return None if cpu_only and x.device.type != "cpu" else layout(x)


def with_narrow_gaps(shape: Sequence[Any], stride: Sequence[Any]) -> tuple[Any, ...] | None:
    """Strides that have gaps of one element where these have gaps; ``None`` where they have none.

    Elementwise kernels go over both alike, since the same dimensions follow one another without a gap.
    """
    narrow = list(stride)
    expected, made, gaps = 1, 1, False
    for dim in sorted(range(len(shape)), key=lambda dim: stride[dim]):
        if shape[dim] == 1:
            continue
        gap = stride[dim] != expected
        made, gaps = made + gap, gaps or gap
        narrow[dim] = made
        expected, made = stride[dim] * shape[dim], made * shape[dim]
    return tuple(narrow) if gaps else None


def lies_in_order(x: torch.Tensor) -> bool:
    """Whether a tensor's elements follow one another, dimension by dimension; so do those of one that is not strided."""
    return x.layout is not torch.strided or x.is_contiguous()


def lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same strides, wherever there is more than one element."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return all(n == 1 or a == b for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True))
