"""Nodes are made, and asked for effects, without what takes longer than the making.

* ``fx.graph.pytree``: by its ``tree_iter`` each new node's arguments are searched for symbolic numbers, of which it is warned.
* ``fx.graph._snake_case``: makes a node's name of what it calls, letter by letter.
* ``fx.Node.is_impure``: whether an op's node may be dropped, for which the op's schema, tags and effects are looked up.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
import torch.fx.graph
from torch._ops import OpOverload
from torch.utils import _pytree


@contextlib.contextmanager
def nodes_made_fast(symbolic: bool) -> Iterator[None]:
    """While open, names are made once, and no new node's arguments are searched, unless some may be ``symbolic``."""
    home: Any = torch.fx.graph
    own = {name: vars(home)[name] for name in ("pytree", "_snake_case") if name in vars(home)}
    if "_snake_case" in own:
        home._snake_case = functools.cache(own["_snake_case"])
    if own.get("pytree") is _pytree and not symbolic:
        home.pytree = types.ModuleType("pytree")
        vars(home.pytree).update(vars(_pytree), tree_iter=lambda *_args, **_kwargs: iter(()))
    try:
        yield
    finally:
        vars(home).update(own)


@contextlib.contextmanager
def unread_ops_stay(stays: Callable[[Any], bool]) -> Iterator[None]:
    """While open, ops for whose targets ``stays`` is true are not eliminated as dead code; each operator is asked for once."""
    own = torch.fx.Node.is_impure
    known: dict[tuple[Any, bool], bool] = {}

    def is_impure(node: torch.fx.Node, impure_random: bool = True) -> bool:
        if node.op != "call_function":
            return own(node, impure_random)
        if not isinstance(node.target, OpOverload):
            return own(node, impure_random) or stays(node.target)
        key = node.target, impure_random
        if key not in known:
            known[key] = own(node, impure_random) or stays(node.target)
        return known[key]

    torch.fx.Node.is_impure = is_impure  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.fx.Node.is_impure = own  # type: ignore[method-assign]
