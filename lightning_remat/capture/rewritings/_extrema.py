"""The gradient of an extremum or median over all elements (``x.max()``) has eager's zeros, on the CPU.

Eager mode writes the gradient's share to zeros, where an element is the one that was found. torch traces a product with the
mask instead, whose zeros are negative where the gradient is, and not a number where it is infinite. (So does eager mode on
other devices.)
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture._torch import runs_in_forward
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
Node = torch.fx.Node

_EXTREMA = (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default)


def leave_zeros_beside_extrema(graph: torch.fx.Graph) -> None:
    """Put eager's zeros in the place of the products in the gradient of each extremum.

    Raises:
        CaptureError: where it is of elements that lie transposed or with gaps: eager's gradient lies without.
    """
    found = {
        node.meta.get("seq_nr"): node
        for op in _EXTREMA
        for node in graph.find_nodes(op="call_function", target=op)
        if node.meta["val"].device.type == "cpu"
    }
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor) if found else ():
        extremum = found.get(node.meta.get("seq_nr"))
        if extremum is None or runs_in_forward(node) or not _is_shared_out(*node.args):
            continue
        if not node.meta["val"].is_contiguous():
            raise CaptureError(f"eager mode lays out the gradient of {extremum.name} otherwise than it was traced")
        mask, share = node.args
        value = node.meta["val"]
        with graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": value.device}
            zero = graph.call_function(aten.full.default, ([], 0.0), options)
        zero.meta = {**node.meta, "val": value.new_empty(())}
        node.target, node.args = aten.where.self, (mask, share, zero)


def _is_shared_out(mask: object, share: object) -> bool:
    """Whether ``share`` is something divided by the number of elements that ``mask`` has."""
    if not (isinstance(mask, Node) and isinstance(share, Node)) or mask.meta["val"].dtype != torch.bool:
        return False
    count = share.args[1] if share.target is aten.div.Tensor else None
    return isinstance(count, Node) and count.target is aten.sum.default and count.args[0] is mask
