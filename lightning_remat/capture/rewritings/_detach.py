"""``detach`` nodes are dropped: nothing differentiates through a joint graph, and a detached tensor is its input.

One that is returned stays: as an output, it is another tensor on its input's memory.
"""

from __future__ import annotations

import torch
import torch.fx

aten = torch.ops.aten


def drop_detach(graph: torch.fx.Graph) -> None:
    """Put its input in the place of each detach, but where that is returned."""
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.detach.default:
            source = node.args[0]
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user is not output)
            if not node.users:
                graph.erase_node(node)
