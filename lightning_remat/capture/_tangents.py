"""How a gradient lies in memory that a captured graph is handed, as what follows in the step has made it.

AOTAutograd takes it that a gradient lies as the output does that it is of, traces the backward for that, and copies what comes
otherwise: the expanded gradient of a mean, the transposed one of ``logits.transpose(1, 2)``. Eager mode copies nothing, and a
kernel that adds up along the rows goes through such a gradient in another order, and rounds otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

Given = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a gradient."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor of any size lies in memory.

    Attributes:
        order: its dimensions, the one with the largest stride first.
        expanded: those of them in which all elements are one.
        strides: in elements, where there are gaps between them: for one size alone.
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
        """A tensor of the same shape (symbolic, perhaps), type and device that lies so."""
        if self.strides:
            return torch.empty_strided(value.shape, self.strides, dtype=value.dtype, device=value.device)
        sizes = [1 if d in self.expanded else size for d, size in enumerate(value.shape)]
        return torch.empty_permuted(sizes, self.order, dtype=value.dtype, device=value.device).expand(value.shape)


Layouts = Mapping[int, Layout]
"""By the position, among a captured function's outputs, of that whose gradient it is."""


def alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors of this shape, with these strides, lie alike."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))
