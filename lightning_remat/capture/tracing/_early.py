"""Tensors whose sizes depend on the values in a batch, computed before the step.

How many rows a mask chooses (see ``_rows``), or how many sequences of a packed batch go on at each time (``packed``), is
not known when a graph is captured, and the graph breaks there. But where it is computed from one tensor that is given to
the step, and from plain numbers, it can be computed before the step begins, as eager mode computes it where it is used.
The result is an input of the step then, with a size that Dynamo guards on or makes a symbol of. What depends on a tensor
that was written to before, or is in code after a graph break, is left to Dynamo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_remat.capture._torch import (
    Source,
    build_attribute,
    found_at,
    given_now,
    real_tensors,
    source_name,
)
from lightning_remat.capture.tracing._masks import value_of

Found = Callable[[Any], torch.Tensor]
"""Computes a tensor from a value that is given to a step, or from ``None`` where it depends on none."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """What is computed before each call: where its value is found among the call's arguments (see `found_at`), and how."""

    place: str
    compute: Found

    def of(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return self.compute(found_at(self.place, arguments))


class Early:
    """Tensors that are computed before each call of a function, since their sizes depend on values given to it.

    Args:
        function: what is captured.
        on_found: called with each of them when it is found while a call is captured.

    Attributes:
        values: those of the present call, an attribute each: what the captured code reads.
    """

    def __init__(self, function: Callable[..., Any], on_found: Callable[[torch.Tensor], None]) -> None:
        self._on_found = on_found
        function = function.forward if isinstance(function, torch.nn.Module) else function
        self._codes = _codes(function)
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}
        self._arguments: dict[str, Any] = {}
        self.values = types.SimpleNamespace()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the present call."""
        return list(vars(self.values).values())

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call: compute all that was found so far, but for those whose tensor it is not given."""
        vars(self.values).clear()
        if self._signature is None:
            return
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # the call will say so
            return
        bound.apply_defaults()
        self._arguments = bound.arguments
        for key, entry in self._entries.items():
            with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                setattr(self.values, self._names[key], entry.of(bound.arguments))

    def end(self) -> None:
        """After a call: keep nothing of it."""
        vars(self.values).clear()
        self._arguments = {}

    def traced(self, tx: Any) -> bool:
        """While Dynamo traces: whether it is in the function's own frame, before any graph break, or in what that calls."""
        return tx.output.root_tx.f_code in self._codes

    def of_tensor(self, tx: Any, tensor: Any, compute: Found, words: str) -> Any:
        """While Dynamo traces: a variable for what is computed from a tensor before each call.

        Args:
            tx: what translates.
            tensor: a variable of the tensor.
            compute: gives the result of the tensor.
            words: tell this computation from others of the same tensor.

        Returns:
            The variable, or ``None`` where the tensor is not known before the step.
        """
        node = tensor.as_proxy().node
        sources: set[Source] = set()
        value = value_of(node, sources)
        if value is None or len(sources) > 1:
            return None
        spelled = f"{words}: {_spelled(node)}"
        if not sources:
            return self._of_place(tx, "None", lambda given: compute(value.of(given)), spelled)
        (source,) = sources
        given = given_now(node.graph, source)
        place = source_name(source)
        if given is None or self._now(place) is not given:
            return None
        return self._of_place(tx, place, lambda given: compute(value.of(given)), spelled)

    def of_argument(self, tx: Any, variable: Any, compute: Found, words: str) -> Any:
        """Likewise for a variable of something else that is given to the call, which Dynamo has not looked into yet."""
        place = source_name(variable.source)
        return self._of_place(tx, place, compute, words) if self._now(place) is variable.peek_value() else None

    def _now(self, place: str) -> Any:
        try:
            return found_at(place, self._arguments)
        except (AttributeError, LookupError, NameError, TypeError):
            return None

    def _of_place(self, tx: Any, place: str, compute: Found, words: str) -> Any:
        key = f"{place}: {words}"
        if not hasattr(self.values, self._names.get(key, "")):
            name = self._names.setdefault(key, f"early_{len(self._names)}")
            entry = self._entries[key] = _Entry(place, compute)
            with real_tensors():
                setattr(self.values, name, entry.of(self._arguments))
            self._on_found(getattr(self.values, name))
        return build_attribute(tx, self.values, self._names[key])


def _spelled(node: torch.fx.Node) -> str:
    """How a node is computed, in words that are the same in each capture."""
    if node.op == "placeholder":
        return "given"
    parts: Any = torch.fx.node.map_arg((node.args, node.kwargs), _Spelled)
    return f"{getattr(node.target, '__name__', node.target)}{parts!r}"


class _Spelled(str):
    """`_spelled` of a node, for the arguments of another."""

    def __new__(cls, node: torch.fx.Node) -> _Spelled:
        return super().__new__(cls, _spelled(node))


def _codes(function: Any) -> set[types.CodeType]:
    """The code of a function or a method, by which its own frame is known from those after a graph break."""
    if isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return {code} if isinstance(code, types.CodeType) else set()
