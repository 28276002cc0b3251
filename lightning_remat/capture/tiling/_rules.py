"""Which ops may run slice by slice over a grid: those of which no cell's result depends on another cell's values.

A tensor of a chain has the grid's dimensions first, or all of them as its first one (`place_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture._torch import OpOverload
from lightning_remat.capture.tiling._losses import picked
from lightning_remat.capture.tiling._sliced import Grid, Place

aten = torch.ops.aten
Node = torch.fx.Node

MEAN = 1

Places = Mapping[Node, Place]
"""Where each tensor that an op reads has the cells."""


def place_of(value: torch.Tensor, grid: Grid) -> Place | None:
    """Where a chain's own tensor has the grid's cells; ``None`` where it has not."""
    shape, depth = tuple(value.shape), len(grid)
    if shape[:depth] == grid:
        return Place(tuple(range(depth)))
    if depth > 1 and shape[:1] == (math.prod(grid),):
        return Place(tuple(range(depth)), merged=True)
    return None


def read_places(node: Node, grid: Grid) -> Places | None:
    """Where what an op reads has the cells, if the op may run slice by slice and returns a tensor that has them."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    rule = _RULES.get(node.target) or (_broadcast if is_elementwise(node) else None)
    made = place_of(node.meta["val"], grid)
    read = node.all_input_nodes
    if rule is None or made is None or not read or not all(map(is_tensor, read)):
        return None
    return rule(_Op(node, read, made, grid))


def in_slices(node: Node, args: tuple[Any, ...], cells: Sequence[Node], grid: Grid) -> tuple[Any, tuple[Any, ...]]:
    """The op and its arguments for a slice, whose numbers of cells along the grid are ``cells``."""
    if node.target not in _SHAPED:
        return node.target, args
    place = place_of(node.meta["val"], grid)
    assert place is not None
    shape = tuple(node.meta["val"].shape)
    sizes = [-1, *shape[1:]] if place.merged else [*cells, *shape[len(grid) :]]
    return _SHAPED[node.target], (args[0], sizes)


@dataclasses.dataclass(frozen=True)
class _Op:
    """An op that may run slice by slice.

    Attributes:
        node: the op.
        read: the tensors that it reads.
        made: where its result has the cells.
        grid: the cells.
    """

    node: Node
    read: Sequence[Node]
    made: Place
    grid: Grid

    @property
    def first(self) -> int:
        """The result's first dimension that is none of the grid's."""
        return 1 if self.made.merged else len(self.grid)

    @property
    def all_alike(self) -> Places | None:
        """Where all inputs have the cells, if that is where the result has them."""
        alike = all(place_of(one.meta["val"], self.grid) == self.made for one in self.read)
        return dict.fromkeys(self.read, self.made) if alike else None


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result is computed from one element of each input, in a slice as in the whole."""
    if node.target in (aten.clone.default, aten._to_copy.default):
        value, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
        return bool(value.device == made.device) and not node.kwargs.get("pin_memory")
    if _ops.is_random(node.target) or _reduction(node) == MEAN:  # what a mean's gradient is divided by is their number
        return False
    return _ops.is_elementwise(node.target) or node.target is _ops.dropout_noise


def _reduction(node: Node) -> Any:
    """The argument of a loss's gradient that says whether the loss is a mean; ``None`` for other ops."""
    if not isinstance(node.target, OpOverload):
        return None
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.name == "reduction":
            return node.args[number] if number < len(node.args) else node.kwargs.get("reduction", MEAN)
    return None


def _broadcast(op: _Op) -> Places | None:
    """Inputs are aligned with the result by their last dimensions."""
    rank = op.node.meta["val"].dim()
    found: dict[Node, Place] = {}
    for one in op.read:
        shape, missing = one.meta["val"].shape, rank - one.meta["val"].dim()
        dims = (dim - missing for dim in range(op.first))
        sliced = [dim if dim >= 0 and shape[dim] > 1 else None for dim in dims]
        if not op.made.merged:
            found[one] = Place(tuple(sliced))
        elif sliced[0] is not None:
            found[one] = op.made
        elif op.node.target is aten.expand.default:  # to how many cells is not known then
            return None
        else:
            found[one] = Place((None,) * len(op.grid))
    return found


def _along(position: int) -> Callable[[_Op], Places | None]:
    """The rule of an op that works along the dimensions which it is given at this place among its arguments."""

    def rule(op: _Op) -> Places | None:
        given: Any = op.node.args[position] if position < len(op.node.args) else None
        dims = [given] if isinstance(given, int) else given
        rank = op.read[0].meta["val"].dim()
        if not dims or any(dim % rank < op.first for dim in dims):
            return None
        return op.all_alike

    return rule


def _transposed(op: _Op) -> Places | None:
    order = list(range(op.node.meta["val"].dim()))
    dims: Any = op.node.args[1:]
    if op.node.target is aten.permute.default:
        order = [order[dim] for dim in dims[0]]
    else:
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return op.all_alike if order[: op.first] == list(range(op.first)) else None


def _reshaped(op: _Op) -> Places | None:
    place = place_of(op.read[0].meta["val"], op.grid)
    return None if place is None else {op.read[0]: place}


def _with_another_dimension(op: _Op) -> Places | None:
    dim: Any = op.node.args[1]
    return op.all_alike if dim % op.node.meta["val"].dim() >= op.first else None


def _without_dimensions(op: _Op) -> Places | None:
    given: Any = op.node.args[1]
    rank = op.read[0].meta["val"].dim()
    dims = [given] if isinstance(given, int) else given
    return op.all_alike if all(dim % rank >= op.first for dim in dims) else None


def _batched(op: _Op) -> Places | None:
    return op.all_alike if op.first == 1 else None


def _of_classes(op: _Op) -> Places | None:
    """What is given to a loss over classes (N, V, ...): cells are along N, and its gradient is one number, or one a target."""
    if len(op.grid) > 1:
        return None
    return {one: op.made if _has_cells(one, op) else Place((None,)) for one in op.read}


def _has_cells(one: Node, op: _Op) -> bool:
    """Whether it is no weight, one a class, and no scalar."""
    weight = op.node.args[3] if op.node.target in _GRADIENTS_OF_CLASSES else None
    return one is not weight and one.meta["val"].dim() > 0


_GRADIENTS_OF_CLASSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)

_RULES: dict[Any, Callable[[_Op], Places | None]] = {
    **dict.fromkeys(_VIEWS, _reshaped),
    aten.expand.default: _broadcast,
    aten.transpose.int: _transposed,
    aten.permute.default: _transposed,
    aten.unsqueeze.default: _with_another_dimension,
    aten.squeeze.dim: _without_dimensions,
    aten.squeeze.dims: _without_dimensions,
    aten.bmm.default: _batched,
    aten._softmax.default: _along(1),
    aten._log_softmax.default: _along(1),
    aten._softmax_backward_data.default: _along(2),
    aten._log_softmax_backward_data.default: _along(2),
    aten.all.dim: _along(1),
    aten.any.dim: _along(1),
    aten.sum.dim_IntList: _along(1),
    aten.mean.dim: _along(1),
    aten.amax.default: _along(1),
    aten.logsumexp.default: _along(1),
    aten.gather.default: _along(1),
    **dict.fromkeys((*_GRADIENTS_OF_CLASSES, picked), _of_classes),
}

_SHAPED: dict[Any, OpOverload] = {
    **dict.fromkeys(_VIEWS, aten.reshape.default),
    aten.expand.default: aten.expand.default,
}
"""Ops that are given the shape of their result, and those that stand for them in a slice: it may lie in another way."""
