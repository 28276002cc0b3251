"""What a step makes on the host of constants alone, and copies to the device, is kept on the device, and copied there.

``torch.tensor([1.0, 2.0], device="cuda")``, ``torch.arange(8).to(x.device)``: eager mode makes them anew in each step, which
waits for the copy, and for which no CUDA graph can be recorded. Factories, views, copies and elementwise ops have the same bits
each time; sums may depend on the number of threads, and stay as they are, with what reads other memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture._torch import real_tensors

aten = torch.ops.aten

MOST_BYTES = 2**20
"""Larger ones would be held between steps, for a wait that is short beside the time that the copy takes."""

_MADE = frozenset(
    {
        aten.lift_fresh_copy.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full.default,
        aten.ones.default,
        aten.zeros.default,
        aten.eye.default,
        aten.eye.m,
        aten.linspace.default,
        aten.scalar_tensor.default,
        aten.view.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.cat.default,
        aten.repeat.default,
        aten.flip.default,
        aten.tril.default,
        aten.triu.default,
        aten.cumsum.default,  # one after the other, however many threads there are
    }
)


def constants_on_their_device(graph: torch.fx.Graph) -> None:
    """Put a copy of a constant that lies on the device in the place of each copy of one from the host."""
    if not any(map(_leaves_the_host, graph.find_nodes(op="call_function", target=aten._to_copy.default))):
        return
    module: Any = graph.owning_module
    found: dict[torch.fx.Node, torch.Tensor] = {}  # what is made of constants, in the host's memory
    for node in list(graph.nodes):
        if node.op == "get_attr":  # a literal, where it is lifted; else it may be the user's, who may write to it
            constant = getattr(module, str(node.target), None)
            lifted = all(user.target is aten.lift_fresh_copy.default for user in node.users)
            if isinstance(constant, torch.Tensor) and constant.device.type == "cpu" and lifted:
                found[node] = constant
        elif node.op == "call_function" and is_tensor(node) and _is_constant(node, found):
            value = _computed(node, found)
            if value.device.type == "cpu":
                found[node] = value
            elif value.stride() == node.meta["val"].stride():
                _replace(graph, node, value)
    for node in reversed(found):
        if not node.users:
            graph.erase_node(node)


def _leaves_the_host(node: torch.fx.Node) -> bool:
    source: Any = node.args[0]
    return source.meta["val"].device.type == "cpu" != node.meta["val"].device.type  # type: ignore[no-any-return]


def _is_constant(node: torch.fx.Node, found: dict[torch.fx.Node, torch.Tensor]) -> bool:
    target: Any = node.target
    tags = getattr(target, "tags", ())
    if (target not in _MADE and torch.Tag.pointwise not in tags) or torch.Tag.nondeterministic_seeded in tags:
        return False
    value = node.meta["val"]
    if value.device.type != "cpu" and target is not aten._to_copy.default:
        return False
    if not all(isinstance(size, int) for size in value.shape) or value.nbytes > MOST_BYTES:
        return False
    return all(one in found for one in node.all_input_nodes)


def _computed(node: torch.fx.Node, found: dict[torch.fx.Node, torch.Tensor]) -> torch.Tensor:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
    target: Any = node.target
    with real_tensors(), torch.no_grad(), torch.autocast("cpu", enabled=False):  # the trace has made its casts
        value: torch.Tensor = target(*args, **kwargs)
    return value


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, value: torch.Tensor) -> None:
    module: Any = graph.owning_module
    name = f"_constant_of_{node.name}"
    module.register_buffer(name, value)
    with graph.inserting_before(node):
        constant = graph.get_attr(name)
        constant.meta["val"] = value
        copy = graph.call_function(aten.clone.default, (constant,))
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    graph.erase_node(node)
