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
from torch.fx import Node

from lightning_remat.capture._nodes import producer
from lightning_remat.capture._ops import is_view
from lightning_remat.capture._torch import argument_of
from lightning_remat.capture.gradients._sums import forward_ops


def gradient_order(graph: torch.fx.Graph, num_fwd_outputs: int) -> tuple[int, ...]:
    """Positions of the arguments that get gradients, in the order in which a joint graph computes these, as autograd ran it.

    Of the gradients that one op's backward computes, autograd goes on with that of the op's first input first.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    descriptions = list(output.meta.get("desc") or [])
    primals = {argument_of(node.meta.get("desc")): node for node in graph.find_nodes(op="placeholder")}
    forward = forward_ops(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    # By autograd's number for an op, the place of the first gradient that its backward computes.
    first: dict[Any, int] = {}
    found: list[tuple[Any, int, int, int]] = []
    for node, described in zip(results[num_fwd_outputs:], descriptions[num_fwd_outputs:], strict=False):
        argument = argument_of(described)
        if argument is None or not isinstance(node, Node):
            continue
        added_up = node.meta.get("is_gradient_acc") or node.meta.get("seq_nr") is None
        key = node if added_up else node.meta["seq_nr"]
        inputs = [one for op in forward.get(node.meta.get("seq_nr"), ()) for one in op.all_input_nodes]
        primal = primals.get(argument)
        among = inputs.index(primal) if primal in inputs else len(inputs)
        first[key] = min(first.get(key, place[node]), place[node])
        found.append((key, among, place[node], argument))
    return tuple(argument for *_, argument in sorted(found, key=lambda one: (first[one[0]], *one[1:])))


def without_gradients(graph: torch.fx.Graph, num_fwd_outputs: int) -> frozenset[int]:
    """Positions of the arguments that no output of a joint graph's forward depends on: they get no gradient from it.

    Those of which a view is handed out are not among them: AOTAutograd makes that view outside of the graph, and their gradient
    comes through it.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    descriptions = list(output.meta.get("desc") or [])[num_fwd_outputs:]
    found = {
        argument_of(one) for node, one in zip(results[num_fwd_outputs:], descriptions, strict=False) if node is None
    }
    handed_out = {
        argument_of(_viewed(one).meta.get("desc")) for one in results[:num_fwd_outputs] if isinstance(one, Node)
    }
    return frozenset(argument for argument in found - handed_out if argument is not None)


def _viewed(node: Node) -> Node:
    """What a node is a view of, with a gradient; the node itself where it is none."""
    node = producer(node)
    while is_view(node.target) and node.target is not torch.ops.aten.detach.default:
        node = producer(node.args[0])  # type: ignore[arg-type]
    return node
