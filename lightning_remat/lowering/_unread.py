"""A backward that does not come through all outputs of a call, with the bits that eager mode has then.

Autograd hands AOTAutograd zeros for the tangents of the others, and its backward adds what it computes from these.
Eager mode adds nothing: the gradient stays as it was, in a layout of its own, and a sum over it is computed in the
order of that layout. (A model that returns its logits beside the loss, as CLIP does, has other last bits otherwise.)
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from lightning_remat.capture import is_tensor, real_layout
from lightning_remat.capture._torch import OpOverload, with_fakes

Node = torch.fx.Node
aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.add.out, aten.add_.Tensor}


def without_tangents(backward: torch.fx.GraphModule, unread: Collection[str]) -> torch.fx.GraphModule:
    """A backward that computes nothing from tangents which are absent.

    It takes the same arguments and returns the same gradients. A result whose layout changes has memory of its own,
    though the schedule wrote it over another. The backward is returned as it is where sizes are symbolic, or where an
    op would read another layout than before and what it then returns cannot be told.

    Args:
        backward: a lowered backward module.
        unread: the absent tangents, by the targets of their placeholders.
    """
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in backward.graph.find_nodes(op="placeholder")):
        return backward  # layouts of symbolic sizes are not compared
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(backward.graph, {}))
    try:
        _Without(graph, unread).rewrite()
    except _Unknown:
        return backward
    return torch.fx.GraphModule(backward, graph)


class _Unknown(Exception):
    """The layout of a result is not known."""


class _Without:
    """Rewrites a backward's graph, in place, so that nothing is computed from absent tangents.

    Args:
        graph: the graph.
        unread: the absent tangents, by the targets of their placeholders.
    """

    def __init__(self, graph: torch.fx.Graph, unread: Collection[str]) -> None:
        self.graph = graph
        placeholders = graph.find_nodes(op="placeholder")
        self.none = {node for node in placeholders if str(node.target) in unread}
        self.gradients = {node for node in placeholders if "tangents" in str(node.target)} - self.none
        self.changed: set[Node] = set()  # nodes that have other layouts than they had

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            sources = set(node.all_input_nodes)
            if sources & self.changed:
                self._lay_out(node)
            if not sources & self.none:
                if sources & self.gradients:
                    self.gradients.add(node)
            elif not sources & self.gradients:  # computed from absent tangents alone
                self.none.add(node)
            else:
                self.gradients.add(node)
                self._leave_out(node)
        for node in reversed(list(self.graph.nodes)):
            if node in self.none and node.op == "call_function" and not node.users:
                self.graph.erase_node(node)

    def _leave_out(self, node: Node) -> None:
        """A sum of a gradient and an absent one is the gradient. (Other ops take zeros for it in eager mode too.)"""
        terms = node.args[:2]
        kept = [one for one in terms if isinstance(one, Node) and one not in self.none]
        if node.target not in _SUMS or len(kept) != 1 or "alpha" in node.kwargs or not is_tensor(kept[0]):
            return
        (only,), value = kept, node.meta["val"]
        if only.meta["val"].shape != value.shape or only.meta["val"].dtype != value.dtype:
            return
        before = value.stride()
        over = node.kwargs.get("out", terms[0] if node.target is aten.add_.Tensor else None)
        if over is only:  # which nobody else needs
            node.replace_all_uses_with(only)
            self.graph.erase_node(node)
            node = only
        else:
            node.target, node.args, node.kwargs = aten.clone.default, (only,), {}
            node.meta["val"] = self._computed(node, node.args, {})
        if node.meta["val"].stride() != before:
            self.changed.add(node)

    def _lay_out(self, node: Node) -> None:
        """Find the layout of a node's result, whose inputs have other layouts now.

        Raises:
            _Unknown: where it cannot be told.
        """
        before = node.meta.get("val")
        if node.meta.get("remat_handed_over"):  # the gradient is added to another, whose layout the sum has
            return
        if node.target is operator.getitem:
            source, index = node.args
            value = source.meta["val"][index]  # type: ignore[union-attr]
        elif not isinstance(node.target, OpOverload):
            raise _Unknown
        else:
            written = [
                a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write
            ]
            if not written:
                value = self._result(node)
            elif len(written) == 1 and written[0] in node.kwargs:
                value = self._written(node, written[0])
            else:
                value = self._in_place(node)
        node.meta["val"] = value
        if _strides(value) != _strides(before):
            self.changed.add(node)

    def _result(self, node: Node) -> Any:
        try:
            return self._computed(node, node.args, node.kwargs)
        except (RuntimeError, ValueError) as error:
            if node.target is not aten.view.default:
                raise _Unknown from error
        # Eager mode reshapes, which copies here.
        source, size = node.args
        with self.graph.inserting_before(node):
            copy = self.graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = self._computed(copy, copy.args, copy.kwargs)
        self.gradients.add(copy)
        node.args = (copy, size)
        return self._computed(node, node.args, {})

    def _written(self, node: Node, name: str) -> Any:
        """A result that was written over an input: it still is, where it has the input's layout."""
        over: Any = node.kwargs[name]
        held = over.meta["val"]
        function = functional(node.target)  # type: ignore[arg-type]
        if function is None:
            raise _Unknown
        others = {key: value for key, value in node.kwargs.items() if key != name}
        try:
            value = self._computed(node, node.args, others, function)
        except RuntimeError as error:
            raise _Unknown from error
        if value.stride() == held.stride():
            return held
        with self.graph.inserting_before(node):  # the op lays its result out in memory that is empty
            options = {"dtype": held.dtype, "device": held.device}
            memory = self.graph.call_function(aten.empty.memory_format, ([0],), options)
        memory.meta["val"] = with_fakes(torch.empty, [[0]], options, held)
        node.update_kwarg(name, memory)
        return value

    def _in_place(self, node: Node) -> Any:
        first: Any = node.args[0]
        tensors = [one.meta["val"] for one in node.all_input_nodes if is_tensor(one)]
        held = first.meta["val"]
        if any(one.dim() and one.shape == held.shape and one.stride() != held.stride() for one in tensors):
            raise _Unknown
        return held

    def _computed(self, node: Node, args: Any, kwargs: Any, function: Any = None) -> Any:
        """What a node's op, or another one of its kind, returns for such inputs."""
        args, kwargs = map_arg((args, kwargs), lambda source: source.meta["val"])
        target: Any = function or node.target

        def laid_out(*args: Any, **kwargs: Any) -> Any:
            value = target(*args, **kwargs)
            layout = real_layout(getattr(target.overloadpacket, "default", target), args)
            first = value[0] if isinstance(value, (tuple, list)) else value
            if layout is None or layout.stride() == first.stride():
                return value
            true = torch.empty_strided(first.shape, layout.stride(), dtype=first.dtype, device=first.device)
            return (true, *value[1:]) if isinstance(value, (tuple, list)) else true

        return with_fakes(laid_out, args, kwargs, next(n.meta["val"] for n in node.all_input_nodes if is_tensor(n)))


def functional(target: OpOverload) -> OpOverload | None:
    """The form of an op that returns what ``target`` writes to an argument; ``None`` where there is none.

    Of a form that writes, torch's fake tensors do not tell how it would lay out a result.
    """
    arguments = target._schema.arguments
    wanted = [(a.name, str(a.type)) for a in arguments if a.alias_info is None or not a.alias_info.is_write]
    packet = target.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        if [(a.name, str(a.type)) for a in form._schema.arguments] == wanted and not form._schema.is_mutable:
            return form  # type: ignore[no-any-return]
    return None


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return [_strides(one) for one in value] if isinstance(value, (tuple, list)) else None
