"""A convolution's backward becomes two calls: the gradients of its weights, and then that of its input.

The kernels behind it are two in any case, and give the same bits alone. Together they hold the input, its gradient and
that of the output at once, the largest working set of most convolutional networks; apart, the input is freed between.
"""

from __future__ import annotations

import torch
import torch.fx

aten = torch.ops.aten


def split_convolution_backward(graph: torch.fx.Graph) -> None:
    """Make two calls of each convolution backward that computes both."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.convolution_backward.default:
            continue
        for_input, *for_weights = node.args[10]
        if not for_input or not any(for_weights):
            continue
        with graph.inserting_before(node):
            weights = graph.call_function(node.target, (*node.args[:10], [False, *for_weights]))
            data = graph.call_function(node.target, (*node.args[:10], [True, False, False]))
        weights.meta, data.meta = ({**node.meta, "remat_half": node.name} for _half in range(2))
        weights.meta["val"], data.meta["val"] = (None, *node.meta["val"][1:]), (node.meta["val"][0], None, None)
        for item in list(node.users):
            item.update_arg(0, data if item.args[1] == 0 else weights)
        graph.erase_node(node)
