"""How a value in a graph that Dynamo is capturing is computed from what the step is given, to compute it elsewhere.

What the step has written to so far is written again, to copies: ``labels[ids == pad] = -100``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from lightning_remat.capture._torch import (
    OpOverload,
    Source,
    copied,
    given,
    hint,
    without_functions_of_ones_own,
)

_VIEWS = {
    *("to", "cpu", "bool", "long", "int", "float", "double", "half", "bfloat16", "type_as", "detach", "contiguous"),
    *("getitem", "select", "narrow", "flatten", "squeeze", "unsqueeze", "view", "view_as", "reshape", "reshape_as"),
    *("transpose", "permute", "movedim", "numpy_T", "mT", "expand", "expand_as", "broadcast_to"),
    *("unbind", "chunk", "split"),
}
"""Ops whose result may have the memory of their first argument."""

_UNDERSTOOD = {
    *_VIEWS,
    *("arange", "linspace", "eye", "tensor", "ones", "zeros", "full"),
    *(f"{make}_like" for make in ("ones", "zeros", "full")),
    *(f"new_{make}" for make in ("ones", "zeros", "full", "tensor")),
    *(
        "clone",
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "floordiv",
        "floor_divide",
        "mod",
        "remainder",
        "neg",
        "abs",
        "sign",
    ),
    *("subtract", "multiply", "divide", "true_divide", "reciprocal", "pow", "square", "sqrt", "rsqrt"),
    *("floor", "ceil", "round", "trunc", "clamp", "clip", "maximum", "minimum", "where", "masked_fill"),
    *("exp", "log", "log1p", "log2", "log10", "cos", "sin", "sigmoid", "tanh", "relu"),
    *("sym_float", "sym_int", "sym_max", "sym_min"),
    *("sum", "max", "min", "amax", "amin", "mean", "std", "var", "norm", "prod", "nansum", "nanmean"),
    *("any", "all", "_is_all_true", "_is_any_true", "count_nonzero", "cumsum", "cumprod", "argmax", "argmin", "sort"),
    *("eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite", "isin"),
    *("not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("and", "and_", "or", "or_", "xor", "invert", "logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("repeat", "tile", "cat", "stack", "diff", "pad", "flip", "roll", "tril", "triu"),
    *("gather", "index_select", "take_along_dim", "one_hot", "searchsorted", "bucketize"),
}
"""Ops by which a value may be computed from tensors of the batch or from constants: none draws random numbers or
depends on state."""

_PICKING = {"gather", "index_select", "take_along_dim", "one_hot", "scatter", "index_fill"}
"""Of these, those that are given indices in a tensor, as ``getitem`` and ``setitem`` may be."""

_UNDERSTOOD_IN_PLACE = {
    *("add", "sub", "mul", "div", "neg", "abs", "floor", "ceil", "round", "clamp", "exp", "log", "sqrt", "pow"),
    *("copy", "fill", "zero", "masked_fill", "index_fill", "scatter", "tril", "triu"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
}
"""Methods that write to their tensor alone, by the names that they have without the ``_``."""

_OPERATORS = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
}
"""Python's operators that write to their first operand."""


_MOST_COPIED = 16 * 1024**2
"""Bytes that are copied for one value in each call, at most."""

_NORMS = {"batch_norm", "instance_norm"}
"""Functions that write to their statistics, and count no version then."""

_ATTRIBUTES = {"T", "mT", "data", "values", "indices"}
"""Of tensors, and of what functions return."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A line's result, in the arguments of another."""

    line: int

    def __repr__(self) -> str:
        return f"#{self.line}"


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    source: Source
    dim: int | None
    """The one that it is the size of."""

    def of(self, given: Mapping[Source, Any], _found: Sequence[Any]) -> Any:
        return given[self.source] if self.dim is None else given[self.source].size(self.dim)

    def words(self, place: Callable[[Source], str]) -> str:
        return place(self.source) if self.dim is None else f"{place(self.source)}.size({self.dim})"


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    call: Callable[..., Any]
    args: Any
    kwargs: Any
    dtype: torch.dtype | None
    """Of the result in the step, under its autocast."""

    def of(self, _given: Mapping[Source, Any], found: Sequence[Any]) -> Any:
        def as_value(part: Any) -> Any:
            return found[part.line] if isinstance(part, _Found) else part

        args, kwargs = map_aggregate((self.args, self.kwargs), as_value)
        result = self.call(*args, **kwargs)
        if self.dtype is not None and result.dtype != self.dtype:
            raise TypeError(f"{result.dtype} for {self.dtype}")
        return result

    def words(self, _place: Callable[[Source], str]) -> str:
        return f"{getattr(self.call, '__name__', self.call)}{self.args!r}{self.kwargs or ''}{self.dtype or ''}"


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value as a function of what is given to the step; it keeps no node, and no batch, alive.

    Attributes:
        sources: of what is given to the step, and it is computed from.
    """

    sources: frozenset[Source]
    _lines: tuple[_Given | _Call, ...]
    _result: int
    _copied: frozenset[Source]

    def of(self, given: Mapping[Source, Any]) -> Any:
        """The value.

        Args:
            given: tensors and numbers by their sources; none of them is written to.

        Raises:
            TypeError: where something else is given, or a tensor is of another type than in the step (under autocast).
        """
        other = [type(one).__name__ for one in given.values() if not isinstance(one, (torch.Tensor, int, float))]
        if other:
            raise TypeError(f"{other[0]} for a tensor or a number")
        given = {key: copied(one) if key in self._copied else one for key, one in given.items()}
        found: list[Any] = []
        with without_functions_of_ones_own():
            for line in self._lines:
                found.append(line.of(given, found))
        return found[self._result]

    def words(self, place: Callable[[Source], str]) -> str:
        """How it is computed: the same text in each capture, and another one for any other value.

        Args:
            place: names a source.
        """
        return f"#{self._result} of {'; '.join(line.words(place) for line in self._lines)}"


def value_of(node: torch.fx.Node) -> Value | None:
    """How a node's value is computed where the graph ends so far; ``None`` where that is not understood.

    Args:
        node: of the graph that Dynamo is capturing.
    """
    needed = _needed(node)
    if needed is None:
        return None
    lines: list[_Given | _Call] = []
    found: dict[Any, _Found] = {}
    memory = Counter[int]()  # of what is given

    def as_found(part: Any) -> Any:
        return found.get(part, part) if isinstance(part, torch.fx.Node) else part

    for one in needed:
        read = given(one)
        if read is not None:
            lines.append(_Given(*read))
            memory.update(_memory([one]))
        elif not _is_understood(one):
            return None
        else:
            call: Any = getattr(torch.Tensor, str(one.target)) if one.op == "call_method" else one.target
            args, kwargs = map_aggregate((one.args, one.kwargs), as_found)
            lines.append(_Call(call, args, kwargs, getattr(one.meta.get("example_value"), "dtype", None)))
        found[one] = _Found(len(lines) - 1)
    writing = [one for one in needed if _written_by(one)]
    written = set[int]().union(*map(_written_by, writing))
    copies = set[torch.fx.Node]().union(*(_seen_through(one.args[0]) for one in writing))
    tensors = (tensor for one in copies for tensor in _tensors(one))
    nbytes = sum(hint(tensor.numel()) * tensor.element_size() for tensor in tensors)
    if any(memory[one] > 1 for one in written) or nbytes > _MOST_COPIED:  # each would have a copy of its own
        return None
    sources, copied_ones = (
        frozenset(line.source for line in some if isinstance(line, _Given))
        for some in (lines, (lines[found[one].line] for one in copies))
    )
    return Value(sources, tuple(lines), found[node].line, copied_ones)


def _seen_through(node: Any) -> set[torch.fx.Node]:
    """The node of what is given to the step, if another node's memory may be that of it."""
    if not isinstance(node, torch.fx.Node):
        return set()
    if given(node) is not None:
        return {node}
    is_view = _name(node) in _VIEWS or _name(node) == "getattr" or _written_by(node)
    return _seen_through(node.args[0]) if is_view and node.args else set()


def _needed(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The nodes that a node's value follows from where the graph ends so far, in order.

    ``None`` where something writes to their memory in a way that is not understood.
    """
    needed, read, writes = {node}, _memory([node]), Counter[int]()
    for one in reversed(node.graph.nodes):
        if not one.op.startswith("call"):
            continue
        written = _written_by(one)
        writes.update(written)
        if not written.isdisjoint(read):
            if not _is_understood(one):
                return None
            needed.add(one)
        if one in needed and given(one) is None:
            needed.update(one.all_input_nodes)
            read |= _memory(one.all_input_nodes)
    for one in needed:
        for tensor in _tensors(one):
            if tensor._version > writes[_storage(tensor)]:  # by what no name tells
                return None
    return [one for one in node.graph.nodes if one in needed]


def _is_understood(node: torch.fx.Node) -> bool:
    name = _name(node)
    if not _is_torchs(node) or "out" in node.kwargs or _may_abort(node):
        return False
    if name == "getattr":
        return node.args[1] in _ATTRIBUTES
    return name in _UNDERSTOOD or name in _OPERATORS or (name.endswith("_") and name[:-1] in _UNDERSTOOD_IN_PLACE)


def _may_abort(node: torch.fx.Node) -> bool:
    """Whether an index that is out of range would end the process's use of a device: the step may not come to this op."""
    if _name(node) in {"getitem", "setitem"}:
        indices = [tensor for one in _nodes(node.args[1]) for tensor in _tensors(one)]
        picks = any(tensor.dtype is not torch.bool for tensor in indices)  # a mask's shape is looked at before
    else:
        picks = _name(node).removesuffix("_") in _PICKING
    return picks and any(tensor.device.type != "cpu" for one in node.all_input_nodes for tensor in _tensors(one))


def _written_by(node: torch.fx.Node) -> set[int]:
    """The memory that a node may write to, also where torch counts no version (through ``.data``)."""
    if not node.op.startswith("call"):
        return set()
    name = str(getattr(node.target, "__name__", node.target))
    of_python = getattr(node.target, "__module__", None) == "_operator"  # `and_` writes nothing
    by_name = (name.endswith("_") and not name.endswith("__")) or name.startswith("_foreach")
    if name in _NORMS:
        return _memory(node.all_input_nodes[1:])
    in_place = _name(node) in _OPERATORS or (by_name and not of_python) or _is_told_to_write(node)
    if not in_place and "out" not in node.kwargs and _is_torchs(node):
        return set()
    return _memory(node.all_input_nodes[:1] if _is_understood(node) else node.all_input_nodes)


def _is_told_to_write(node: torch.fx.Node) -> bool:
    """Whether a call has ``inplace=True``, or is of an operator that writes."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    names = _arguments(node.target) if node.op == "call_function" else ()
    return bool(node.kwargs.get("inplace") or dict(zip(names, node.args, strict=False)).get("inplace"))


@functools.lru_cache(1024)
def _arguments(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function in C++
        return ()


def _name(node: torch.fx.Node) -> str:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.removeprefix("__").removesuffix("__")  # before torch 2.12, of operators


def _is_torchs(node: torch.fx.Node) -> bool:
    """Whether a node calls a method, or a function of torch's or Python's, and no operator of somebody's own by its name."""
    if node.op == "call_method":
        return True
    if type(node.target).__module__ == "torch._ops":
        return str(node.target).startswith("aten.")
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and module.partition(".")[0] in {"torch", "_operator", "builtins"}


def _memory(nodes: Sequence[torch.fx.Node]) -> set[int]:
    return {_storage(tensor) for one in nodes for tensor in _tensors(one)}


def _tensors(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    def among(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (tensor for one in value for tensor in among(one))

    return among(node.meta.get("example_value"))


def _nodes(argument: Any) -> list[torch.fx.Node]:
    """The nodes in an argument of a node."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(argument, found.append)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
