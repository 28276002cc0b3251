"""Gradients that are added up in eager's order: what a part of a step uses several times, and a later part again.

Autograd adds what arrives at a tensor in the order in which it arrives: that of the later part first, then one by one what the
uses in the earlier part give, the last use first. A captured part would give the sum of its own: ``b + (a2 + a1)``, where eager
mode has ``(b + a2) + a1``. So each of them is handed out, and autograd adds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture._torch import argument_of, overwritten, runs_in_forward
from lightning_remat.errors import CaptureError

Sums = Mapping[int, tuple[int, ...]]
"""By the position of an argument, those of what its gradient is the sum of, among the outputs of a backward."""


def split_sums(graph: torch.fx.Graph, num_fwd_outputs: int) -> Sums:
    """Hand out the summands of a joint graph's gradients in place of their sums: more outputs, at the end.

    Raises:
        CaptureError: where it cannot be told what autograd has added up at an argument, and what on the way to it.
    """
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    descriptions = list(output.meta.get("desc") or [])
    primals = {argument_of(node.meta.get("desc")): node for node in graph.nodes if node.op == "placeholder"}
    written = {argument_of(overwritten(description)) for description in descriptions[:num_fwd_outputs]}
    found: dict[int, tuple[int, ...]] = {}
    for index in range(num_fwd_outputs, len(outputs) if len(descriptions) == len(outputs) else 0):
        argument = argument_of(descriptions[index])
        if argument is None or argument in written or argument not in primals or not isinstance(outputs[index], Node):
            continue
        first, *others = _summands(outputs[index], primals[argument])
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


def _summands(gradient: Node, primal: Node) -> list[Node]:
    """What autograd adds up at ``primal``, in its order.

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
    return [sums[together - 1], *chain[together:]]


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
        self._summands: dict[int, torch.Tensor | None] = {}

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
