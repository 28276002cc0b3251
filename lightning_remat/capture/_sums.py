"""Gradients that are added up in eager's order: what a part of a step uses several times, and a later part again.

Autograd adds what arrives at a tensor in the order in which it arrives: that of the later part first, then one by one what the
uses in the earlier part give, the last use first. A captured part would give the sum of its own: ``b + (a2 + a1)``, where eager
mode has ``(b + a2) + a1``. So each of them is handed out, and autograd adds them.

Of a module that is called by itself it is not known what else will read what it reads: its own loop, another call, or nothing,
which is what usually is the case, and for which sums take less memory. So they are marked (`mark_sums`), and taken apart
(`opened`) in a backward in which something else adds to one of them (`adds_elsewhere`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture._torch import OpOverload, argument_of, overwritten, runs_in_forward, sources_of_gradients
from lightning_remat.errors import CaptureError

Sums = Mapping[int, tuple[int, ...]]
"""By the position of an argument, those of what its gradient is the sum of, among the outputs of a backward."""


OPENS = "remat_opens"
"""In the notes of a node: it adds a summand that can be handed out in its place."""


def split_sums(graph: torch.fx.Graph, num_fwd_outputs: int) -> Sums:
    """Hand out the summands of a joint graph's gradients in place of their sums: more outputs, at the end.

    Raises:
        CaptureError: where it cannot be told what autograd has added up at an argument, and what on the way to it.
    """
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    descriptions = list(output.meta.get("desc") or [])
    found: dict[int, tuple[int, ...]] = {}
    for index, argument, primal in list(_gradients(graph, num_fwd_outputs)):
        first, *others = _summands(outputs[index], primal)[0]
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
    """What `opened` would hand out, were it to take a joint graph's sums apart; the graph stays as it is.

    A sum of which it cannot be told what autograd has added up at an argument, and what on the way to it, stays: it is a
    gradient without other summands.
    """
    outputs: Any = graph.output_node().args[0]
    position = len(outputs) - num_fwd_outputs
    found: dict[int, tuple[int, ...]] = {}
    for index, argument, primal in _gradients(graph, num_fwd_outputs):
        try:
            _, sums = _summands(outputs[index], primal)
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
    """Of a joint graph's outputs that are gradients of arguments: the index, that of the argument, and the primal."""
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
    """A backward that hands out the summands of its marked sums: those that come first, and the others at the end.

    One that was left out, since it is nothing (see `lowering.without_tangents`), is ``None``.
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
            terms = node.args[:2] if len(node.args) > 1 else (node.args[0], None)  # a copy, where the other is nothing
            outputs[first], outputs[position] = (memory.as_when_added(one, node) for one in terms)
            taken_apart.append(node)
    graph.output(tuple(outputs))
    for node in taken_apart:
        graph.erase_node(node)
    return torch.fx.GraphModule(backward, graph)


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
        """A summand; a copy of it, where something that runs later writes to it."""
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
    """A view that gradients come through, and that a part of a step writes to, as in ``hidden[:, 0].mul_(2)`` over a break.

    Autograd would hand on the gradient of the old values to what it is a view of in one piece, where eager mode has several.

    Args:
        graph: a joint one.
        num_fwd_outputs: its outputs that are no gradients.
        views: positions of the arguments that are such views.

    Raises:
        CaptureError: where one of them is written to.
    """
    descriptions = list(graph.output_node().meta.get("desc") or [])
    if not views.isdisjoint(argument_of(overwritten(description)) for description in descriptions[:num_fwd_outputs]):
        raise CaptureError(
            "this part of the step writes to a view of what an earlier part has computed, and gradients come through it: "
            "they would be added in another order than in eager mode"
        )


def _summands(gradient: Node, primal: Node) -> tuple[list[Node], list[Node]]:
    """What autograd adds up at ``primal``, in its order, and what adds the second of these, the third, and so on.

    A sum of another tensor's gradients arrives as it is where the op between hands it on (that of an addition does): then the
    first of the summands belong together.
    """
    chain, sums = [gradient], [gradient]
    while _accumulates(chain[0]):
        chain[:1] = chain[0].args[:2]  # type: ignore[assignment]
        sums.insert(0, chain[0])
    uses = {node for node in primal.users if runs_in_forward(node)}
    first = _handed_on_by(chain[0], primal, uses)
    together = 1
    while together < len(chain) and first & _handed_on_by(chain[together], primal, uses):
        if len(first | _handed_on_by(chain[together], primal, uses)) > 1:
            raise CaptureError(
                f"the gradients of {primal.name} that are added up in this part of the step, and those of later parts, would "
                "be added in another order than in eager mode"
            )
        together += 1
    return [sums[together - 1], *chain[together:]], sums[together:]


def _handed_on_by(summand: Node, primal: Node, uses: Collection[Node]) -> set[Node]:
    """The ops that read ``primal`` and that a gradient came through as it was; none, where an op that reads it made it."""
    number = summand.meta.get("seq_nr")
    left = [node for node in primal.graph.nodes if runs_in_forward(node) and node.meta.get("seq_nr") == number]
    if any(node in uses for node in left):
        return set()
    found, seen = set(), set(left)
    while left:
        for source in left.pop().all_input_nodes:
            if _hands_on(source) and source not in seen:
                seen.add(source)
                if source in uses:
                    found.add(source)
                left.append(source)
    return found


_HAND_ON = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add.Scalar,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.sub.Scalar,
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
}
"""Whose gradient is that of their result, as it is."""

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
    """The summands of one call's gradients, between its backward and autograd's sums."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.casts: Any = None  # of the same call, see ``_autocast``
        self._summands: dict[int, torch.Tensor | None] = {}

    def stay(self, arguments: Collection[int]) -> list[int]:
        """Those of the arguments whose sums cannot be taken apart."""
        return [argument for argument in arguments if len(self._sums[argument]) == 1]

    def begin(self) -> None:
        """A backward comes: what an earlier one has handed out, and nothing has taken, is not added to its gradients."""
        self._summands = {}

    def taken(self, summands: Sequence[torch.Tensor | None]) -> None:
        """What a backward returns beyond its gradients."""
        positions = sorted(position for several in self._sums.values() for position in several[1:])
        self._summands = dict(zip(positions, summands, strict=True))

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, of which those with several gradients pass these on to autograd one by one."""
        given = list(args)
        apply: Any = _Several.apply  # without types before torch 2.14
        for argument, positions in self._sums.items():
            if given[argument].requires_grad:
                given[argument] = apply(self, argument, *[given[argument]] * len(positions))
        return given

    def of(self, argument: int) -> list[torch.Tensor | None]:
        """What is added to the first gradient of an argument; it is kept no longer.

        Nothing, where a backward comes through a view of the argument, and not through what was captured.
        """
        return [self._summands.pop(position, None) for position in self._sums[argument][1:]]


class _Several(torch.autograd.Function):
    """A tensor as it is, with an edge for each of its gradients."""

    @staticmethod
    def forward(ctx: Any, handed_out: HandedOut, argument: int, *values: torch.Tensor) -> torch.Tensor:
        ctx.handed_out, ctx.argument = handed_out, argument
        ctx.set_materialize_grads(False)
        return values[0].view_as(values[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients, *ctx.handed_out.of(ctx.argument)


def several_of(node: Any) -> set[Any]:
    """The nodes by which a call's ``node`` hands on several gradients of one argument."""
    return {one for one, _ in node.next_functions if isinstance(getattr(one, "handed_out", None), HandedOut)}


def adds_elsewhere(node: Any) -> frozenset[int]:
    """The arguments, of those that a call's ``node`` hands out sums for, that something else adds to in the backward that runs.

    All of them, where that is not known.
    """
    several = several_of(node)
    known = sources_of_gradients()
    found = set()
    for one in several:
        targets = [edge for edge in one.next_functions if edge[0] is not None]
        if known is None or any(not several.issuperset(sources.get(edge, ())) for sources in known for edge in targets):
            found.add(one.argument)
    return frozenset(found)
