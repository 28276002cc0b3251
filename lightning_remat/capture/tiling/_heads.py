"""The products around a loss's logits, in slices, where their weight is cast: under autocast.

A copy of the weight lies then beside logits that fill a peak, in the forward and in the backward, and so does its gradient
before that is cast back. No sum runs over a product's columns, or over its rows. So each of the three products runs in slices:
along the classes for the logits and the weight's gradient, and along the width for the gradient of what the head is given. Of
the weight only a slice is cast at a time.

On CUDA products stay whole: cuBLAS chooses a kernel by size and alignment. On an H100 slices of up to 128 columns along the
width had other bits with all of 32,000, 50,257 and 50,304 classes, and with 50,257 no slices of any product were alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._torch import hint
from lightning_remat.capture.tiling._chains import put
from lightning_remat.capture.tiling._losses import casts, erase_unread, only
from lightning_remat.capture.tiling._sliced import Chain, Place, least_bytes, seen_to_be_exact

aten = torch.ops.aten
Node = torch.fx.Node

LEAST_COLUMNS = 64
"""Columns of a slice of a product, or rows, at least: for each slice what it shares with others is read once more."""

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def tile_heads(graph: torch.fx.Graph, logits: Iterable[Node]) -> bool:
    """Have the products that make these logits, and those of their backward, run in slices, where these have the same bits.

    Returns:
        Whether any does.
    """
    found = False
    for made in logits:
        head: Any = made
        while head.target in _VIEWS:
            head = head.args[0]
        if head.target in _PRODUCTS and head.users:  # else it runs in slices already, for another loss
            found |= _tile(graph, head)
    return found


def _tile(graph: torch.fx.Graph, head: Node) -> bool:
    cast: Any = head.args[-1]
    while cast.target is aten.t.default:
        cast = cast.args[0]
    if not casts(cast):
        return False
    spec = _spec(cast)
    if spec.device.type != "cpu" or spec.nbytes < 2 * least_bytes(spec.device):
        return False
    readers = [_Product.of_cast(path) for path in _readers(cast)]
    gradients = list(_weight_gradients(head, cast))
    products = [one for one in readers if one is not None]
    if len(products) < len(readers) or not _put_all(graph, products):
        return False
    for gradient in gradients:
        _put_all(graph, [gradient])
    return True


def _put_all(graph: torch.fx.Graph, products: Sequence[_Product]) -> bool:
    """Put chains in the places of products, if all have the bits of the whole; returns whether."""
    chains = [product.chain() for product in products]
    if not all(map(seen_to_be_exact, chains)):
        return False
    for product, chain in zip(products, chains, strict=True):
        made = product.ops[-1]
        put([made], [made], chain, list(product.inputs), [])
        erase_unread(graph, [made])
    return True


def _readers(cast: Node) -> Iterator[Sequence[Node]]:
    """The ways from a cast on to each op that reads it, transposed or as it is."""
    waiting = [[cast]]
    while waiting:
        way = waiting.pop()
        for user in way[-1].users:
            if user.target is aten.t.default:
                waiting.append([*way, user])
            else:
                yield [*way, user]


def _weight_gradients(head: Node, cast: Node) -> Iterator[_Product]:
    """Products that make the gradient of a head's weight, up to where they are cast."""
    hidden: Any = head.args[-2]
    for side in (hidden, *(user for user in hidden.users if user.target is aten.t.default)):
        for made in side.users:
            if made is head or made.target is not aten.mm.default or made.args[0] is made.args[1]:
                continue
            ops = [made]
            while (user := only(ops[-1].users)) is not None and user.target is aten.t.default:
                ops.append(user)
            if user is None or not casts(user) or user.meta["val"].numel() != cast.meta["val"].numel():
                continue
            left, right = made.all_input_nodes
            along = 0 if side is right else 1
            inputs = {left: None if along else 0, right: 1 if along else None}
            yield _Product([*ops, user], inputs, (along + len(ops) - 1) % 2)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product with the casts around it.

    Attributes:
        ops: in order; the last one makes the result.
        inputs: what they are given, and the dimension along which that is cut; ``None`` where all slices share it.
        along: the dimension along which the result is cut.
    """

    ops: Sequence[Node]
    inputs: Mapping[Node, int | None]
    along: int

    @classmethod
    def of_cast(cls, ops: Sequence[Node]) -> _Product | None:
        """A product with what is cast and then transposed, in slices of its columns; ``None`` for any other use of that."""
        *before, made = ops
        if made.target not in _PRODUCTS or made.kwargs:
            return None
        args: Any = made.args
        *bias, left, right = args
        if right is not before[-1] or right in (*bias, left):
            return None
        if any(one.meta["val"].shape != made.meta["val"].shape[1:] for one in bias):
            return None
        weight = before[0].all_input_nodes[0]
        return cls(ops, {**dict.fromkeys(bias, 0), left: None, weight: len(before) % 2}, 1)

    def chain(self) -> Chain:
        """The product over a grid of its columns, or rows."""
        program = torch.fx.Graph()
        values = {node: program.placeholder(f"given_{number}") for number, node in enumerate(self.inputs)}
        program.placeholder("cells")
        for number, node in enumerate(self.ops):
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = program.create_node("call_function", node.target, args, kwargs, name=f"made_{number}")
        program.output((values[self.ops[-1]],))
        result = _spec(self.ops[-1])
        cells = result.shape[self.along]
        return Chain(
            torch.fx.GraphModule({}, program),
            (cells,),
            tuple((_spec(node), Place((along,))) for node, along in self.inputs.items()),
            ((result, Place((self.along,))),),
            max(_spec(node).nbytes // cells for node in self.ops),
            least_cells=LEAST_COLUMNS,
        )


def _spec(node: Node) -> TensorSpec:
    return TensorSpec.of(node.meta["val"], hint)
