"""Symbolic sizes of a captured graph: the numbers that they stand for, and nodes that compute them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _torch as internals
from lightning_remat.errors import CaptureError

Symbol = Any
"""A symbol of torch's shape environment."""


class Sizes:
    """Whole numbers for the symbolic sizes of one graph.

    Args:
        values: by symbol. An expression with other symbols in it has the value that it had when the graph was captured
            (1 where that is not known before the step runs).
    """

    def __init__(self, values: Mapping[Symbol, int]) -> None:
        self.values = dict(values)
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The number that ``value`` stands for; ``int(value)`` would make Dynamo guard on it."""
        expression = internals.expression(value)
        if expression is None:
            return value
        if expression not in self._known:
            known = internals.free_symbols(expression) <= self.values.keys()
            found = internals.substitute(expression, self.values) if known else internals.hint(value)
            self._known[expression] = found
        return self._known[expression]


def symbols_of(value: Any) -> set[Symbol]:
    """The symbols in a symbolic number; none for a plain value."""
    expression = internals.expression(value)
    return set() if expression is None else internals.free_symbols(expression)


def symbols_among(graph: torch.fx.Graph) -> dict[Symbol, torch.fx.Node]:
    """The placeholders whose value is a symbol itself, and no other expression, by their symbols."""
    found: dict[Symbol, torch.fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        expression = internals.expression(node.meta.get("val"))
        if expression is not None and internals.free_symbols(expression) == {expression}:
            found.setdefault(expression, node)
    return found


def unlike_any(symbols: Mapping[Symbol, Any]) -> Sizes:
    """Sizes at which nothing is equal by chance: for each symbol a large number without small divisors."""
    primes = (n for n in itertools.count(10007, 2) if all(n % d for d in range(3, math.isqrt(n) + 1, 2)))
    return Sizes(dict(zip(symbols, primes, strict=False)))


def size_node(graph: torch.fx.Graph, value: Any, symbols: Mapping[Symbol, torch.fx.Node]) -> Any:
    """A size as an argument of a node: a number, a placeholder, or a new node, put where the graph inserts nodes.

    Raises:
        CaptureError: for a size that is not known before the step runs.
    """
    expression = internals.expression(value)
    if expression is None:
        return value
    if expression in symbols:
        return symbols[expression]
    if not internals.free_symbols(expression) <= symbols.keys():
        raise CaptureError(f"the size {expression} is not known before the step runs")
    return internals.computed(graph, expression, symbols)
