"""Which ops may be in a run that is one compiled kernel.

With eager's numbers, on the CPU, they are those of which each element is rounded once, as IEEE 754 says. There, a vector loop
computes ``exp`` by another algorithm than a loop over single numbers, torch's own kernels contract some products and sums and
not others, and sums have an order: example data would show some of this too rarely. On other devices it is every elementwise
op: what differs there differs in all elements alike, and is seen when a run is compared with its ops.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._nodes import is_tensor
from lightning_remat.capture._torch import hint, real_tensors
from lightning_remat.capture.tiling._rounding import is_rounded
from lightning_remat.capture.tiling._rules import is_elementwise

aten = torch.ops.aten
Node = torch.fx.Node

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of less than single precision: compiled code computes in that, and rounds its results."""

_DTYPES = (torch.float64, torch.float32, *HALVES, torch.bool)
"""Dtypes of an op's result."""

CONSTANTS = (aten.scalar_tensor.default, aten.full.default)
"""Ops that read no tensor: a run makes their results itself."""

MOST_COUNTED = 1 << 24
"""The largest number up to which single precision has all whole ones."""

_ROUNDED_ELSE = {aten.sqrt.default}
"""Ops whose kernel on the CPU is a library's that does not round as IEEE 754 says."""

_INSIDE_VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.expand.default),
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
}
"""Views that the compiler makes a part of how it reads."""

_NORMALIZING = {
    *(aten._softmax.default, aten._log_softmax.default),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    *(aten.sum.dim_IntList, aten.mean.dim, aten.var.correction, aten.amax.default, aten.amin.default),
}
"""Ops that sum along a dimension: compiled, in another order."""

_SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
"""Ops that use a number in single precision with tensors of less."""


def may_be_fused(node: Node, exact: bool) -> bool:
    """Whether an op may be in a run, with or without eager's numbers."""
    if node.op != "call_function" or not is_tensor(node) or any(node.meta.get(mark) for mark in _MARKS):
        return False
    if node.target in CONSTANTS or not all(map(is_tensor, node.all_input_nodes)):
        return False
    made, read = node.meta["val"], [one.meta["val"] for one in node.all_input_nodes]
    if not read or any(one.device != made.device or one.layout is not torch.strided for one in (made, *read)):
        return False
    if made.dtype not in _DTYPES or not TensorSpec.of(made, hint).whole or made.numel() == 0:
        return False
    if node.target is aten.all.dim:
        return read[0].dtype is torch.bool and read[0].numel() < MOST_COUNTED * made.numel()
    if not exact and node.target in _NORMALIZING:
        return True
    if not is_elementwise(node):
        return False
    return not exact or made.device.type != "cpu" or _rounds_alike(node)


_MARKS = ("remat_once", "remat_acts", "remat_handed_over")


LEFT = ("cpu",)
"""Types of devices on which batch norms, and sums at given places, stay torch's own kernels, which are as fast."""


def is_left(node: Node) -> bool:
    """Whether a tensor is on such a device."""
    return node.meta["val"].device.type in LEFT


def is_inside_view(node: Node) -> bool:
    """Whether a node is a view that may be in a run, between two of its ops."""
    return node.op == "call_function" and node.target in _INSIDE_VIEWS and is_tensor(node)


def _rounds_alike(node: Node) -> bool:
    """Whether an op's kernel on the CPU, and compiled code, both round each element once."""
    if node.target is _ops.dropout_noise:
        return True
    made, read = node.meta["val"].dtype, {one.meta["val"].dtype for one in node.all_input_nodes}
    floats = {dtype for dtype in read if dtype.is_floating_point}
    if made in HALVES and read - floats - {torch.bool}:
        return False  # whole numbers, which may be rounded to half precision before the op
    if node.target is aten._to_copy.default:
        return not (torch.float64 in {made, *floats} and {made, *floats} & set(HALVES))
    if len(floats) > 1 or (made.is_floating_point and floats and made not in floats):
        return False
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 3:
        return made not in HALVES  # a product of products
    halves = floats & set(HALVES)
    if halves and node.target not in _SCALED and not all(_is_of(number, *halves) for number in _numbers(node)):
        return False
    return is_rounded(node) and node.target not in _ROUNDED_ELSE


def _numbers(node: Node) -> list[float]:
    given: list[Any] = [*node.args, *node.kwargs.values()]
    return [one for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]


def _is_of(number: float, dtype: torch.dtype) -> bool:
    """Whether a number is one of a dtype's."""
    with real_tensors():
        return torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item() == number
