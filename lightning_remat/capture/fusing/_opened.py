"""Layer norm as the ops that it is made of, for runs that need not have eager's numbers: these are fused with what is around.

Half precision is computed in single precision, as torch's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._torch import real_tensors
from lightning_remat.capture.fusing._rules import HALVES

aten = torch.ops.aten
Node = torch.fx.Node


def open_layer_norms(graph: torch.fx.Graph) -> None:
    """Put ops of one result each in the place of layer norms and their gradients."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _OPENED:
            continue
        with graph.inserting_before(node):
            made = _OPENED[node.target](_Writer(node), *node.args)
        for item in list(node.users):
            item.replace_all_uses_with(made[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


class _Writer:
    """Writes ops in the place of another one, with its notes.

    Args:
        node: that one.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta", "from_node")}
        self.dtypes = [one if one is None else one.dtype for one in node.meta["val"]]

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """The node of an op."""
        made = self.node.graph.call_function(op, args, kwargs)
        with real_tensors():
            made.meta = {**self.meta, "val": op(*torch.fx.node.map_arg(args, lambda one: one.meta["val"]), **kwargs)}
        return made

    def single(self, node: Node) -> Node:
        """A tensor in the precision that is computed in."""
        return self.cast(node, torch.float32) if node.meta["val"].dtype in HALVES else node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """A tensor in a dtype."""
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype)

    def results(self, *made: Node | None) -> list[Node | None]:
        """The op's results, in its dtypes."""
        pairs = zip(made, self.dtypes, strict=True)
        return [None if one is None or dtype is None else self.cast(one, dtype) for one, dtype in pairs]


def _forward(
    write: _Writer, x: Node, shape: Sequence[int], weight: Node | None, bias: Node | None, eps: float
) -> list[Node | None]:
    dims, x = [*range(-len(shape), 0)], write.single(x)
    mean = write(aten.mean.dim, x, dims, True)
    less = write(aten.sub.Tensor, x, mean)
    variance = write(aten.mean.dim, write(aten.mul.Tensor, less, less), dims, True)
    rstd = write(aten.rsqrt.default, write(aten.add.Tensor, variance, eps))
    result = write(aten.mul.Tensor, less, rstd)
    if weight is not None:
        result = write(aten.mul.Tensor, result, write.single(weight))
    if bias is not None:
        result = write(aten.add.Tensor, result, write.single(bias))
    return write.results(result, mean, rstd)


def _backward(
    write: _Writer,
    grad: Node,
    x: Node,
    shape: Sequence[int],
    mean: Node,
    rstd: Node,
    weight: Node | None,
    _bias: Node | None,
    wanted: Sequence[bool],
) -> list[Node | None]:
    dims, rows = [*range(-len(shape), 0)], [*range(x.meta["val"].dim() - len(shape))]
    grad, x, mean, rstd = map(write.single, (grad, x, mean, rstd))
    normal = write(aten.mul.Tensor, write(aten.sub.Tensor, x, mean), rstd)
    found: list[Node | None] = [None, None, None]
    if wanted[0]:
        scaled = grad if weight is None else write(aten.mul.Tensor, grad, write.single(weight))
        along = write(aten.mean.dim, write(aten.mul.Tensor, scaled, normal), dims, True)
        less = write(aten.sub.Tensor, scaled, write(aten.mean.dim, scaled, dims, True))
        found[0] = write(aten.mul.Tensor, write(aten.sub.Tensor, less, write(aten.mul.Tensor, normal, along)), rstd)
    if wanted[1]:
        product = write(aten.mul.Tensor, grad, normal)
        found[1] = write(aten.sum.dim_IntList, product, rows) if rows else product
    if wanted[2]:
        found[2] = write(aten.sum.dim_IntList, grad, rows) if rows else grad
    return write.results(*found)


_OPENED: dict[Any, Callable[..., list[Node | None]]] = {
    aten.native_layer_norm.default: _forward,
    aten.native_layer_norm_backward.default: _backward,
}
