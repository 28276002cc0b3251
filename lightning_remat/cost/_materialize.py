"""Real arguments for an operation that is known by its specs only."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost._indices import index_bounds

_PATTERN_ELEMENTS = 1 << 16
_LOW, _HIGH = 0.1, 1.0
"""Positive and never tiny: safe under logarithms, roots and divisions, and never subnormal (slow on CPUs)."""


def materialize(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with a real tensor for every `TensorSpec`, each on the device of its spec.

    Floats are between 0.1 and 1, booleans true, integers 0, indices spread over the rows they index. Strides are those
    of the spec: an expanded tensor stays one. The default random generators are not used.
    """
    bounds = index_bounds(call)
    position = itertools.count()
    return call.with_tensors(lambda spec: tensor(spec, bounds.get(next(position))))


def tensor(spec: TensorSpec, index_bound: int | None = None) -> torch.Tensor:
    """A tensor of this spec, over a buffer of ``spec.span`` elements.

    Args:
        spec: what to make.
        index_bound: for integers, draw from 0 to this bound, less 1, instead of zeros.
    """
    buffer = torch.empty(spec.span, dtype=spec.dtype, device=spec.device)
    if spec.dtype is torch.bool:
        buffer.fill_(True)
    elif spec.dtype.is_complex:
        _fill_with_pattern(torch.view_as_real(buffer).view(-1))
    elif spec.dtype.is_floating_point:
        if spec.dtype.itemsize == 1:  # the 8-bit floats have no random kernels
            buffer.fill_(0.5)
        else:
            _fill_with_pattern(buffer)
    elif index_bound is not None:
        buffer.random_(0, index_bound, generator=_generator(spec.device))
    else:
        buffer.zero_()
    return buffer.as_strided(spec.shape, spec.stride) if spec.span else buffer.new_empty(spec.shape)


def _fill_with_pattern(buffer: torch.Tensor) -> None:
    """Random numbers at the speed of a copy, and without any memory beside ``buffer``: a short pattern, doubled."""
    filled = min(_PATTERN_ELEMENTS, buffer.numel())
    buffer[:filled].uniform_(_LOW, _HIGH, generator=_generator(buffer.device))
    while filled < buffer.numel():
        more = min(filled, buffer.numel() - filled)
        buffer[filled : filled + more].copy_(buffer[:more])
        filled += more


def _generator(device: torch.device) -> torch.Generator:
    """Numbers of our own, the same every time."""
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    return generator
