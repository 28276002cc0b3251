"""The gradient of a tensor that a mask fills in (``x.masked_fill(mask, value)``) is the sum of the chosen elements alone.

So eager mode computes it. torch traces a sum over all elements, with zeros in the place of the others, which adds up in
another order.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture._torch import runs_in_forward

aten = torch.ops.aten


def sum_of_chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the elements of ``x`` that ``mask`` chooses."""
    return x.masked_select(mask).sum()


def add_up_what_was_filled(graph: torch.fx.Graph) -> None:
    """Put eager's sum in the place of that in the gradient of each filled-in value."""
    filled = {node.meta.get("seq_nr") for node in graph.find_nodes(op="call_function", target=aten.masked_fill.Tensor)}
    for node in graph.find_nodes(op="call_function", target=aten.sum.default) if filled else ():
        (chosen,) = node.args
        if node.meta.get("seq_nr") not in filled or runs_in_forward(node) or not isinstance(chosen, torch.fx.Node):
            continue
        if chosen.target is aten.where.self and chosen.meta.get("seq_nr") == node.meta.get("seq_nr"):
            mask, gradient, _zero = chosen.args
            node.target, node.args = sum_of_chosen, (gradient, mask)
