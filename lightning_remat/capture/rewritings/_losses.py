"""Losses whose scalar result lies on the storage of their unreduced values are copied to a storage of its own size.

The caller would hold the large storage through the backward, with the loss.
"""

from __future__ import annotations

import torch.fx

from lightning_remat.capture import _ops


def compact_losses(graph: torch.fx.Graph) -> None:
    """Put each such loss on a storage of its own size (see `compact`)."""
    for node in graph.nodes:
        if node.op == "call_function" and _ops.is_padded(node.target) and node.meta["val"].dim() == 0:
            node.target = _ops.compact(node.target)
