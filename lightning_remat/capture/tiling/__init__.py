"""Another form of a joint graph: with what can be computed in slices, whose parts know nothing of one another.

* ``_losses``: cross entropy in slices of rows, which sums in eager's order.
* ``_heads``: the products around a loss's logits, whose weight is cast slice by slice.
* ``_chains`` finds other chains of ops that can run so, forward and backward, and ``_rules`` says which ops can.
* ``_sliced`` runs a chain.

Nothing of this changes a bit. No solver or simulator knows slices: a chain is one op, whose workspace is a slice's.
"""

from __future__ import annotations

import enum

import torch.fx

from lightning_remat.capture.tiling._chains import tile_chains
from lightning_remat.capture.tiling._heads import tile_heads
from lightning_remat.capture.tiling._losses import tile_losses


class Tiling(enum.Enum):
    """What of a step is computed in slices."""

    LOSSES = "losses"
    HEADS = "heads"
    CHAINS = "chains"

    def of(self, graph: torch.fx.Graph) -> bool:
        """Have what can be so computed in slices in a joint graph; returns whether there is any.

        ``LOSSES`` takes no longer than the ops do, and is of the same ops at any batch size; ``HEADS``, losses among them,
        takes a little longer; ``CHAINS``, both among them, computes a chain's forward a second time in the backward.
        """
        logits = tile_losses(graph)
        if self is Tiling.LOSSES:
            return bool(logits)
        heads = tile_heads(graph, logits)
        return heads if self is Tiling.HEADS else tile_chains(graph)


__all__ = ["Tiling"]
