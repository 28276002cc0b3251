"""Whether an elementwise op gives an element the same bits wherever it lies: in a slice as in the whole.

On the CPU, torch's loops take elements in vectors, and what is left over at the end of a loop one by one. The two ways may
round otherwise: ``tanh`` of a vector is computed by another algorithm than that of a number. Example data would rarely show it.
So an op either does one operation that IEEE 754 rounds, or its loops leave nothing over, in slices and in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._torch import OpOverload, hint

aten = torch.ops.aten

VECTOR_BYTES = 128
"""A loop takes two vectors at a time, of at most 64 bytes each."""

GRAIN = 32768
"""Elements that are worth a thread of their own (``at::internal::GRAIN_SIZE``)."""

_ROUNDED = {
    *("abs", "clamp", "clamp_max", "clamp_min", "clone", "div", "eq", "ge", "gt", "hardtanh", "hardtanh_backward"),
    *("isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "leaky_relu", "leaky_relu_backward", "logical_and"),
    *(
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "relu",
        "sign",
        "sqrt",
    ),
    *("threshold_backward", "where", "_to_copy", "bitwise_and", "bitwise_not", "bitwise_or"),
}
"""Ops that do one operation which is rounded as IEEE 754 says, or none that rounds."""

_ROUNDED_UNSCALED = {"add", "sub"}
"""Likewise, unless they multiply by ``alpha`` before."""

_ROUNDED_TWICE = {"rsqrt", "reciprocal"}
"""Likewise in single and double precision; in less, one way may round in between."""


def rounds_alike(node: torch.fx.Node, cells: int, counts: Iterable[int]) -> bool:
    """Whether an op rounds each element in slices as in the whole.

    Args:
        node: an op that is elementwise.
        cells: how many cells the whole has.
        counts: how many cells slices have.
    """
    value = node.meta["val"]
    if value.device.type != "cpu" or is_rounded(node):
        return True
    specs = [TensorSpec.of(one.meta["val"], hint) for one in (node, *node.all_input_nodes)]
    if not all(spec.contiguous for spec in specs):
        return False
    lanes = VECTOR_BYTES // min(spec.dtype.itemsize for spec in specs)
    shape = specs[0].shape
    if any(spec.shape != shape and math.prod(spec.shape) != 1 for spec in specs) and shape[-1] % lanes:
        return False  # a loop over each row
    return not any(_leaves_over(count * math.prod(shape) // cells, lanes) for count in (cells, *counts))


def _leaves_over(elements: int, lanes: int) -> bool:
    """Whether a loop over so many elements, in as many threads as there are, takes some of them one by one."""
    threads = min(torch.get_num_threads(), -(-elements // GRAIN))
    return elements % lanes > 0 or -(-elements // max(1, threads)) % lanes > 0


def is_rounded(node: torch.fx.Node) -> bool:
    """Whether an op does one operation which is rounded as IEEE 754 says, or none that rounds, on the CPU."""
    if node.target is _ops.dropout_noise:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return False  # a product's parts are rounded several times
    name = node.target._schema.name.removeprefix("aten::")
    if name == "pow":
        return bool(node.args[1] == 2)
    if name == "div":
        return node.kwargs.get("rounding_mode") is None
    if name in _ROUNDED_UNSCALED:
        return bool(node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2)
    return name in _ROUNDED or (name in _ROUNDED_TWICE and node.meta["val"].dtype.itemsize >= 4)
