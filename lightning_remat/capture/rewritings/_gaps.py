"""Ops that were traced with gaps between the rows of their results give such results (see `spaced_results`).

Eager's kernels go from row to row there, and compute the last elements of each in another way: in a dense result, those would
have other bits.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _ops, _overwriting
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._sizes import size_node, symbols_among


def leave_gaps(graph: torch.fx.Graph) -> None:
    """Have each op whose result has gaps write it to memory of that shape and those strides (`spaced`)."""
    symbols = symbols_among(graph)
    whole: dict[int, bool] = {}  # nodes hold their values
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if _ops.is_view(node.target):
            continue
        if id(value) not in whole:
            whole[id(value)] = TensorSpec.of(value, internals.hint).whole
        if whole[id(value)]:
            continue
        form = _overwriting.overwriting(node.target, -1, value.device.type)
        if node.target is torch.ops.aten.clone.default:
            form = torch.ops.aten.clone.out, "out"
        if form is None:
            continue
        with graph.inserting_before(node):
            sizes = tuple(tuple(size_node(graph, n, symbols) for n in one) for one in (value.shape, value.stride()))
        node.args = (*sizes, value.dtype, value.device, *node.args)
        node.target = _ops.spaced(node.target, *form)
