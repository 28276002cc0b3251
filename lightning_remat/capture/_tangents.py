"""Memory layouts of tangents: the gradients of a captured graph's outputs, as the rest of the step has made them.

AOTAutograd assumes that a tangent is laid out as its output is, traces the backward for that, and copies a tangent that
comes otherwise: the expanded gradient of a mean, the transposed one of ``logits.transpose(1, 2)``. Eager mode copies
nothing, and a kernel that adds up along the rows goes through such a gradient in another order, and rounds otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

Given = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, in elements, of a gradient."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor, for any sizes of its dimensions.

    Attributes:
        order: its dimensions, the one with the largest stride first.
        expanded: those of them with a stride of 0: all of their elements are one in memory.
        strides: in elements, for a layout that the other two do not give, such as one with gaps: it holds for one shape
            alone.
    """

    order: tuple[int, ...]
    expanded: frozenset[int] = frozenset()
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> Layout:
        """The layout of a tensor of this shape, with these strides."""
        expanded = frozenset(
            d for d, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and not stride
        )
        order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))
        found = cls(order, expanded)
        return found if alike(shape, strides, found.at(shape)) else cls(order, expanded, tuple(strides))

    def at(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a tensor of this shape."""
        if self.strides:
            return self.strides
        found, step = [0] * len(shape), 1
        for d in reversed(self.order):
            if d not in self.expanded:
                found[d], step = step, step * max(1, shape[d])
        return tuple(found)

    def empty_like(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape (symbolic, perhaps), dtype and device that has this layout."""
        if self.strides:
            return torch.empty_strided(value.shape, self.strides, dtype=value.dtype, device=value.device)
        sizes = [1 if d in self.expanded else size for d, size in enumerate(value.shape)]
        return torch.empty_permuted(sizes, self.order, dtype=value.dtype, device=value.device).expand(value.shape)


Layouts = Mapping[int, Layout]
"""Layouts of tangents, by the position of the output, among a captured function's, whose gradient the tangent is."""


def alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors of this shape, with strides ``one`` and ``other``, have the same layout."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))
