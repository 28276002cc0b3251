"""The nodes of a joint graph in an order in which each comes after all that it reads."""

from __future__ import annotations

import itertools

import torch.fx

from lightning_remat.capture import _effects

Node = torch.fx.Node


def sort(graph: torch.fx.Graph) -> bool:
    """Put nodes that are read before they are computed where they are needed first; all others stay in order.

    So do random ops, and those with effects, among each other; returns whether they can.
    """
    needed = {node: list(node.all_input_nodes) for node in graph.nodes}
    kept = [node for node in graph.nodes if _effects.keeps_its_place(node)]
    for earlier, later in itertools.pairwise(kept):
        needed[later].append(earlier)
    placed: dict[Node, None] = {}
    for node in graph.nodes:
        waiting, begun = [node], set[Node]()
        while waiting:
            missing = [one for one in needed[waiting[-1]] if one not in placed]
            if missing and waiting[-1] in begun:
                return False
            begun.add(waiting[-1])
            if missing:
                waiting += missing
            else:
                placed[waiting.pop()] = None
    end = graph.output_node()
    for node in placed:
        if node.op not in ("placeholder", "output"):
            end.prepend(node)
    return True
