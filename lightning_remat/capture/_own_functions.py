"""Functions of this package's own that stand for several ops, and which of their inputs they may write over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.fx

Node = torch.fx.Node

_OVERWRITABLE, _RANDOM = "overwritable", "random"


def named(
    function: Callable[..., Any], name: str, overwritable: frozenset[int], *, random: bool = False
) -> Callable[..., Any]:
    """Give a function a name, and say what is known of it.

    Args:
        function: the function.
        name: its name.
        overwritable: over which of its arguments it may write its first result, where that is ``out``.
        random: whether it draws random numbers.
    """
    function.__name__ = function.__qualname__ = name
    function.__dict__.update({_OVERWRITABLE: overwritable, _RANDOM: random})
    return function


def draws(target: Any) -> bool:
    """Whether a function draws random numbers."""
    return bool(getattr(target, _RANDOM, False))


def writes_over(target: Any, position: int) -> bool:
    """Whether a function may write its first result over this one of its arguments."""
    return position in getattr(target, _OVERWRITABLE, ())


def put(
    after: Node,
    function: Callable[..., Any],
    inputs: Sequence[Node],
    returned: Sequence[Node],
    like: Node,
    how: str,
    stay: Collection[Node],
) -> None:
    """Have a function compute what some nodes do.

    Args:
        after: the node behind which it is called.
        function: returns a tuple with a value for each of ``returned``.
        inputs: its arguments.
        returned: the nodes in whose places its results are read.
        like: the node whose notes (module, and so on) it gets.
        how: what it is called by, behind that node's name.
        stay: nodes that go on reading the nodes themselves.
    """
    graph = after.graph
    meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta", "from_node")}
    with graph.inserting_after(after):
        made = graph.call_function(function, tuple(inputs), name=f"{like.name}_{how}")
    made.meta = {**meta, "val": tuple(node.meta["val"] for node in returned)}
    for number, node in reversed(list(enumerate(returned))):
        with graph.inserting_after(made):
            item = graph.call_function(operator.getitem, (made, number), name=f"{node.name}_{how}")
        item.meta = {**meta, "val": node.meta["val"]}
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in stay)
