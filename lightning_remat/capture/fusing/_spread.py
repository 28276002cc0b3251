"""Sums at places that lie in a grid, for steps that need not have eager mode's numbers: as matrix products.

With deterministic algorithms, the gradient of an interpolation adds up what lies at the same place, one element after the
other. Where places are given by rows and columns, a sum over rows and one over columns is the same, but for the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture.fusing._rules import is_left

aten = torch.ops.aten
Node = torch.fx.Node

_ADDING = (aten.index_put.default, aten._unsafe_index_put.default)

FEWEST = 1 << 16
"""Numbers that are added, at least: with less, one kernel is as fast as a few."""

LARGEST = 1 << 22
"""The most elements of a matrix that says which row goes to which."""


def spread_by_products(graph: torch.fx.Graph) -> None:
    """Have sums at places that lie in a grid, on a device other than the CPU, be matrix products."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ADDING and _lies_in_grid(*node.args):
            base, places, values, _ = node.args
            node.target, node.args = added_in_grid, (base, [one for one in places if one is not None], values)


def added_in_grid(base: torch.Tensor, places: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """``base`` with ``values`` added at ``places``, the indices of its last dimensions (see `spread_by_products`)."""
    found = values
    for dim, index in zip(range(base.dim() - len(places), base.dim()), places, strict=True):
        goals = torch.arange(base.shape[dim], device=base.device)
        moves = goals[:, None] == index.reshape(1, -1).remainder(base.shape[dim])
        found = _product(moves.to(values.dtype), found, dim)
    return torch.add(base, found, out=torch.empty_like(base))


def _product(matrix: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix times a tensor along one of its dimensions; the result lies as the tensor does, which is not copied for it."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    x = x.permute(order)
    if not x.is_contiguous():
        x = x.contiguous()
    place = order.index(dim)
    before, (size, *after) = list(x.shape[:place]), x.shape[place:]
    rows = x.reshape(math.prod(before), size, math.prod(after))
    alone = rows.shape[2] == 1
    made = rows[:, :, 0] @ matrix.T if alone else torch.bmm(matrix.expand(rows.shape[0], *matrix.shape), rows)
    made = made.reshape(*before, matrix.shape[0], *after)
    return made.permute([order.index(i) for i in range(len(order))])


def _lies_in_grid(base: Any, places: Any, values: Any, accumulate: Any = False, *_: Any) -> bool:
    """Whether places are the indices of the last dimensions, each of which changes along a dimension of its own."""
    given = [one for one in places if one is not None]
    if not accumulate or not given or list(places) != [*[None] * (len(places) - len(given)), *given]:
        return False
    if not all(map(is_tensor, (base, values, *given))) or is_left(base):
        return False
    made, added, indices = base.meta["val"], values.meta["val"], [one.meta["val"] for one in given]
    if any(type(size) is not int for one in (made, added, *indices) for size in one.shape):
        return False
    sizes = [one.numel() for one in indices]
    shapes = [(size, *[1] * (len(given) - 1 - i)) for i, size in enumerate(sizes)]
    if [tuple(one.shape) for one in indices] != shapes or any(one.dtype is not torch.int64 for one in indices):
        return False
    rest = len(places) - len(given)
    whole = len(places) == made.dim() and tuple(added.shape) == (*made.shape[:rest], *sizes)
    small = all(size * goals <= LARGEST for size, goals in zip(sizes, made.shape[rest:], strict=True))
    return whole and small and added.numel() >= FEWEST and made.dtype.is_floating_point
