"""Calls of ops on the CPU, with the shapes of their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_remat.capture import OpCall, TensorSpec

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> TensorSpec:
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape, tuple(stride), dtype, CPU)


def call(target: Callable[..., Any], *args: Any, outputs: tuple[TensorSpec, ...] = (), **kwargs: Any) -> OpCall:
    return OpCall(target, args, kwargs, outputs)


def mm(m: int, k: int, n: int) -> OpCall:
    return call(aten.mm.default, spec(m, k), spec(k, n), outputs=(spec(m, n),))


def convolution(batch: int, channels: int, size: int, groups: int = 1) -> OpCall:
    x, w = spec(batch, channels, size, size), spec(channels, channels // groups, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return call(aten.convolution.default, x, w, None, *options, outputs=(x,))
