"""Which rows a mask of the batch chooses, found before the step: ``edge_index[:, source != target]``.

How many there are is not known when a graph is captured, and the graph breaks there. But where the mask is made of one tensor
that is given to the step, and of plain numbers, its indices can be computed before the step begins, as eager mode
computes them where the mask is used. They are an input of the step then, with a size that Dynamo guards on or makes a
symbol of. A mask of a tensor that was written to before, or one in code after a graph break, is left to Dynamo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_remat.capture._masks import Value, value_of
from lightning_remat.capture._torch import (
    BaseListVariable,
    BuiltinVariable,
    Source,
    TensorVariable,
    TupleVariable,
    VariableTracker,
    build_attribute,
    found_at,
    given_now,
    real_tensors,
    source_name,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """One mask: where its tensor is found among a call's arguments (see `found_at`), and how it is computed from it."""

    place: str
    mask: Value

    def of(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.mask.of(found_at(self.place, arguments)).nonzero()
        return found


class Early:
    """The indices of masks, computed before each call of a function, since their number depends on values given to it.

    Args:
        function: what is captured.
        on_found: called with the indices of each mask that is found while a call is captured.

    Attributes:
        values: the present call's indices, an attribute for each mask: what the captured code reads.
    """

    def __init__(self, function: Callable[..., Any], on_found: Callable[[torch.Tensor], None]) -> None:
        self._on_found = on_found
        function = function.forward if isinstance(function, torch.nn.Module) else function
        self._codes = _codes(function)
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        self._rows: dict[str, _Rows] = {}
        self._names: dict[str, str] = {}
        self._arguments: dict[str, Any] = {}
        self.values = types.SimpleNamespace()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The indices of the present call's masks: an ``int64`` tensor each, a row an element, a column a dimension."""
        return list(vars(self.values).values())

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call: compute the indices of all masks found so far, but for those whose tensor it is not given."""
        vars(self.values).clear()
        if self._signature is None:
            return
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # the call will say so
            return
        bound.apply_defaults()
        self._arguments = bound.arguments
        for key, rows in self._rows.items():
            with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                setattr(self.values, self._names[key], rows.of(bound.arguments))

    def end(self) -> None:
        """After a call: keep nothing of it."""
        vars(self.values).clear()
        self._arguments = {}

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """While Dynamo traces: masks that tensors are indexed by are found, and replaced by their indices."""
        builtin, method = BuiltinVariable.call_function, TensorVariable.call_method

        def of_python(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if variable.fn is operator.getitem and len(args) == 2 and args[0].is_tensor():
                args = [args[0], self._as_indices(tx, args[1].realize())]
            return builtin(variable, tx, args, kwargs)

        def of_tensor(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "__getitem__" and len(args) == 1:
                args = [self._as_indices(tx, args[0].realize())]
            return method(variable, tx, name, args, kwargs)

        BuiltinVariable.call_function = of_python  # type: ignore[assignment, method-assign]
        TensorVariable.call_method = of_tensor  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            BuiltinVariable.call_function = builtin  # type: ignore[method-assign]
            TensorVariable.call_method = method  # type: ignore[method-assign]

    def _as_indices(self, tx: Any, index: Any) -> Any:
        """What a tensor is indexed by, with the indices of masks in their place."""
        if tx.output.root_tx.f_code not in self._codes:
            return index
        several = isinstance(index, BaseListVariable) and index.python_type() is tuple
        items, changed = [], False
        for one in [part.realize() for part in index.items] if several else [index]:
            rows = self._rows_of(tx, one) if one.is_tensor() else None
            items += [one] if rows is None else rows
            changed = changed or rows is not None
        if not changed:
            return index
        return TupleVariable(items) if several or len(items) > 1 else items[0]

    def _rows_of(self, tx: Any, mask: Any) -> list[Any] | None:
        node = mask.as_proxy().node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or example.dtype != torch.bool or not example.dim():
            return None
        sources: set[Source] = set()
        value = value_of(node, sources)
        given = given_now(node.graph, next(iter(sources))) if len(sources) == 1 else None
        if value is None or given is None:
            return None
        place = source_name(next(iter(sources)))
        key = f"{place}: {_spelled(node)}"
        if not hasattr(self.values, self._names.get(key, "")):
            try:
                if found_at(place, self._arguments) is not given:
                    return None
            except (AttributeError, LookupError, NameError, TypeError):
                return None
            name = self._names.setdefault(key, f"rows_{len(self._names)}")
            rows = self._rows[key] = _Rows(place, value)
            with real_tensors():
                setattr(self.values, name, rows.of(self._arguments))
            self._on_found(getattr(self.values, name))
        found = build_attribute(tx, self.values, self._names[key])
        column = VariableTracker.build(tx, 1)
        places = [VariableTracker.build(tx, i) for i in range(example.dim())]
        return [found.call_method(tx, "select", [column, place], {}) for place in places]


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
