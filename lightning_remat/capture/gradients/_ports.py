"""Gradients of views that a captured graph both reads and returns, added up in eager's order.

Autograd adds up the gradients of a view's uses at the view, and passes the sum on to its base. But AOTAutograd makes a
view that a captured graph returns anew from its base, outside of the graph: the gradient that comes from code after the
graph would reach the base on its own, and not be added first to those of the uses inside of the graph. So the graph
gets one more output for each such view, a *port*, which has the same values and no memory of its own. Nobody reads it;
in the backward the gradient of the view is taken away there, and handed to the graph as the port's.

A view that was made where gradients are off has none to be added: it leaves the graph detached.
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


def detach_views_without_gradients(module: torch.fx.GraphModule) -> None:
    """Hand out detached what is a view that the step makes where gradients are off, of what has some.

    Such a view says that it needs gradients, and has no part in any: code after the graph that computes with it passes none
    on. AOTAutograd makes it anew of its base outside of the graph, where gradients are on.
    """
    given = ("placeholder", "get_attr")
    inputs = {id(node.meta.get("example_value")) for node in module.graph.nodes if node.op in given}
    made: dict[Node, Node] = {}
    for node in module.graph.output_node().all_input_nodes:
        value = node.meta.get("example_value")
        if node.op in given or not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if value._is_view() and (first := _first_view(value)) is not None and id(first) not in inputs:
            with module.graph.inserting_before(module.graph.output_node()):
                made[node] = module.graph.call_method("detach", (node,))
            made[node].meta = {**node.meta, "example_value": value.detach()}
    if made:
        output = module.graph.output_node()
        output.args = torch.fx.map_arg(output.args, lambda node: made.get(node, node))
        module.recompile()


def _first_view(view: torch.Tensor) -> torch.Tensor | None:
    """The view without gradients that this one is, or is a view of; ``None`` where its gradient goes on to its base."""
    if view.grad_fn is None:
        return view
    function: Any = view.grad_fn
    while len(function.next_functions) == 1 and function.next_functions[0][0] is not None:
        function = function.next_functions[0][0]
    leaf = getattr(function, "variable", None)
    return leaf if leaf is not None and leaf._is_view() else None


def hands_on_views_alone(module: torch.fx.GraphModule) -> bool:
    """Whether all outputs of a captured graph that get gradients are views of its arguments: it has nothing to save."""
    storages = {_storage(node) for node in module.graph.find_nodes(op="placeholder")} - {None}
    made = []
    for one in module.graph.output_node().all_input_nodes:
        value = one.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad and one.op != "placeholder":
            made.append(_storage(one) in storages and _is_differentiable_view(one))
    return bool(made) and all(made)


def with_ports(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """What Dynamo has captured, with a port for each view among its outputs that needs one.

    Returns:
        The module with the ports as its last outputs, and the positions of the views that they are for; the module
        itself where no view needs one.
    """
    outputs: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    examples = [one.meta.get("example_value") for one in module.graph.output_node().all_input_nodes]
    if any(isinstance(one, torch.Tensor) and not isinstance(one, internals.FakeTensor) for one in examples):
        return module, ()  # an output that is a tensor subclass has several tangents
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
    """A number for the storage of a node's result; ``None`` for what is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return int(value.untyped_storage()._cdata) if isinstance(value, internals.FakeTensor) else None


def _is_differentiable_view(node: Node) -> bool:
    value = node.meta["example_value"]
    return bool(value.requires_grad and value._is_view())


class Ports:
    """The ports of one call of a captured graph, and the gradients that come through them in a backward.

    It refers to none of the outputs: they hold it, by the hooks on their autograd nodes.

    Args:
        outputs: what the graph returned, its ports at the end.
        views: the positions of the outputs that the ports are for.
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
        """Before a view's backward: its gradient becomes the port's, if the captured graph's backward is yet to run."""
        self._begin()
        node = part()
        if gradients[output] is None or self._handed_over or node is None or not internals.is_to_run(node):
            return None
        self._gradients[number] = gradients[output]
        return tuple(None if i == output else one for i, one in enumerate(gradients))

    def gradients(self) -> dict[int, torch.Tensor]:
        """When the graph's backward begins: the gradients of its ports, by the ports' positions among its outputs."""
        self._begin()
        self._handed_over = True
        found, self._gradients = self._gradients, {}
        return found
