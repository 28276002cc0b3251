"""Another form of a joint graph: runs of ops between matrix products are one compiled kernel each.

* ``_rules`` says which ops may be in a run, and ``_forms`` how some are written for the compiler.
* Where numbers may differ, ``_opened`` writes layer norm and batch norm as the ops that they are made of, and ``_spread`` sums
  at places in a grid as matrix products.
* ``_runs`` finds the runs, and puts a function in the place of each.
* ``_fused`` is a run as such a function: compiled by Inductor, and compared with its ops.

No solver or simulator knows of this: a run is one op with several results.
"""

from __future__ import annotations

import enum

import torch.fx

from lightning_remat.capture.fusing._runs import fuse_runs


class Fusing(enum.Enum):
    """How closely fused runs keep to eager mode's numbers."""

    EXACT = "exact"
    FAST = "fast"

    def of(self, graph: torch.fx.Graph, num_fwd_outputs: int) -> bool:
        """Have runs of a joint graph be one op each; returns whether there are any.

        ``EXACT`` takes runs whose kernel has the bits of their ops; ``FAST`` takes any.
        """
        return fuse_runs(graph, num_fwd_outputs, exact=self is Fusing.EXACT)


__all__ = ["Fusing"]
