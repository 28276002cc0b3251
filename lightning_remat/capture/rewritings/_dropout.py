"""On the CPU, ``native_dropout`` becomes what eager does there: noise, and a product with it, forward and backward.

The noise (0 or `dropout_scale`, in the input's dtype) is made of a boolean mask. Only the mask is random. It has one
byte an element, a quarter of the noise's bytes in float32, and may be kept where the noise is not. On other devices the
fused kernel stays whole.

Where all is dropped, eager draws no numbers, and multiplies by a zero.

The generator gives a boolean mask the numbers that eager draws (`dropout_mask`), and the scale is rounded as eager rounds it
(`dropout_scale`).
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._sizes import size_node, symbols_among

aten = torch.ops.aten


def split_dropout(graph: torch.fx.Graph) -> None:
    """Make mask, noise and product of each dropout that drops on the CPU; of one that drops all, a product on any device."""
    symbols = symbols_among(graph)
    alike: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.native_dropout.default:
            continue
        x, p, train = node.args
        value = x.meta["val"]
        if train is False:
            continue
        if p == 1:
            _drop_all(graph, node)
            continue
        if value.device.type != "cpu":
            continue
        if id(value) not in alike:  # many a node has the same
            layout = torch.empty_like(value, dtype=torch.bool)
            alike[id(value)] = value, layout, torch.empty_like(layout, dtype=value.dtype)
        _, layout, dense = alike[id(value)]
        scale = _ops.dropout_scale(p, value.dtype)
        with graph.inserting_before(node):
            shape, stride = (
                tuple(size_node(graph, n, symbols) for n in sizes) for sizes in (layout.shape, layout.stride())
            )
            mask = graph.call_function(_ops.dropout_mask, (shape, stride, p, value.device))
            noise = graph.call_function(_ops.dropout_noise, (mask, value.dtype, scale))
            product = graph.call_function(aten.mul.Tensor, (x, noise))
        for new in (mask, noise, product):
            new.meta = {key: item for key, item in node.meta.items() if key not in ("val", "tensor_meta")}
        mask.meta["val"], product.meta["val"] = layout, node.meta["val"][0]
        noise.meta["val"] = dense
        for use in list(node.users):
            use.replace_all_uses_with(product if use.args[1] == 0 else mask)
            graph.erase_node(use)
        graph.erase_node(node)
        for use in list(mask.users):
            if use.target is aten.native_dropout_backward.default and use.args[1] is mask:
                use.target, use.args = aten.mul.Tensor, (use.args[0], noise)
            elif (
                use.target is aten._to_copy.default
            ):  # in a backward that is differentiated again, AOTAutograd writes the noise as (mask as numbers) * scale
                for product in list(use.users):
                    if product.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(product.args[1], float):
                        product.update_arg(1, scale)


def _drop_all(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Make a product with zero of a dropout, and of its backward."""
    x: torch.fx.Node = node.args[0]  # type: ignore[assignment]
    value = x.meta["val"]
    with graph.inserting_before(node):
        zero = graph.call_function(aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device})
        product = graph.call_function(aten.mul.Tensor, (x, zero))
    for new in (zero, product):
        new.meta = {key: item for key, item in node.meta.items() if key not in ("val", "tensor_meta")}
    zero.meta["val"], product.meta["val"] = value.new_empty(()), node.meta["val"][0]
    for item in list(node.users):
        for use in list(item.users) if item.args[1] == 1 else ():
            if use.target is aten.native_dropout_backward.default:
                use.target, use.args = aten.mul.Tensor, (use.args[0], zero)
        item.replace_all_uses_with(product if item.args[1] == 0 else zero)
        graph.erase_node(item)
    graph.erase_node(node)
