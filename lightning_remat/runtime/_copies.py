"""Copies of tensors that lie in memory as these do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from lightning_remat.capture import TensorSpec

VECTOR_BYTES = 16
"""Kernels read so many bytes at once, from the first address on that is a multiple: that may decide about last bits."""


def layout(tensor: torch.Tensor) -> Hashable:
    """How a tensor lies in memory; ``None`` where its elements do not all have memory of their own."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return None
    return tensor.shape, tensor.stride(), tensor.data_ptr() % VECTOR_BYTES


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor that lies as this one does (see `layout`)."""
    shift = tensor.data_ptr() % VECTOR_BYTES // tensor.element_size()
    flat = torch.empty(shift + TensorSpec.of(tensor).span, dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride(), shift)


def copied_out(values: Sequence[Any], fixed: frozenset[int] = frozenset()) -> list[Any]:
    """Copies of tensors, but for those with these ids: arguments that a forward writes to."""
    return [one.clone() if isinstance(one, torch.Tensor) and id(one) not in fixed else one for one in values]
