"""Regions that the user has marked with ``torch.compiler.nested_compile_region`` are inlined, and planned as all else.

Such a region may be each block of a deep network. Dynamo captures blocks that are alike once, and hands each over as a
call of the same graph. AOTAutograd would keep the calls whole, and nothing inside could be rematerialized: here each
call becomes the ops of that graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx

Node = torch.fx.Node


def inline_regions(module: torch.fx.GraphModule) -> None:
    """Put the ops of every marked region in the place of its call, regions inside regions too.

    Module paths (``nn_module_stack``) become those of the block that is called: the graph has those of the first one.

    Args:
        module: what Dynamo has captured; it is changed in place.
    """
    for inner in module.children():  # bodies of regions, of checkpoints and of other ops that call a graph
        if isinstance(inner, torch.fx.GraphModule):
            inline_regions(inner)
    graph = module.graph
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is torch.ops.higher_order.invoke_subgraph]
    for call in calls:
        attribute, _identifier, *operands = call.args
        results = _copied(module.get_submodule(attribute.target), attribute.target, operands, call)
        for use in list(call.users):
            assert use.target is operator.getitem, f"{use} takes a region's results all at once"
            use.replace_all_uses_with(results[use.args[1]])
            graph.erase_node(use)
        graph.erase_node(call)
        if not attribute.users:
            graph.erase_node(attribute)
    if calls:
        module.recompile()


def _copied(body: torch.nn.Module, name: str, operands: list[Any], call: Node) -> Any:
    """Copy the ops of a region's body to before its ``call``; returns the body's results."""
    assert isinstance(body, torch.fx.GraphModule)
    values: dict[Node, Any] = {}
    given = iter(operands)
    with call.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op != "output":
                copy = values[node] = call.graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    copy.target = f"{name}.{node.target}"
                copy.meta["nn_module_stack"] = _stack_in(call, node)
    return torch.fx.map_arg(body.graph.output_node().args[0], values.__getitem__)


def _stack_in(call: Node, node: Node) -> dict[str, Any]:
    """The ``nn_module_stack`` of a region's node, for the block that calls the region."""
    around, inside = (
        dict(call.meta.get("nn_module_stack") or {}),
        list((node.meta.get("nn_module_stack") or {}).items()),
    )
    if not around or len(inside) < len(around):
        return around or dict(inside)
    here = list(around.values())[-1][0]
    captured_in = inside[len(around) - 1][1][0]
    deeper = inside[len(around) :]
    return around | {key: (here + path.removeprefix(captured_in), kind) for key, (path, kind) in deeper}
