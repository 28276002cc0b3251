"""Ops that eager mode runs in place on a tensor that does not lie in order (transposed, say) leave it where it lies.

Functionalization puts ops in their places that are not in place, and some of these lay out their results in order:
``masked_fill``, ``tril``, ``cumsum``, ``scatter``, and whatever fills a tensor with random numbers, which then come to other
elements. They are traced with eager's strides (see `spaced_results`), and here they become the op in place, on a copy where
that is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._layouts import lies_alike, lies_in_order, real_layout
from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture._own_functions import named

Node = torch.fx.Node


def leave_in_place(graph: torch.fx.Graph) -> None:
    """Put the op in place, on its first argument's layout, where the op itself would lay out its result otherwise."""
    for node in graph.nodes:
        first = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(first, Node) or not (is_tensor(first) and is_tensor(node)) or lies_in_order(node.meta["val"]):
            continue
        twin = _in_place(node.target)
        if twin is not None and lies_alike(node.meta["val"], first.meta["val"]) and not _lies_so_by_itself(node, first):
            node.target = twin


@functools.cache
def _in_place(target: Any) -> Callable[..., torch.Tensor] | None:
    """The op in place, as a function that computes on a copy of its first argument, or on ``out``; ``None`` without one."""
    if not isinstance(target, internals.OpOverload) or target.namespace != "aten" or _ops.is_view(target):
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::').removesuffix('_functional')}_", None)
    forms = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    form = next((one for one in forms if [(a.name, str(a.type)) for a in one._schema.arguments] == wanted), None)
    if form is None:
        return None

    def call(x: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return form(x.clone() if out is None else out, *args, **kwargs)  # type: ignore[no-any-return]

    random = _ops.is_random(target)  # one that is evaluated again draws into memory of its own
    return named(call, str(form), frozenset() if random else frozenset([0]), random=random)


def _lies_so_by_itself(node: Node, first: Node) -> bool:
    """Whether the op's result lies as it was traced, also where the op is not in place."""
    target: Any = node.target
    if _ops.is_elementwise(target) and target.overloadpacket is not torch.ops.aten.masked_fill:
        return True

    def laid_out(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = target(*args, **kwargs)
        layout = real_layout(target, args)
        return made if layout is None else layout

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return lies_alike(internals.with_fakes(laid_out, args, kwargs, first.meta["val"]), node.meta["val"])
