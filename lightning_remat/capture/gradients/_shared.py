"""Gradients that share memory, as they come to autograd: two parameters that are added have one gradient, which is made once.

Autograd keeps a gradient as it is where nothing else refers to it, and copies it otherwise. A view of a gradient looks like one
that nothing else refers to. So a parameter whose gradient is no view in eager mode is given none either, and is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture._torch import argument_of


def shared_gradients(graph: torch.fx.Graph, num_fwd_outputs: int, order: Sequence[int]) -> frozenset[int]:
    """Positions of the arguments with a gradient in a joint graph, no view itself, in whose memory others lie too.

    The last of them in this order is not one, if nothing else reads the gradient: autograd does not copy it.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    descriptions = list(output.meta.get("desc") or [])
    gradients = [
        (argument, node)
        for node, described in zip(results[num_fwd_outputs:], descriptions[num_fwd_outputs:], strict=False)
        if isinstance(node, Node) and (argument := argument_of(described)) is not None
    ]
    made = Counter(source_of(node) for _, node in gradients)
    nodes = dict(gradients)
    last = {source_of(nodes[argument]): argument for argument in order if argument in nodes}
    return frozenset(
        argument
        for argument, node in gradients
        if made[node] > 1 and not is_view(node) and (last.get(node) != argument or _is_read(node))
    )


def _is_read(gradient: Node) -> bool:
    """Whether anything but views and the graph's outputs reads it."""
    return any(user.op != "output" and not is_view(user) for user in gradient.users)


def source_of(node: Node) -> Node:
    """What a node is a view of, or the node itself."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: Node) -> bool:
    """Whether a node is a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and may_lie_in(node)


def may_lie_in(node: Node) -> bool:
    """Whether a node's result may lie in the memory of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is torch.ops.aten._unsafe_view.default:  # its schema does not say so
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(one.alias_info is not None for one in schema.returns)


def handed_in(parameter: torch.Tensor, shared: bool) -> torch.Tensor:
    """A parameter behind a node of its own in autograd's graph; ``shared`` where its gradient shares memory."""
    apply: Any = _Shared.apply
    return apply(parameter) if shared else parameter.view_as(parameter)


class _Shared(torch.autograd.Function):
    """The identity; its gradient is referred to as long as the graph is there, so that autograd copies what it keeps."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        ctx.gradient = gradient
        return gradient
