"""Ops that do something beside what they return: assertions, prints, operators of the user's own that return nothing.

Eager mode runs each of them once a step. Whatever traces a step drops what nobody reads, and knows of no order but that of
results; so they are named here: they stay, run once, in their order, in the forward or in the backward as eager mode has it,
and are never tried out on made-up inputs.
"""

from __future__ import annotations

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
"""What they return says only that they have run."""

_NUMBERS = {"int", "float", "bool", "number"}

NO_MESSAGE = "assertion error"
"""What Dynamo writes where an ``assert`` has no message."""


@torch.library.custom_op("lightning_remat::assertion", mutates_args=())
def assertion(condition: torch.Tensor, message: str) -> None:
    """Python's ``assert``, as it is in eager mode: a question to the device, and its own kind of error."""
    if not condition:
        raise AssertionError(*([message] if message != NO_MESSAGE else []))


@assertion.register_fake
def _(condition: torch.Tensor, message: str) -> None:
    del condition, message


def acts(node: Node) -> bool:
    """Whether an op is there for what it does: it is called with what the step gives to it, and at no other time."""
    target: Any = node.target
    if node.meta.get("remat_acts") or target in FUNCTIONALIZED:
        return True
    return isinstance(target, OpOverload) and (not target._schema.returns or target in _CHECKS)


def tells(node: Node) -> bool:
    """Whether somebody may see how often an op has run. (A check that has not failed fails no other time.)"""
    tied = node.target is WITH_EFFECTS
    target: Any = node.args[1] if tied else node.target
    known = isinstance(target, OpOverload) and target.namespace in ("aten", "lightning_remat")
    return not known and (tied or acts(node))


def has_effects(node: Node) -> bool:
    """Whether an op has an effect, or may have one: it runs once, in its place among those that do so or draw numbers."""
    return node.op == "call_function" and (bool(node.meta.get("remat_acts")) or stays(node.target))


def returns_numbers(node: Node) -> bool:
    """Whether an op that may act returns a number: traced, it is a constant, whatever it will be when the step runs."""
    if not has_effects(node) or not isinstance(node.target, OpOverload):
        return False
    return any(str(result.type).removeprefix("Sym").lower() in _NUMBERS for result in node.target._schema.returns)


def stays(target: Any) -> bool:
    """Whether an op may have an effect, and runs whoever reads what it returns: operators of the user's own are such."""
    if isinstance(target, OpOverload):
        return not target._schema.returns or target in _CHECKS or not _ops.repeats(target)
    return target in FUNCTIONALIZED


def run_in_backward(graph: torch.fx.Graph) -> set[Node]:
    """What eager mode runs in the backward, where AOTAutograd has noted what it runs in the forward; else nothing."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    later = {node for node in calls if not runs_in_forward(node)}
    return later if len(later) < len(calls) else set()


def name_assertions(module: torch.fx.GraphModule) -> None:
    """An ``assert`` of a tensor raises Python's own error: Dynamo has made ``torch._assert_async`` of it, which raises another.

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
    """Ops that AOTAutograd has tied together by tokens are called as they are: their order is kept without.

    Tokens are handed through.

    Raises:
        CaptureError: for an effect that is no operator's.
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
