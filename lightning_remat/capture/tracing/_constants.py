"""Questions that have one answer whatever the step is given, answered while it is captured.

They are the values of a tensor that is made of plain numbers alone (``torch.arange(2, x.dim()).tolist()``: the
dimensions to sum over), the name of a class of torch's, and ``torch.jit.isinstance`` of a tensor. Dynamo leaves these
to Python, and the graph breaks there. The answer comes from the real tensors and functions, as in eager mode. What
depends on anything given to the step, on random numbers, or was written to, is left to Dynamo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat.capture._torch import (
    BuiltinVariable,
    GetAttrVariable,
    SkipFunctionVariable,
    TensorVariable,
    VariableTracker,
    real_tensors,
)
from lightning_remat.capture.tracing._values import value_of

_READ = {"item", "tolist"}
_NUMBERS: set[Any] = {bool, float, int}
_NAMES = {"__module__", "__name__", "__qualname__"}
_MOST = 4096
"""Elements of the largest tensor that is answered for: each number that is read becomes a part of the captured code."""


@contextlib.contextmanager
def constants_are_known() -> Iterator[None]:
    """While Dynamo traces: what Python asks of constants is answered."""
    tensor, builtin = TensorVariable.call_method, BuiltinVariable.call_function
    skipped, attribute = SkipFunctionVariable.call_function, GetAttrVariable.call_method

    def of_tensor(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = _number(self) if name in _READ and not args and not kwargs else None
        if found is None:
            return tensor(self, tx, name, args, kwargs)
        return VariableTracker.build(tx, getattr(found, name)())

    def of_python(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = self.fn in _NUMBERS and len(args) == 1 and not kwargs and args[0].is_tensor()
        found = _number(args[0].realize()) if asked else None
        if found is None or found.numel() != 1:
            return builtin(self, tx, args, kwargs)
        return VariableTracker.build(tx, self.fn(found.item()))

    def of_others(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.jit.isinstance and len(args) == 2 and not kwargs:
            found = _is_instance(args[0].realize(), args[1].realize())
            if found is not None:
                return VariableTracker.build(tx, found)
        return skipped(self, tx, args, kwargs)

    def of_attribute(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        text = _name(self)
        if text is None:
            return attribute(self, tx, name, args, kwargs)
        return VariableTracker.build(tx, text).call_method(tx, name, args, kwargs)

    TensorVariable.call_method = of_tensor  # type: ignore[method-assign]
    BuiltinVariable.call_function = of_python  # type: ignore[method-assign]
    SkipFunctionVariable.call_function = of_others  # type: ignore[method-assign]
    GetAttrVariable.call_method = of_attribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorVariable.call_method = tensor  # type: ignore[method-assign]
        BuiltinVariable.call_function = builtin  # type: ignore[method-assign]
        SkipFunctionVariable.call_function = skipped  # type: ignore[method-assign]
        GetAttrVariable.call_method = attribute  # type: ignore[method-assign]


def _number(tensor: Any) -> torch.Tensor | None:
    """The real tensor, where it is made of plain numbers alone; ``None`` elsewhere."""
    node = tensor.as_proxy().node
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or any(not isinstance(size, int) for size in example.shape):
        return None
    value = value_of(node) if example.numel() <= _MOST else None
    if value is None or value.sources:
        return None
    with real_tensors(), torch.no_grad(), contextlib.suppress(TypeError):
        found: torch.Tensor = value.of({})
        return found
    return None


def _is_instance(value: Any, kind: Any) -> bool | None:
    """``torch.jit.isinstance``; ``None`` where the value is neither a tensor nor a constant."""
    if value.is_tensor():
        given: Any = value.as_proxy().node.meta.get("example_value")
    elif value.is_python_constant():
        given = value.as_python_constant()
    else:
        return None
    asked = _type(kind)
    if asked is None or (given is None and value.is_tensor()):
        return None
    question: Any = torch.jit.isinstance
    return bool(question(given, asked))


def _type(kind: Any) -> Any:
    return getattr(kind, "value", None) if not kind.is_python_constant() else kind.as_python_constant()


def _name(attribute: Any) -> str | None:
    """The attribute's value, where it is a name of a class or function; ``None`` elsewhere."""
    owner: Any = getattr(attribute.obj, "value", None)
    found = getattr(owner, attribute.name, None) if attribute.name in _NAMES and callable(owner) else None
    return found if isinstance(found, str) else None
