"""Ops that do something beside what they return: assertions, prints, operators of the user's own that return nothing.

Eager mode runs each of them once a step. Tracing drops an op whose results nobody reads, and keeps no order but that in
which results are read. So such ops are recognized here: they stay, and run once, in their order, in the forward or in
the backward as in eager mode; those for which `acts` is true are never run on made-up inputs to be timed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._torch import (
    FUNCTIONALIZED,
    PRINT,
    WITH_EFFECTS,
    OpOverload,
    assert_async,
    runs_in_forward,
)
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
Node = torch.fx.Node

_CHECKS = {
    aten._functional_assert_async.msg,
    aten._functional_assert_scalar.default,
    aten._functional_sym_constrain_range.default,
    aten._functional_sym_constrain_range_for_size.default,
}
"""Checks that return something: it says only that they have run."""

_NUMBERS = {"int", "float", "bool", "number"}

NO_MESSAGE = "assertion error"
"""What Dynamo writes where an ``assert`` has no message."""


@torch.library.custom_op("lightning_remat::assertion", mutates_args=())
def assertion(condition: torch.Tensor, message: str) -> None:
    """Python's ``assert`` of a tensor, as in eager mode: it waits for the device, and raises ``AssertionError``."""
    if not condition:
        raise AssertionError(*([message] if message != NO_MESSAGE else []))


@assertion.register_fake
def _(condition: torch.Tensor, message: str) -> None:
    del condition, message


def acts(node: Node) -> bool:
    """Whether an op is called for its effect, or overwrites an argument: it runs in the step only, and is not timed."""
    return bool(node.meta.get("remat_acts")) or calls_to_act(node.target)


def calls_to_act(target: Any) -> bool:
    """Whether ops that call it are for their effect, or overwrite an argument."""
    return _gives_nothing(target) if isinstance(target, OpOverload) else target in FUNCTIONALIZED


def tells(node: Node) -> bool:
    """Whether it may be seen from outside how often an op has run, as of operators of the user's own.

    A check that has not failed fails no other time, and is none of them; nor is a message (see ``_messages``).
    """
    tied = node.target is WITH_EFFECTS
    target: Any = node.args[1] if tied else node.target
    known = isinstance(target, OpOverload) and target.namespace in ("aten", "lightning_remat")
    return not known and (tied or acts(node))


def says(node: Node) -> bool:
    """Whether an op is a message: a warning, a logging call or a print (see ``tracing._messages``)."""
    return node.target is PRINT or node.target is torch.ops.lightning_remat.say.default


def has_effects(node: Node) -> bool:
    """Whether an op has an effect, or may have one: it runs once, in its place among those that do so or draw numbers."""
    return node.op == "call_function" and (bool(node.meta.get("remat_acts")) or stays(node.target))


def returns_numbers(node: Node) -> bool:
    """Whether an op that may have an effect returns a number: tracing takes it for a constant, though it may vary."""
    if not has_effects(node) or not isinstance(node.target, OpOverload):
        return False
    return any(str(result.type).removeprefix("Sym").lower() in _NUMBERS for result in node.target._schema.returns)


def stays(target: Any) -> bool:
    """Whether an op may have an effect (any of the user's own may), and so must run though nobody reads its results."""
    return _may_act(target) if isinstance(target, OpOverload) else target in FUNCTIONALIZED


@functools.cache
def _may_act(target: OpOverload) -> bool:
    return _gives_nothing(target) or not _ops.repeats(target)


@functools.cache
def _gives_nothing(target: OpOverload) -> bool:
    return not target._schema.returns or target in _CHECKS


def run_in_backward(graph: torch.fx.Graph) -> set[Node]:
    """The nodes that AOTAutograd has not tagged as the forward's; none at all, where it has tagged no node."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    later = {node for node in calls if not runs_in_forward(node)}
    return later if len(later) < len(calls) else set()


def name_assertions(module: torch.fx.GraphModule) -> None:
    """Put `assertion` in the place of ``torch._assert_async``, which Dynamo makes of ``assert``, with another error.

    Args:
        module: what Dynamo has captured; it is changed in place.
    """
    for one in [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]:
        found = one.graph.find_nodes(op="call_function", target=assert_async)
        for node in found:
            node.target = torch.ops.lightning_remat.assertion.default
        if found:
            one.recompile()


def call_directly(graph: torch.fx.Graph) -> None:
    """Call the ops directly that AOTAutograd has wrapped in ``with_effects``: their order is kept without its tokens.

    The token that such a call returns is replaced by the one that it was given.

    Raises:
        CaptureError: for an effect of anything but an operator or a print.
    """
    for node in graph.find_nodes(op="call_function", target=WITH_EFFECTS):
        given: Any = node.args
        token, target, args = given[0], given[1], given[2:]
        known = isinstance(target, OpOverload) or target is PRINT
        if not known:
            raise CaptureError(f"{node.name} calls {target}, whose effects cannot be scheduled")
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), dict(node.kwargs))
        values = node.meta["val"][1:]
        call.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        several = isinstance(target, OpOverload) and len(target._schema.returns) > 1
        call.meta.update(val=tuple(values) if several else values[0] if values else None, remat_acts=True)
        for item in list(node.users):
            place = item.args[1]
            if place == 0:
                item.replace_all_uses_with(token)
                graph.erase_node(item)
            elif several:
                item.args = (call, place - 1)
            else:
                item.replace_all_uses_with(call)
                graph.erase_node(item)
        graph.erase_node(node)


def keeps_its_place(node: Node) -> bool:
    """Whether an op draws random numbers, or may have an effect: all such keep the captured order among each other."""
    return node.op == "call_function" and (_ops.is_random(node.target) or has_effects(node))
