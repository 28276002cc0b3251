"""Traced strides are those of the real kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_remat.capture._torch import real_layouts, whole_ops

aten = torch.ops.aten
CHANNELS = 6


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """One shape in every order of its dimensions, and as a slice."""
    for order in itertools.permutations(range(len(shape))):
        yield torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    yield torch.randn([*shape[:-1], 2 * shape[-1]])[..., ::2]


def norm_forward(x: torch.Tensor) -> Any:
    ones, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    return aten._native_batch_norm_legit_functional(x, ones, ones, zeros, ones, True, 0.1, 1e-5)


def norm_without_statistics(x: torch.Tensor) -> Any:
    return aten._native_batch_norm_legit.no_stats(x, torch.ones(CHANNELS), torch.ones(CHANNELS), True, 0.1, 1e-5)


def norm_evaluation(x: torch.Tensor) -> Any:
    ones, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    return aten._native_batch_norm_legit_no_training(x, ones, ones, zeros, ones, 0.1, 1e-5)[0]


def norm_backward(x: torch.Tensor) -> Any:
    ones = torch.ones(CHANNELS)
    gradient = torch.ones(x.shape)
    return aten.native_batch_norm_backward(gradient, x, ones, None, None, ones, ones, True, 1e-5, [True] * 3)


def layer_norm_backward(x: torch.Tensor) -> Any:
    size, statistics = [x.shape[-1]], torch.ones([*x.shape[:-1], 1])
    weight = torch.ones(size)
    return aten.native_layer_norm_backward(x, x, size, statistics, statistics, weight, weight, [True] * 3)


OPS: list[tuple[tuple[int, ...], Callable[[torch.Tensor], Any]]] = [
    *itertools.product(
        [(8, CHANNELS), (4, CHANNELS, 5), (4, CHANNELS, 4, 4)],
        [norm_forward, norm_without_statistics, norm_evaluation, norm_backward],
    ),
    *itertools.product(
        [(4, 5, 6), (4, 3, 4, 6)],
        [
            layer_norm_backward,
            lambda x: aten._log_softmax_backward_data(x, x, -1, x.dtype),
            lambda x: aten.native_dropout_backward(x, x > 0, 2.0),
            lambda x: aten.roll(x, [1], [0]),
            lambda x: aten.gelu(x),
            lambda x: aten.cat([x, x], 1),
        ],
    ),
    ((2, 4, 3, 3), lambda x: aten.channel_shuffle(x, 2)),
    ((2, 4, 2, 2), lambda x: aten.max_unpool2d(x, torch.arange(4).view(2, 2).expand(2, 4, 2, 2).contiguous(), [4, 4])),
]


@pytest.mark.parametrize(("shape", "op"), OPS)
def test_traced_strides_are_the_real_ones(shape: tuple[int, ...], op: Callable[[torch.Tensor], Any]) -> None:
    def strides(result: Any) -> list[tuple[int, ...]]:
        tensors = result if isinstance(result, (tuple, list)) else [result]
        return [one.stride() for one in tensors if one.numel() > 1]

    for x in layouts(shape):
        real = strides(op(x))
        with whole_ops(), real_layouts(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert strides(op(mode.from_tensor(x))) == real


PAIRS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: aten.softplus_backward(x, y, 1, 20),
    lambda x, y: aten.hardtanh_backward(x, y, -1.0, 1.0),
    lambda x, y: aten.hardswish_backward(x, y),
    lambda x, y: aten.hardsigmoid_backward(x, y),
    lambda x, y: aten.logit_backward(x, y),
    lambda x, y: aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    lambda x, y: aten.copysign(x, y),
    lambda x, y: aten.xlogy(x, y.exp()),
    lambda x, y: aten.special_xlog1py(x, y.exp()),
    lambda x, y: aten.native_dropout_backward(x, y > 0, 2.0),
    lambda x, y: aten.mse_loss_backward(x, y, x, 1),
    lambda x, y: aten.huber_loss_backward(x, y, y, 1, 1.0),
    lambda x, y: aten.smooth_l1_loss_backward(x.sum(), x, y, 1, 1.0),
    lambda x, y: aten.binary_cross_entropy_backward(x, y.sigmoid(), x.sigmoid()),
    lambda x, y: aten.rrelu_with_noise_backward(x, x, y, 0.1, 0.3, True, False),
    lambda x, y: aten.log_sigmoid_forward(x)[0],
    lambda x, y: aten.gelu_backward(x, y),
    lambda x, y: aten.silu_backward(x, y),
    lambda x, y: aten.leaky_relu_backward(x, y, 0.1, False),
    lambda x, y: aten._prelu_kernel(x, y),
    lambda x, y: aten.where(x > 0, x, y),
]


@pytest.mark.parametrize("op", PAIRS)
def test_traced_strides_of_two_inputs_that_lie_otherwise(op: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    def strides(result: Any) -> list[tuple[int, ...]]:
        return [one.stride() for one in (result if isinstance(result, tuple) else [result]) if one.numel() > 1]

    for x, y in itertools.product(list(layouts((4, 5, 6)))[:-1], repeat=2):
        real = strides(op(x, y))
        with whole_ops(), real_layouts(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert strides(op(mode.from_tensor(x), mode.from_tensor(y))) == real


def test_everything_is_put_back() -> None:
    before = FakeTensorMode._dispatch_impl
    with real_layouts():
        assert FakeTensorMode._dispatch_impl is not before
    assert FakeTensorMode._dispatch_impl is before
