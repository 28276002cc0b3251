"""Gradients of views that a part of a step reads and hands on, added up in eager's order.

Autograd adds up at a view what its uses give, and hands the sum on to what it is a view of. AOTAutograd makes a view that a
captured part returns anew outside of it, from what it is a view of: what later parts give to the view would get there on its
own, and not be added first to what the part itself gives to the view. So a part has one output more for each such view, a
*port*, of the same values and no memory. Nobody reads it, and the view's own gradient is handed to the part as the port's.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture import _torch as internals


def hands_on_views_alone(module: torch.fx.GraphModule) -> bool:
    """Whether all that gradients come to in a part are views of its arguments: it has nothing to save, and needs no ports."""
    storages = {_storage(node) for node in module.graph.find_nodes(op="placeholder")} - {None}
    made = []
    for one in module.graph.output_node().all_input_nodes:
        value = one.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad and one.op != "placeholder":
            made.append(_storage(one) in storages and _is_differentiable_view(one))
    return bool(made) and all(made)


def with_ports(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """What Dynamo has captured, with a port for each view among its outputs that needs one; the positions of these outputs.

    The module itself where none does.
    """
    outputs: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    examples = [one.meta.get("example_value") for one in module.graph.output_node().all_input_nodes]
    if any(isinstance(one, torch.Tensor) and not isinstance(one, internals.FakeTensor) for one in examples):
        return module, ()  # a tensor subclass has several tangents
    storages = {node: storage for node in module.graph.nodes if (storage := _storage(node)) is not None}
    inputs = {storages[node] for node in module.graph.find_nodes(op="placeholder") if node in storages}
    counts = Counter(storages[one] for one in outputs if one in storages)
    read = {
        storages[source]
        for node in module.graph.nodes
        for source in node.all_input_nodes
        if node.op != "output" and source in storages and storages.get(node) != storages[source]
    }
    views = []
    for position, one in enumerate(outputs):
        storage = _storage(one)
        if storage is None or one.op == "placeholder" or not _is_differentiable_view(one):
            continue
        together = counts[storage] + (storage in inputs)
        if together > 2 or (together == 2 and storage in read):
            views.append(position)
    if not views:
        return module, ()
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copied)
    ports = []
    for position in views:
        one = outputs[position]
        shape = graph.call_method("size", (copied[one],))
        ports.append(graph.call_function(torch.ops.aten._unsafe_view.default, (copied[one], shape)))
        ports[-1].meta["example_value"] = one.meta["example_value"]
    results = [copied[one] if isinstance(one, Node) else one for one in outputs]
    graph.output((*results, *ports))
    return torch.fx.GraphModule(module, graph), tuple(views)


def _storage(node: Any) -> int | None:
    """What tells apart the memory that a node's result lies in; ``None`` for what has none of its own."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return int(value.untyped_storage()._cdata) if isinstance(value, internals.FakeTensor) else None


def _is_differentiable_view(node: Node) -> bool:
    value = node.meta["example_value"]
    return bool(value.requires_grad and value._is_view())


class Ports:
    """The ports of one call of a captured part, and what comes through them in a backward.

    It keeps nothing of the part and its outputs: hooks on these hold it.

    Args:
        outputs: what the part returned, those of its ports at the end.
        views: the positions of the outputs that these are for.
    """

    def __init__(self, outputs: Sequence[Any], views: Sequence[int]) -> None:
        self._backward = -1
        self._handed_over = False
        self._gradients: dict[int, torch.Tensor] = {}
        for number, position in enumerate(views, len(outputs) - len(views)):
            view, node = outputs[position], outputs[number].grad_fn
            if view.grad_fn is not None and node is not None and view.grad_fn is not node:
                take = functools.partial(self._take, weakref.ref(node), number, view.output_nr)
                view.grad_fn.register_prehook(take)

    def _begin(self) -> None:
        if self._backward != (now := internals.backward_number()):
            self._backward, self._handed_over, self._gradients = now, False, {}

    def _take(
        self, part: Callable[[], Any], number: int, output: int, gradients: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Before the backward of a view: its gradient is the port's, if the part's backward is yet to come."""
        self._begin()
        node = part()
        if gradients[output] is None or self._handed_over or node is None or not internals.is_to_run(node):
            return None
        self._gradients[number] = gradients[output]
        return tuple(None if i == output else one for i, one in enumerate(gradients))

    def gradients(self) -> dict[int, torch.Tensor]:
        """When the part's backward begins: what came through its ports, by the positions of these among its outputs."""
        self._begin()
        self._handed_over = True
        found, self._gradients = self._gradients, {}
        return found
