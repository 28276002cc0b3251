"""Backwards of ``autograd.Function`` that are differentiated themselves, in a step that asks for gradients with a graph.

Dynamo captures a function's backward as it is without gradients, so that AOTAutograd, and whatever else runs the graph, takes
the gradients that it returns for constants: a gradient penalty, or a force, through such a function would have wrong
gradients. Here the backward is as autograd calls it: gradients are enabled in it where it is to be differentiated, but for
what it computes under ``torch.no_grad()``. A function that it calls is inlined, and has no backward of its own then: a graph
that may differentiate such a backward is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from lightning_remat.capture._torch import DIFFERENTIATE, GRAD_MODE, INLINED_FUNCTION, set_grad_enabled

Node = torch.fx.Node


def is_differentiable(module: torch.fx.GraphModule) -> bool:
    """Whether the backwards of functions that a graph of Dynamo's calls can be differentiated."""
    switches = (
        node for one in _backwards(module) for node in one.graph.find_nodes(op="call_function", target=set_grad_enabled)
    )
    return not any(INLINED_FUNCTION in node.meta for node in switches)


def differentiates(module: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's computes gradients, which it may differentiate."""
    return any(node.target in DIFFERENTIATE for one in _graphs(module) for node in one.graph.nodes)


def differentiable_backwards(module: torch.fx.GraphModule) -> None:
    """Have what a graph of Dynamo's calls as a function's backward run with gradients, or without, as it is called.

    Args:
        module: the graph; it is changed in place.
    """
    for backward in _backwards(module):
        switches = backward.graph.find_nodes(op="call_function", target=set_grad_enabled)
        if len(switches) < 2 or (switches[0].args, switches[-1].args) != ((False,), (True,)):
            continue
        before: dict[int, Node] = {}
        for switch in switches[1:-1]:
            _as_it_was(switch, before)
        for switch in (switches[0], switches[-1]):  # around the whole backward
            backward.graph.erase_node(switch)
        backward.recompile()


def _as_it_was(switch: Node, before: dict[int, Node]) -> None:
    """Have a switch at the end of a region set what was set before the region, when the graph runs.

    Args:
        switch: a switch in a backward.
        before: what was set before the regions that are entered already, by the region.
    """
    region, leaves = switch.meta.get(GRAD_MODE, (None, False))
    if region is None:
        return
    if leaves and region in before:
        switch.args = (before[region],)
    elif not leaves:
        with switch.graph.inserting_before(switch):
            before[region] = switch.graph.call_function(torch.is_grad_enabled)


def _graphs(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    return (one for one in module.modules() if isinstance(one, torch.fx.GraphModule))


def _backwards(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    for one in _graphs(module):
        for call in one.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
            backward = one.get_submodule(call.args[1].target)
            if isinstance(backward, torch.fx.GraphModule):
                yield backward
