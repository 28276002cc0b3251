"""Sizes that are read off a tensor are computed from symbols among the primals: the tensor is not kept for them."""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture._sizes import size_node, symbols_among


def sizes_from_symbols(graph: torch.fx.Graph) -> None:
    """Compute each number that is read off a tensor from the symbols."""
    symbols = symbols_among(graph)
    for node in list(graph.nodes):
        number = node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymInt, int))
        if number and any(is_tensor(source) for source in node.all_input_nodes):
            with graph.inserting_before(node):
                node.replace_all_uses_with(size_node(graph, node.meta["val"], symbols))
            graph.erase_node(node)
