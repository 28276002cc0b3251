"""The order in which eager mode has the gradients of a step's parameters.

`DistributedDataParallel` lays gradients into buckets in the order in which they were there in its first step, and a sum over
more than two processes depends on where in a bucket a number lies. A captured graph returns its gradients all at once, and
autograd would go on with them in an order of its own. So each parameter is handed in through a view (`HandedOut.inputs`), and
the views are made such that autograd comes to them in eager's order: the one that was made last first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from lightning_remat.capture._torch import argument_of


def gradient_order(graph: torch.fx.Graph, num_fwd_outputs: int) -> tuple[int, ...]:
    """Positions of the arguments that get gradients, in the order in which a joint graph computes these, as autograd ran it."""
    output = graph.output_node()
    results: Any = output.args[0]
    descriptions = list(output.meta.get("desc") or [])
    place = {node: number for number, node in enumerate(graph.nodes)}
    found = [
        (place[node], argument)
        for node, described in zip(results[num_fwd_outputs:], descriptions[num_fwd_outputs:], strict=False)
        if isinstance(node, torch.fx.Node) and (argument := argument_of(described)) is not None
    ]
    return tuple(argument for _, argument in sorted(found))
