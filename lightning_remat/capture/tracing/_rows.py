"""Rows that a mask of the batch chooses, while Dynamo traces: ``edge_index[:, source != target]``.

The indices of the mask are computed before the step (see ``_early``), and the tensor is indexed by them. So it is where rows
are replaced by what has a gradient (``hidden[masked] = token``): the backward picks them out again. The indices themselves
(``nonzero``) are computed then too, those of rows that are repeated (``repeat_interleave``), and the classes that are there
(``unique``, ``bincount``). Where that is not known before the step, the graph breaks there.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch import (
    BaseListVariable,
    BuiltinVariable,
    TensorVariable,
    TupleVariable,
    VariableTracker,
    replaced_handlers,
    unimplemented,
)
from lightning_remat.capture.tracing._early import Early


@contextlib.contextmanager
def rows_are_found(early: Early) -> Iterator[None]:
    """While Dynamo traces: masks that tensors are indexed by are found, and replaced by their indices."""
    builtin, method = BuiltinVariable.call_function, TensorVariable.call_method
    set_item = TensorVariable.method___setitem__

    def of_python(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.fn is operator.getitem and len(args) == 2 and args[0].is_tensor():
            args = [args[0], _as_indices(early, tx, args[0], args[1].realize())]
        return builtin(variable, tx, args, kwargs)

    def of_tensor(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__getitem__" and len(args) == 1:
            args = [_as_indices(early, tx, variable, args[0].realize())]
        elif name in _CHOOSING and early.traced(tx):
            found = _CHOOSING[name](early, tx, variable, *args, **kwargs)
            if found is not None:
                return found
        return method(variable, tx, name, args, kwargs)

    def of_function(choose: Any, _function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        known = early.traced(tx) and args and args[0].is_tensor()
        return choose(early, tx, *args, **kwargs) if known else None

    functions = {getattr(torch, name): functools.partial(of_function, choose) for name, choose in _CHOOSING.items()}
    functions[torch.where] = functools.partial(of_function, _where)

    def written(variable: Any, tx: Any, index: Any, value: Any) -> Any:
        if torch.is_grad_enabled() and _has_gradient(value.realize()):
            index = _as_indices(early, tx, variable, index.realize())
            if any(map(_mask_dims, _parts(index))):
                unimplemented(
                    gb_type="rows replaced by a tensor with a gradient",
                    context=str(index),
                    explanation="How many rows the mask chooses is not known before the step.",
                    hints=[],
                )
        return set_item(variable, tx, index, value)

    replacements = (
        (BuiltinVariable, "call_function", of_python),
        (TensorVariable, "call_method", of_tensor),
        (TensorVariable, "method___setitem__", written),
    )
    with replaced(replacements), replaced_handlers(functions):
        yield


def _as_indices(early: Early, tx: Any, tensor: Any, index: Any) -> Any:
    """What a tensor is indexed by, with the indices of masks in their place."""
    if not early.traced(tx) or not _are_alike(tensor, _parts(index)):
        return index
    items, changed = [], False
    for one in _parts(index):
        rows = _rows_of(early, tx, one) if one.is_tensor() else None
        items += [one] if rows is None else rows
        changed = changed or rows is not None
    if not changed:
        return index
    return TupleVariable(items) if _is_tuple(index) or len(items) > 1 else items[0]


def _are_alike(tensor: Any, index: Sequence[Any]) -> bool:
    """Whether the masks that a tensor is indexed by have the sizes of its dimensions in their places: else it is an error."""
    masked = _example(tensor)
    if masked is None:
        return False
    plain = [one.as_python_constant() if one.is_python_constant() else one for one in index]
    dims = [0 if one is None else _mask_dims(one) or 1 if isinstance(one, VariableTracker) else 1 for one in plain]
    place = 0
    for one, count in zip(plain, dims, strict=True):
        if one is ...:
            place = masked.dim() - sum(dims) + place + 1
            continue
        if isinstance(one, bool):
            return False
        mask = _example(one) if isinstance(one, VariableTracker) and _mask_dims(one) else None
        if mask is not None and masked.shape[place : place + count] != mask.shape:
            return False
        place += count
    return True


def _is_tuple(index: Any) -> bool:
    return isinstance(index, BaseListVariable) and index.python_type() is tuple


def _parts(index: Any) -> list[Any]:
    return [part.realize() for part in index.items] if _is_tuple(index) else [index]


def _example(variable: Any) -> torch.Tensor | None:
    """The fake tensor of a variable; ``None`` where it is no tensor."""
    found = variable.as_proxy().node.meta.get("example_value") if variable.is_tensor() else None
    return found if isinstance(found, torch.Tensor) else None


def _has_gradient(variable: Any) -> bool:
    example = _example(variable)
    return example is not None and example.requires_grad


def _mask_dims(variable: Any) -> int:
    """How many dimensions a mask has; 0 for anything else."""
    example = _example(variable)
    return example.dim() if example is not None and example.dtype == torch.bool else 0


def _rows_of(early: Early, tx: Any, mask: Any) -> list[Any] | None:
    dims = _mask_dims(mask)
    found = early.of_tensor(tx, mask, torch.Tensor.nonzero, "rows", rows=True) if dims else None
    return None if found is None else _columns(tx, found, dims)


def _columns(tx: Any, rows: Any, dims: int) -> list[Any]:
    column = VariableTracker.build(tx, 1)
    places = [VariableTracker.build(tx, i) for i in range(dims)]
    return [rows.call_method(tx, "select", [column, place], {}) for place in places]


def _nonzero(early: Early, tx: Any, tensor: Any, *, as_tuple: Any = None) -> Any:
    """``nonzero``, of a tensor of any type."""
    example = _example(tensor)
    if example is None or not example.dim():
        return None
    found = early.of_tensor(tx, tensor, torch.Tensor.nonzero, "rows", rows=True)
    if found is None or as_tuple is None or not as_tuple.as_python_constant():
        return found
    return TupleVariable(_columns(tx, found, example.dim()))


def _argwhere(early: Early, tx: Any, tensor: Any) -> Any:
    return _nonzero(early, tx, tensor)


def _where(early: Early, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``where`` of a condition alone."""
    return (
        _nonzero(early, tx, *args, as_tuple=VariableTracker.build(tx, True)) if len(args) == 1 and not kwargs else None
    )


def _masked_select(early: Early, tx: Any, tensor: Any, mask: Any) -> Any:
    """``masked_select``, where no gradient comes to what is selected: that would be computed in another way."""
    example, masked = _example(tensor), _example(mask)
    if example is None or masked is None or example.shape != masked.shape or example.requires_grad:
        return None
    rows = _rows_of(early, tx, mask)
    return None if rows is None else tensor.call_method(tx, "__getitem__", [TupleVariable(rows)], {})


def _repeat_interleave(early: Early, tx: Any, tensor: Any, repeats: Any = None, dim: Any = None, **kwargs: Any) -> Any:
    """``repeat_interleave``, of each row by a number of its own: the rows are selected by their repeated indices."""
    rows, counts = _example(tensor), _example(tensor if repeats is None else repeats)
    if kwargs or rows is None or counts is None or counts.dim() != 1 or counts.shape == (1,) or rows.is_complex():
        return None
    along = None if dim is None else dim.as_python_constant()
    if repeats is not None and counts.shape[0] != (rows.numel() if along is None else rows.shape[along]):
        return None  # an error
    found = early.of_tensor(tx, tensor if repeats is None else repeats, torch.repeat_interleave, "repeated", rows=True)
    if found is None or repeats is None:
        return found
    if along is None:
        tensor, dim = tensor.call_method(tx, "flatten", [], {}), VariableTracker.build(tx, 0)
    return tensor.call_method(tx, "index_select", [dim, found], {})


def _bincount(early: Early, tx: Any, tensor: Any, weights: Any = None, minlength: Any = None) -> Any:
    """``bincount``, without weights."""
    least = 0 if minlength is None else minlength.as_python_constant()
    if _example(tensor) is None or not (weights is None or weights.is_constant_none()):
        return None
    return early.of_tensor(tx, tensor, functools.partial(torch.bincount, minlength=least), f"counts {least}", rows=True)


_MORE = ("return_inverse", "return_counts")


def _distinct(name: str, options: Sequence[str], early: Early, tx: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``unique`` or ``unique_consecutive``, by its options: values and, if asked for, each element's index and the counts."""
    if _example(tensor) is None:
        return None
    given = {**dict(zip(options, args, strict=False)), **kwargs}
    plain = {key: one.as_python_constant() for key, one in given.items()}
    more = [key for key in _MORE if plain.get(key)]

    def part(number: int, value: torch.Tensor) -> torch.Tensor:
        found: Any = getattr(torch, name)(value, **plain)
        one: torch.Tensor = found[number] if more else found
        return one

    computed = [functools.partial(part, i) for i in range(1 + len(more))]
    found = [early.of_tensor(tx, tensor, one, f"{i} of {name} {plain}", rows=True) for i, one in enumerate(computed)]
    if None in found:
        return None
    return TupleVariable(found) if more else found[0]


_CHOOSING: dict[str, Any] = {
    "nonzero": _nonzero,
    "argwhere": _argwhere,
    "masked_select": _masked_select,
    "repeat_interleave": _repeat_interleave,
    "bincount": _bincount,
    "unique": functools.partial(_distinct, "unique", ("sorted", *_MORE, "dim")),
    "unique_consecutive": functools.partial(_distinct, "unique_consecutive", (*_MORE, "dim")),
}
