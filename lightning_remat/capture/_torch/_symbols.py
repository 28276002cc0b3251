"""Symbolic numbers: their values when they were captured, and their expressions, as numbers or as nodes of a graph.

``torch.utils._sympy`` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis

SYMBOLIC = (torch.SymInt, torch.SymFloat)
"""The types of numbers that are symbols."""


def symbolic_node(number: torch.SymInt | torch.SymFloat) -> Any:
    """The ``SymNode`` of a symbolic number, untyped: by torch 2.14's types parts may be ``None``, and here none is."""
    return number.node


def hint(value: Any) -> Any:
    """The value that a symbolic number had when it was captured (1 where it is not known before the step runs).

    ``int(value)`` would make Dynamo guard on it.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return 1 if value.node.hint is None else value.node.hint


def specialized(value: Any) -> Any:
    """A number's value, which the graph is guarded on."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value


def expression(value: Any) -> Any:
    """The expression of a symbolic number; ``None`` for a plain value."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def free_symbols(expression: Any) -> set[Any]:
    """The symbols of an expression."""
    return set(expression.free_symbols)


def substitute(expression: Any, values: Mapping[Any, int]) -> Any:
    """An expression's value, as a plain number."""
    found = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return int(found) if found.is_integer else bool(found) if found.is_Boolean else float(found)


def largest(value: torch.SymInt) -> int | None:
    """The most that a symbolic size may be in the captured graph; ``None`` where it is not bounded."""
    node = symbolic_node(value)
    upper = node.shape_env.bound_sympy(node.expr).upper
    return None if upper == int_oo else int(upper)


def computed(graph: torch.fx.Graph, expression: Any, symbols: Mapping[Any, torch.fx.Node]) -> torch.fx.Node:
    """Append nodes to a graph that compute an expression from the nodes of its symbols; returns the last."""
    before = set(graph.nodes)
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    found = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    assert isinstance(found, torch.fx.Proxy), expression
    for node in graph.nodes:
        if node not in before:
            values = torch.fx.node.map_arg(node.args, lambda source: source.meta["val"])
            node.meta["val"] = node.target(*values)
    return found.node
