"""Gradients of tensors that a captured graph uses several times, and later code again, added up in eager's order.

Autograd adds the gradients of a tensor in the order in which they arrive: that of the later code first, then those of
the uses inside of the graph, one by one, the last use first. A captured graph would return the sum of its own:
``b + (a2 + a1)``, where eager mode has ``(b + a2) + a1``. So the graph returns each summand, and autograd adds them.

Of the last graph of a function that is called by itself (`rematerialize`) it is not known whether code around it, or
another call, reads the same tensors. Mostly nothing does, and then a sum inside of the graph takes less memory. So
these sums are marked (`mark_sums`), and taken apart (`opened`) only in a backward in which something else adds to one
of them (`adds_elsewhere`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture._torch import (
    OpOverload,
    argument_of,
    output_described,
    output_of_tangent,
    overwritten,
    runs_in_forward,
    sources_of_gradients,
    unwritten,
)
from lightning_remat.capture.gradients._shared import handed_in
from lightning_remat.capture.packed._joint import AddedElsewhereError, is_layers_gradient
from lightning_remat.errors import CaptureError

Sums = Mapping[int, tuple[int, ...]]
"""By the position of an argument: the positions, among a backward's outputs, of its gradient's summands, in order."""


OPENS = "remat_opens"
"""Key in a node's ``meta``: the node is an addition in whose place its two terms can be returned."""


def split_sums(graph: torch.fx.Graph, num_fwd_outputs: int) -> Sums:
    """Have a joint graph return summands in place of sums: the first where the sum was, the others at the end.

    Raises:
        CaptureError: where it cannot be told what autograd has added up at an argument, and what on the way to it.
        AddedElsewhereError: where that is a gradient of a recurrent layer over packed sequences, which later code may add to.
    """
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    descriptions = list(output.meta.get("desc") or [])
    found: dict[int, tuple[int, ...]] = {}
    forward = _Forward.of(graph, num_fwd_outputs)
    for index, argument, primal in list(_gradients(graph, num_fwd_outputs)):
        first, *others = _summands(outputs[index], primal, forward)[0]
        if others:
            outputs[index] = first
            positions = range(len(outputs) - num_fwd_outputs, len(outputs) - num_fwd_outputs + len(others))
            found[argument] = (index - num_fwd_outputs, *positions)
            outputs += others
            descriptions += [descriptions[index]] * len(others)
    if found:
        output.args = (tuple(outputs),)
        output.meta["desc"] = descriptions
        graph.eliminate_dead_code()
    return found


def mark_sums(graph: torch.fx.Graph, num_fwd_outputs: int) -> Sums:
    """Mark the sums of a joint graph that `opened` can take apart, and say where it will return their summands.

    A sum of which it cannot be told what autograd has added up at an argument, and what on the way to it, is not
    marked, nor is one that begins with what a recurrent layer over packed sequences has added up: its argument has one
    position.
    """
    outputs: Any = graph.output_node().args[0]
    position = len(outputs) - num_fwd_outputs
    found: dict[int, tuple[int, ...]] = {}
    forward = _Forward.of(graph, num_fwd_outputs)
    for index, argument, primal in _gradients(graph, num_fwd_outputs):
        try:
            _, sums = _summands(outputs[index], primal, forward)
        except CaptureError:
            found[argument] = (index - num_fwd_outputs,)
            continue
        for node in sums:
            node.meta[OPENS] = True
        if sums:
            found[argument] = (index - num_fwd_outputs, *range(position, position + len(sums)))
            position += len(sums)
    return found


def _gradients(graph: torch.fx.Graph, num_fwd_outputs: int) -> Iterator[tuple[int, int, Node]]:
    """Outputs of a joint graph that are gradients of arguments: the output's index, the argument's, and the primal."""
    output = graph.output_node()
    outputs: Any = output.args[0]
    descriptions = list(output.meta.get("desc") or [])
    primals = {argument_of(node.meta.get("desc")): node for node in graph.nodes if node.op == "placeholder"}
    written = {argument_of(overwritten(description)) for description in descriptions[:num_fwd_outputs]}
    for index in range(num_fwd_outputs, len(outputs) if len(descriptions) == len(outputs) else 0):
        argument = argument_of(descriptions[index])
        if (
            argument is not None
            and argument not in written
            and argument in primals
            and isinstance(outputs[index], Node)
        ):
            yield index, argument, primals[argument]


def opened(backward: torch.fx.GraphModule, sums: Sums) -> torch.fx.GraphModule:
    """A backward that returns the summands of its marked sums: the first where the sum was, the others at the end.

    A summand is ``None`` where it was left out because its tangent is absent (see `lowering.without_tangents`).
    """
    graph = torch.fx.Graph()
    outputs: list[Any] = list(graph.graph_copy(backward.graph, {}))  # type: ignore[arg-type]
    outputs += [None] * sum(len(positions) - 1 for positions in sums.values())
    memory = _Memory(graph)
    taken_apart = []
    for first, *others in sums.values():
        for position in reversed(others):
            node = outputs[first]
            if not isinstance(node, Node) or not node.meta.get(OPENS):
                break
            terms = node.args[:2] if len(node.args) > 1 else (node.args[0], None)  # a copy: the other was left out
            outputs[first], outputs[position] = (memory.as_when_added(one, node) for one in terms)
            taken_apart.append(node)
    graph.output(tuple(outputs))
    for node in taken_apart:
        graph.erase_node(node)
    return unwritten(backward, graph)


class _Memory:
    """Which results of a lowered module lie in the same memory, and what writes to it."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._lies_with: dict[Node, Node] = {}
        self._writes: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                self._lies_with[node] = self._of(node.args[0])
            elif isinstance(node.target, OpOverload):
                self._note(node, node.target._schema.arguments)

    def _note(self, node: Node, arguments: Sequence[Any]) -> None:
        for place, argument in enumerate(arguments):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and isinstance(given, Node):
                memory, own = self._of(given), self._of(node)
                if own is not memory:
                    self._lies_with[own] = memory
                if argument.alias_info.is_write:
                    self._writes.append((node, given))

    def _of(self, node: Node) -> Node:
        while node in self._lies_with:
            node = self._lies_with[node]
        return node

    def as_when_added(self, summand: Any, added_by: Node) -> Any:
        """A summand as it is when it is added: itself, or a copy where something writes to its memory later."""
        if not isinstance(summand, Node):
            return summand
        own, added = self._of(summand), self._order[added_by]
        if not any(
            self._order[node] > added and self._of(over) is own and not node.meta.get(OPENS)
            for node, over in self._writes
        ):
            return summand
        with added_by.graph.inserting_before(added_by):
            copy = added_by.graph.call_function(torch.ops.aten.clone.default, (summand,))
        copy.meta = {key: value for key, value in summand.meta.items() if key != OPENS}
        return copy


def differentiable_views(inputs: Sequence[Any]) -> frozenset[int | None]:
    """Positions of the arguments that are views which gradients come through."""
    tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    return frozenset(i for i, value in tensors.items() if value.requires_grad and value._is_view())


def refuse_written_views(graph: torch.fx.Graph, num_fwd_outputs: int, views: frozenset[int | None]) -> None:
    """Refuse a graph that writes to a view with gradients among its arguments: ``hidden[:, 0].mul_(2)`` after a break.

    The gradient of the view's old values would reach the view's base in one piece, where eager mode adds several to it.

    Args:
        graph: the joint graph.
        num_fwd_outputs: how many of its outputs are the forward's.
        views: positions of the arguments that are such views (`differentiable_views`).

    Raises:
        CaptureError: where one of them is written to.
    """
    descriptions = list(graph.output_node().meta.get("desc") or [])
    if not views.isdisjoint(argument_of(overwritten(description)) for description in descriptions[:num_fwd_outputs]):
        raise CaptureError(
            "this part of the step writes to a view of what an earlier part has computed, and gradients come through it: "
            "they would be added in another order than in eager mode"
        )


def forward_ops(graph: torch.fx.Graph) -> dict[Any, list[Node]]:
    """The ops of a joint graph's forward, by autograd's number for them."""
    ops: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if runs_in_forward(node):
            ops.setdefault(node.meta.get("seq_nr"), []).append(node)
    return ops


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The forward of a joint graph.

    Attributes:
        ops: its ops, by autograd's number for them.
        outputs: the results that later code is given, by their tangents.
    """

    ops: Mapping[Any, Sequence[Node]]
    outputs: Mapping[Node, Node]

    @classmethod
    def of(cls, graph: torch.fx.Graph, num_fwd_outputs: int) -> _Forward:
        """That of a graph."""
        output = graph.output_node()
        results: Any = output.args[0]
        places = [output_described(described) for described in (output.meta.get("desc") or [])[:num_fwd_outputs]]
        by_place = {place: node for place, node in zip(places, results, strict=False) if place is not None}
        outputs: dict[Node, Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            place = output_of_tangent(node)
            if place is not None and isinstance(by_place.get(place), Node):
                outputs[node] = by_place[place]
        return cls(forward_ops(graph), outputs)


def _summands(gradient: Node, primal: Node, forward: _Forward) -> tuple[list[Node], list[Node]]:
    """The summands that autograd adds up at ``primal``, in its order, and the nodes that add the second, the third, ...

    Where an op that reads ``primal`` passes on the gradient of its result as it is (an addition does), that gradient
    may be a sum itself, made at the result: then the first terms of the whole sum are one summand.

    Raises:
        CaptureError: where it cannot be told which terms these are.
        AddedElsewhereError: where the first is one that a recurrent layer over packed sequences has added up itself.
    """
    chain, sums = [gradient], [gradient]
    while _accumulates(chain[0]):
        chain[:1] = chain[0].args[:2]  # type: ignore[assignment]
        sums.insert(0, chain[0])
    if is_layers_gradient(chain[0]):
        raise AddedElsewhereError(
            "a recurrent layer over packed sequences is followed by another part of the step, which may read the layer's "
            "weights too: their gradients would be added in another order than in eager mode"
        )
    uses = {node for node in primal.users if runs_in_forward(node)}
    handed_on = [_handed_on_by(summand, uses, forward) for summand in chain]
    known = {use for summand in chain for use in forward.ops.get(summand.meta.get("seq_nr"), ())}.union(*handed_on)
    if len(chain) == sum(_reads(use, primal) for use in uses) and uses <= known:
        return chain, sums[1:]  # each use has given one of them
    first = handed_on[0]
    together = 1
    while together < len(chain) and first & handed_on[together]:
        if len(first | handed_on[together]) > 1:
            raise CaptureError(
                f"the gradients of {primal.name} that are added up in this part of the step, and those of later parts, would "
                "be added in another order than in eager mode"
            )
        together += 1
    return [sums[together - 1], *chain[together:]], sums[together:]


def _reads(use: Node, primal: Node) -> int:
    """How often an op is given a tensor."""
    found: list[Node] = []
    torch.fx.node.map_arg((use.args, use.kwargs), found.append)
    return found.count(primal)


def _handed_on_by(summand: Node, uses: Collection[Node], forward: _Forward) -> set[Node]:
    """The ops among ``uses`` that passed a summand on as it is; none, where the backward of such an op made it."""
    made_by = forward.ops.get(summand.meta.get("seq_nr"), ())
    if summand in forward.outputs:  # a tangent: later code made it
        made_by, left = (), [forward.outputs[summand]]
    else:
        left = [source for node in made_by for source in node.all_input_nodes]
    if any(node in uses for node in made_by):
        return set()
    found, seen = set(), set(made_by)
    while left:
        source = left.pop()
        if _hands_on(source) and source not in seen:
            seen.add(source)
            if source in uses:
                found.add(source)
            left += source.all_input_nodes
    return found


_HAND_ON = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add.Scalar,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.sub.Scalar,
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
}
"""Ops that pass the gradient of their result on to their input as it is."""

_HAND_ON_ALIKE = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.expand.default,
}
"""Likewise, where their result has the shape of what they are given."""


def _hands_on(node: Node) -> bool:
    if node.target in _HAND_ON_ALIKE:
        (source,) = node.all_input_nodes[:1]
        return bool(source.meta["val"].shape == node.meta["val"].shape)
    return node.target in _HAND_ON


def _accumulates(node: Node) -> bool:
    return bool(node.meta.get("is_gradient_acc")) and node.target is torch.ops.aten.add.Tensor and len(node.users) == 1


class HandedOut:
    """The summands of one call's gradients, from the call's backward until autograd adds them."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.casts: Any = None  # of the same call, see ``_autocast``
        self._summands: dict[int, torch.Tensor | None] = {}

    def stay(self, arguments: Collection[int]) -> list[int]:
        """Those of these arguments whose sums cannot be taken apart."""
        return [argument for argument in arguments if len(self._sums[argument]) == 1]

    def begin(self) -> None:
        """A backward begins: summands of an earlier one that autograd did not ask for are dropped."""
        self._summands = {}

    def taken(self, summands: Sequence[torch.Tensor | None]) -> None:
        """Keep the summands that a backward returns beyond its gradients."""
        positions = sorted(position for several in self._sums.values() for position in several[1:])
        self._summands = dict(zip(positions, summands, strict=True))

    def inputs(
        self,
        args: Sequence[Any],
        order: Sequence[int] = (),
        without: Collection[int] = (),
        shared: Collection[int] = (),
    ) -> list[Any]:
        """The call's arguments, of which those with several summands hand these to autograd one by one (`_Several`).

        Args:
            args: the arguments.
            order: positions of arguments in the order in which autograd is to go on with their gradients.
            without: positions of arguments that get no gradient: autograd does not come to parameters among them, nor to their
                hooks.
            shared: positions of those whose gradients share memory (see ``_shared``).
        """
        given = list(args)
        for argument in without:
            if isinstance(given[argument], torch.nn.Parameter):
                given[argument] = given[argument].detach()
        apply: Any = _Several.apply  # without types before torch 2.14
        for argument in dict.fromkeys([*(one for one in self._sums if one not in order), *reversed(order)]):
            value, positions = given[argument], self._sums.get(argument)
            if not value.requires_grad:
                continue
            if positions is not None:
                given[argument] = apply(self, argument, *[value] * len(positions))
            elif isinstance(value, torch.nn.Parameter):  # autograd goes on first with what was made last
                given[argument] = handed_in(value, argument in shared)
        return given

    def sum(self, argument: int, first: torch.Tensor) -> torch.Tensor:
        """An argument's gradient: its first summand and those that are kept."""
        for position in self._sums.get(argument, ())[1:]:
            if (summand := self._summands.get(position)) is not None:
                first = first + summand
        return first

    def of(self, argument: int) -> list[torch.Tensor | None]:
        """The summands of an argument's gradient beyond the first, which are kept no longer.

        They are ``None`` where a backward comes through a view of the argument, and not through the captured graph.
        """
        return [self._summands.pop(position, None) for position in self._sums[argument][1:]]


class _Several(torch.autograd.Function):
    """The identity, with one edge in autograd's graph for each summand of the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, handed_out: HandedOut, argument: int, *values: torch.Tensor) -> torch.Tensor:
        ctx.handed_out, ctx.argument = handed_out, argument
        ctx.set_materialize_grads(False)
        return values[0].detach()  # no view, which could not be written to: it counts changes together with the tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients, *ctx.handed_out.of(ctx.argument)


def several_of(node: Any) -> set[Any]:
    """The `_Several` nodes to which a call's ``node`` in autograd's graph passes gradients."""
    return {one for one, _ in node.next_functions if isinstance(getattr(one, "handed_out", None), HandedOut)}


def adds_elsewhere(node: Any) -> frozenset[int]:
    """The arguments with several summands to which something besides a call's ``node`` adds in the backward that runs.

    All arguments with several summands, where that is not known.
    """
    several = several_of(node)
    known = sources_of_gradients()
    found = set()
    for one in several:
        targets = [edge for edge in one.next_functions if edge[0] is not None]
        if known is None or any(
            source not in several and not getattr(source, "adds_nothing", False)
            for sources in known
            for edge in targets
            for source in sources.get(edge, ())
        ):
            found.add(one.argument)
    return frozenset(found)
