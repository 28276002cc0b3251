"""The order in which an unscheduled step runs the ops of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _effects, _ops
from lightning_remat.capture._nodes import module_path, producer
from lightning_remat.capture.rewritings._unread import stand_in
from lightning_remat.errors import CaptureError
from lightning_remat.graph import Phase

Node = torch.fx.Node


def execution_order(
    graph: torch.fx.Graph, tangents: Sequence[Node], forward_outputs: Sequence[Any], backward_outputs: Sequence[Any]
) -> list[tuple[Node, Phase]]:
    """Nodes in the order in which an unscheduled step runs them.

    The joint graph lists forward-side ops that only the backward needs (views, transposes) early. Forward are the ops
    that a forward output needs, and those that draw random numbers or have effects before the backward begins; the
    backward is driven by the ops that depend on a tangent and those that draw or have effects there, and all the others
    come right before the first one that needs them. What follows the last forward op of a module is the loss's phase.

    Raises:
        CaptureError: where a forward output depends on a tangent, or the backward writes to an input (AOTAutograd leaves that
            in place, and no output depends on it).
    """
    if any(n.op == "call_function" and not n.users and _ops.mutates(n.target) for n in graph.nodes):
        raise CaptureError(
            "its backward writes to what the step reads (in a hook on a tensor, or in a function with a backward of its own)"
        )
    needed: set[Node] = set()
    stack = [n for n in (*forward_outputs, *backward_outputs) if isinstance(n, Node)]
    in_order = [n for n in graph.nodes if _effects.keeps_its_place(n)]
    stack += in_order
    drivers = set(in_order)
    later = _effects.run_in_backward(graph)
    forward_needs: set[Node] = set()
    depends: set[Node] = set(tangents)
    for node in graph.nodes:
        if node.op == "call_function" and any(source in depends for source in node.all_input_nodes):
            depends.add(node)
    drivers |= depends
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    stack = [n for n in forward_outputs if isinstance(n, Node)]
    stack += [n for n in in_order if n not in depends and n not in later]
    while stack:
        node = stack.pop()
        if node not in forward_needs:
            forward_needs.add(node)
            stack.extend(node.all_input_nodes)
    if forward_needs & depends:
        name = next(iter(forward_needs & depends)).name
        raise CaptureError(f"the forward output {name} depends on the gradient of the loss")
    body = [n for n in graph.nodes if n in needed and n.op == "call_function" and _computes(n)]
    forward = [n for n in body if n in forward_needs]
    last_module = max((i for i, n in enumerate(forward) if module_path(n)), default=len(forward))
    order = [(n, Phase.LOSS if i > last_module else Phase.FORWARD) for i, n in enumerate(forward)]
    placed = set(forward)
    for driver in body:
        if driver not in drivers:
            continue
        stack = [driver]
        while stack:
            node = stack[-1]
            missing = [
                source
                for source in map(producer, node.all_input_nodes)
                if source.op == "call_function" and _computes(source) and source not in placed
            ]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if node not in placed:
                placed.add(node)
                order.append((node, Phase.BACKWARD))
    for node in body:  # gradients that do not depend on the tangents (constant ones)
        if node not in placed:
            placed.add(node)
            order.append((node, Phase.BACKWARD))
    return order


def _computes(node: Node) -> bool:
    """Whether a node is an op of the schedule: it makes tensors, or has an effect.

    Sizes, items of tuples (``getitem``) and tensors without memory (`stand_in`) are made where they are used.
    """
    made = isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) or _effects.has_effects(node)
    return made and node.target not in (operator.getitem, stand_in)
