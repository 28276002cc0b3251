"""The quickest way to call an op from Python with the arguments that a node of a graph has.

* ``_VariableFunctions``, ``TensorBase`` and ``_nn`` hold what ``torch.mm`` or ``Tensor.view`` are. These parse their arguments
  in half of the time that an operator's own call takes (``OpOverload._op``), which takes less than ``torch.ops``.
* ``TorchDispatchMode`` sees what arrives at torch's dispatcher: such a function is called for a node where that is the call
  that the operator makes, of the same overload with the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_HOMES = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)

_known: dict[Any, Callable[..., Any]] = {}
"""By op and kinds of arguments, what calls it."""


class Calling(Protocol):
    """A node of a graph, or what stands for one: what it calls, with what, and what is known of the result."""

    @property
    def target(self) -> Any: ...
    @property
    def args(self) -> Any: ...
    @property
    def kwargs(self) -> Any: ...
    @property
    def meta(self) -> Any: ...


def quickest(node: Calling) -> Callable[..., Any]:
    """What to call for a node whose target is an operator: with the node's arguments, it does what the operator does."""
    op = node.target
    functions = _functions(op)
    if not functions:
        return op._op  # type: ignore[no-any-return]
    try:
        key = op, _kind(node.args), _kind(node.kwargs)
    except KeyError:  # a tensor of which nothing is known
        return op._op  # type: ignore[no-any-return]
    if key not in _known:
        with torch.no_grad():
            args, kwargs = _examples(tuple(node.args)), _examples(dict(node.kwargs))
            own = _arrived(op._op, args, kwargs)
            same = (one for one in functions if own is not None and _alike(own, _arrived(one, args, kwargs)))
            _known[key] = next(same, op._op)
    return _known[key]


@functools.cache
def _functions(op: OpOverload) -> tuple[Callable[..., Any], ...]:
    name = op._schema.name.partition("::")[2]
    return tuple(getattr(home, name) for home in _HOMES if hasattr(home, name)) if op.namespace == "aten" else ()


def _kind(value: Any) -> Any:
    """What decides how an argument is parsed: of a tensor dtype and whether it has dimensions, of a constant its value."""
    if hasattr(value, "meta"):
        value = value.meta["val"]
        return (value.dtype, value.dim() > 0) if isinstance(value, torch.Tensor) else type(value)
    if isinstance(value, dict):
        return tuple((name, _kind(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind, value))
    return type(value), str(value)


def _examples(value: Any) -> Any:
    """Arguments with values of their kinds in the place of nodes: tensors without memory, or numbers."""
    if hasattr(value, "meta"):
        value = value.meta["val"]
        if isinstance(value, torch.Tensor):
            return torch.empty((1,) * min(1, value.dim()), dtype=value.dtype, device="meta")
        return 1 if isinstance(value, int | torch.SymInt) else value
    if isinstance(value, dict):
        return {name: _examples(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_examples, value))
    return value


class _Arrived(BaseException):
    """Carries a call out of the dispatcher."""


class _Arrivals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends each call as it arrives at the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        raise _Arrived(func, args, kwargs or {})


def _arrived(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What arrives at the dispatcher where something is called; ``None`` where nothing does."""
    try:
        with _Arrivals():  # type: ignore[no-untyped-call]
            call(*args, **kwargs)
    except _Arrived as arrived:
        return arrived.args
    except Exception:  # noqa: BLE001 - a binding that does not take such arguments
        return None
    return None


def _alike(one: Any, other: Any) -> bool:
    """Whether two calls are of the same op, with the same tensors, numbers and so on."""
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)
