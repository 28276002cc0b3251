"""Some losses keep the storage of their unreduced values: the caller would hold that through the backward.

Their result is copied to a storage of its own size (`compact`).
"""

from __future__ import annotations

import torch.fx

from lightning_remat.capture import _ops


def compact_losses(graph: torch.fx.Graph) -> None:
    """Put each such loss on a storage of its own size."""
    for node in graph.nodes:
        if node.op == "call_function" and _ops.is_padded(node.target) and node.meta["val"].dim() == 0:
            node.target = _ops.compact(node.target)
