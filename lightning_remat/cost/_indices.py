"""Which integer tensors are indices, and into how many rows.

An op's time depends on where its indices point: when all of them are 0, every write lands on one row, which serializes
a kernel that scatters. `index_bounds` names the index tensors of ops for which this matters, so that made-up indices
can spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_remat.capture import OpCall, TensorSpec

_ALONG_DIM = frozenset({"gather", "scatter", "scatter_add", "index_select", "index_add"})
_LISTED = frozenset({"index", "index_put", "_unsafe_index", "_unsafe_index_put"})
READ_BY_INDEX = frozenset({"embedding", "gather", "index_select", "index", "_unsafe_index"})
"""Ops that read only the rows of their first tensor that the indices name."""


def aten_name(call: OpCall) -> str:
    """The ATen op called, without namespace and overload, such as ``"embedding"``; "" for any other target."""
    namespace, _, rest = str(call.target).partition(".")
    return rest.partition(".")[0] if namespace == "aten" else ""


def index_bounds(call: OpCall) -> Mapping[int, int]:
    """The index tensors of a call: position among ``call.inputs()``, and the number of rows that they point into."""
    name, args = aten_name(call), call.args
    bound: Any = None
    if name == "embedding" and len(args) >= 2 and isinstance(args[0], TensorSpec):
        bound = args[0].shape[0]
    elif name == "embedding_dense_backward" and len(args) >= 3:
        bound = args[2]
    elif name in _ALONG_DIM and len(args) >= 3 and isinstance(args[0], TensorSpec) and isinstance(args[1], int):
        bound = args[0].shape[args[1]] if args[0].shape else 1
    elif name in _LISTED and len(args) >= 2 and isinstance(args[0], TensorSpec):
        return _listed_bounds(args[0], args[1])
    return {1: bound} if isinstance(bound, int) and bound > 0 else {}


def _listed_bounds(source: TensorSpec, indices: Any) -> Mapping[int, int]:
    """Bounds for ``source[indices]``, where ``None`` stands for a whole dimension."""
    if any(isinstance(index, TensorSpec) and not _is_integer(index) for index in indices):
        return {}  # a mask takes up as many dimensions as it has: leave such a call alone
    positions = [dim for dim, index in enumerate(indices) if index is not None]
    return {1 + count: source.shape[dim] for count, dim in enumerate(positions) if source.shape[dim] > 0}


def _is_integer(spec: TensorSpec) -> bool:
    """Integers of more than one byte: a byte tensor may be a mask."""
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex) and spec.dtype.itemsize > 1
