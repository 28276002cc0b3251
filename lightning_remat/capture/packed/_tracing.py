"""Packed sequences while Dynamo traces: what it would skip, or break the graph at, is traced as ``_stand_ins`` have it.

* ``pack_padded_sequence`` and ``pad_packed_sequence``, which Dynamo skips (some releases trace one of them), become
  `_stand_ins.pack_padded` and `_stand_ins.pad_packed`;
* ``batch_sizes[0]``, which torch's layers and `pad_packed` ask for, is the number of sequences, a size;
* torch's recurrent layers, where they are given a packed sequence, become `_stand_ins.recurrent_layers`.

``batch_sizes`` is computed from the lengths before the step (see ``tracing._early``), or given to it in a packed sequence.
Where neither is so, the sequence is left alone, as it is off the CPU and under autocast, which casts weights once for all
times.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils import rnn

from lightning_remat.capture._torch import (
    BaseListVariable,
    BuiltinVariable,
    LazyVariableTracker,
    SkipFunctionVariable,
    UserFunctionVariable,
    VariableTracker,
    observed_ops,
    real_tensors,
    replaced_handlers,
)
from lightning_remat.capture.packed import _stand_ins
from lightning_remat.capture.packed._ops import KINDS
from lightning_remat.capture.tracing._early import Early

_ASKING = {torch.nn.modules.rnn.__file__, _stand_ins.__file__}
"""Files of code that asks ``batch_sizes[0]`` for the number of sequences."""


@contextlib.contextmanager
def packed_sequences(early: Early) -> Iterator[None]:
    """While Dynamo traces: packed sequences are captured."""
    skipped, traced = SkipFunctionVariable.call_function, UserFunctionVariable.call_function
    builtin = BuiltinVariable.call_function
    packing = _Packing(early)

    def call_skipped(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = packing.called(tx, variable.value, list(args), kwargs) if early.traced(tx) else None
        return skipped(variable, tx, args, kwargs) if found is None else found

    def call_traced(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = packing.called(tx, variable.fn, list(args), kwargs) if early.traced(tx) else None
        return traced(variable, tx, args, kwargs) if found is None else found

    def call_builtin(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = packing.sequences(tx, *args) if variable.fn is operator.getitem and len(args) == 2 else None
        return builtin(variable, tx, args, kwargs) if found is None else found

    SkipFunctionVariable.call_function = call_skipped  # type: ignore[assignment, method-assign]
    UserFunctionVariable.call_function = call_traced  # type: ignore[assignment, method-assign]
    BuiltinVariable.call_function = call_builtin  # type: ignore[assignment, method-assign]
    try:
        with replaced_handlers(dict.fromkeys(KINDS, packing.layers)) as packing.own:
            yield
    finally:
        SkipFunctionVariable.call_function = skipped  # type: ignore[method-assign]
        UserFunctionVariable.call_function = traced  # type: ignore[method-assign]
        BuiltinVariable.call_function = builtin  # type: ignore[method-assign]


class _Packing:
    """The packed sequences of what is being traced.

    Attributes:
        own: the handlers of torch's recurrent layers that are not over packed sequences.
    """

    def __init__(self, early: Early) -> None:
        self._early = early
        self._sequences: dict[torch.fx.Node, Any] = {}
        self.own: Mapping[Any, Callable[..., Any]] = {}

    def called(self, tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a call of one of torch's functions becomes; ``None`` where it is left alone."""
        if function is rnn.pack_padded_sequence:
            names = ("input", "lengths", "batch_first", "enforce_sorted")
            return self._pack(tx, **dict(zip(names, args, strict=False)), **kwargs)
        if function is rnn.pad_packed_sequence:
            return _call(tx, _stand_ins.pad_packed, args, kwargs)
        return None

    def _pack(self, tx: Any, *, lengths: Any, **named: Any) -> Any:
        ordered = named.get("enforce_sorted")
        ordered = True if ordered is None else ordered.as_python_constant()
        listed = isinstance(lengths, LazyVariableTracker) and not lengths.is_realized() and _are_numbers(lengths)
        find = functools.partial(self._early.of_argument if listed else self._early.of_tensor, tx)
        if not listed:
            lengths = lengths.realize()
            if not lengths.is_tensor():
                return None
        sizes = find(lengths, functools.partial(_batch_sizes, ordered=ordered), f"batch sizes, {ordered}")
        rows = find(lengths, _rows, "rows")
        if listed:
            lengths = find(lengths, torch.as_tensor, "lengths")
        if sizes is None or rows is None:
            return None
        self._sequences[sizes.as_proxy().node] = lengths.call_method(tx, "size", [VariableTracker.build(tx, 0)], {})
        return _call(tx, _stand_ins.pack_padded, [sizes, rows, named.pop("input"), lengths], named)

    def sequences(self, tx: Any, tensor: Any, index: Any) -> Any:
        """What ``batch_sizes[0]`` is, for code that asks for the number of sequences; ``None`` for anything else."""
        if tx.f_code.co_filename not in _ASKING or not tensor.is_tensor():
            return None
        if not index.is_python_constant() or index.as_python_constant() != 0:
            return None
        node = tensor.as_proxy().node
        if node not in self._sequences:
            found = self._early.of_tensor(tx, tensor, _sequences, "sequences") if self._early.traced(tx) else None
            if found is None:
                return None
            self._sequences[node] = found.call_method(tx, "size", [VariableTracker.build(tx, 0)], {})
        return self._sequences[node]

    def layers(self, called: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call of one of torch's functions for recurrent layers becomes; ``None`` leaves it to Dynamo."""
        left = self.own[called.value](called, tx, *args, **kwargs)  # raises where it is left to eager mode
        packed = len(args) > 3 and isinstance(args[3].realize(), BaseListVariable)  # the weights
        if not packed or torch.is_autocast_enabled("cpu"):
            return left
        data = args[0].as_proxy().node.meta["example_value"]
        fused = called.value is torch.lstm and fuses_equal_lengths(data.dtype, torch.backends.mkldnn.enabled)
        given = [VariableTracker.build(tx, KINDS[called.value]), VariableTracker.build(tx, fused), *args]
        return _call(tx, _stand_ins.recurrent_layers, given, kwargs)


@functools.cache
def fuses_equal_lengths(dtype: torch.dtype, enabled: bool) -> bool:
    """Whether eager runs an LSTM over a packed sequence of equal lengths as the one op of oneDNN: newer releases of torch do.

    Args:
        dtype: the layer's.
        enabled: whether oneDNN is.
    """
    del enabled  # read by torch
    data, hidden, cell, *weights = (
        torch.zeros(shape, dtype=dtype, device="cpu") for shape in ((1, 1), *2 * [(1, 1, 1)], *2 * [(4, 1)])
    )
    called = []

    def note(op: Any, _args: Any, _kwargs: Any, _number: int, run: Callable[[], Any]) -> Any:
        called.append(op)
        return run()

    with real_tensors(), torch.no_grad(), observed_ops(note):
        ones = torch.ones(1, dtype=torch.int64, device="cpu")
        torch.lstm(data, ones, [hidden, cell], weights, False, 1, 0.0, False, False)
    return torch.ops.aten.mkldnn_rnn_layer.default in called


def _call(tx: Any, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return VariableTracker.build(tx, function).call_function(tx, args, kwargs)


def _are_numbers(variable: Any) -> bool:
    value = variable.peek_value()
    return variable.source is not None and isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value)


def _batch_sizes(lengths: Any, *, ordered: bool) -> torch.Tensor:
    """How many sequences of these lengths go on at each time: ``int64``, of the longest one's length; on the CPU."""
    padded = torch.zeros(1, device="cpu").expand(int(torch.as_tensor(lengths, device="cpu").max()), len(lengths), 1)
    return rnn.pack_padded_sequence(padded, lengths, enforce_sorted=ordered).batch_sizes


def _rows(lengths: Any) -> torch.Tensor:
    """An empty tensor with as many rows as there are in sequences of these lengths."""
    return torch.empty(int(torch.as_tensor(lengths, device="cpu").sum()), 0, device="cpu")


def _sequences(batch_sizes: torch.Tensor) -> torch.Tensor:
    """An empty tensor with as many rows as there are sequences."""
    return torch.empty(int(batch_sizes[0]), 0, device="cpu")
