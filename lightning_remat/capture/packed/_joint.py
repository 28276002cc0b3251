"""Layers over packed sequences in the graphs that are captured: what is called there, and what is added to their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from lightning_remat.capture.packed._ops import FUNCTIONS, packed_layer
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
ops = torch.ops.lightning_remat


def call_packed(graph: torch.fx.Graph) -> None:
    """Call the functions of this module in the place of the ops that were traced."""
    for op, function in FUNCTIONS.items():
        for node in graph.find_nodes(op="call_function", target=op):
            node.target = function


def as_in_eager_mode(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """What Dynamo has captured, to be run without a plan: autograd goes through the layers themselves.

    Returns:
        A copy, or the module itself where nothing in it is packed.
    """
    if not any(node.target in FUNCTIONS for node in module.graph.nodes):
        return module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target is ops.recorded_layer.default:
            node.target = _unrecorded_layer
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    return torch.fx.GraphModule(module, graph)


def _unrecorded_layer(*args: Any) -> list[Any]:
    return [*packed_layer(*args[:-1]), None]


class AddedElsewhereError(CaptureError):
    """Gradients of a layer may be added to others outside of its graph, or are so that the layer cannot add them itself."""


def add_inside_layers(graph: torch.fx.Graph) -> None:
    """Have a layer's backward add its gradients to earlier ones of the same tensors, as where a layer is used twice.

    Eager mode adds the gradients of each time to what is there, one by one, and not their sum.

    Raises:
        AddedElsewhereError: where what is there depends on the layer's gradients.
    """
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        earlier, gradient = node.args[:2]
        if node.meta.get("is_gradient_acc") and is_layers_gradient(gradient):
            backward, position = gradient.args
            if len(gradient.users) > 1 or node.kwargs:
                raise AddedElsewhereError(
                    "the gradient of a recurrent layer over packed sequences is read before it is whole"
                )
            _move_after(backward, earlier)
            *others, before, to = backward.args
            backward.args = (*others, [*before, earlier], [*to, position])
            node.replace_all_uses_with(gradient)
            graph.erase_node(node)


def _move_after(node: torch.fx.Node, other: torch.fx.Node) -> None:
    """Move a node, and what depends on it, after another one that comes later and does not.

    Raises:
        AddedElsewhereError: where the other one does.
    """
    moved: dict[torch.fx.Node, None] = {node: None}
    one = node
    if not node < other:
        return
    while one is not other:
        one = one.next
        if not moved.keys().isdisjoint(one.all_input_nodes):
            moved[one] = None
    if other in moved:
        raise AddedElsewhereError(
            "gradients of a recurrent layer over packed sequences are added to what depends on them"
        )
    for one in reversed(moved):
        other.append(one)


def is_layers_gradient(value: Any) -> bool:
    """Whether a node of a joint graph is a gradient that `recorded_layer_backward` returns and that it has added up.

    That of the rows is not, where there is one direction: they are multiplied by weights at once.
    """
    source = value.args[0] if isinstance(value, torch.fx.Node) and value.args else None
    if not isinstance(source, torch.fx.Node) or source.target is not ops.recorded_layer_backward.default:
        return False
    *_, several, needed, _, _ = source.args
    return bool(several or value.args[1] or not needed[0])  # type: ignore[index]
