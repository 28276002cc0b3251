"""Results that take the memory of an input which nobody needs afterwards: which ops can, and how, with the bits of the op.

Elementwise ops write over an input in their ``out=`` and in-place forms. Softmax and its gradient read a row before they
write it. What is written to a part of a tensor can be written to the tensor itself. The gradient of batch norm, on the CPU, has
no such form, but its kernel needs none: see `batch_norm_backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._ops import is_elementwise
from lightning_remat.capture._own_functions import writes_over
from lightning_remat.capture._scatters import writes_part
from lightning_remat.capture._torch import OpOverload, real_tensors, run_on_cpu
from lightning_remat.capture.tiling._losses import LOGITS, gradient_of_rows

aten = torch.ops.aten

Form = tuple[Callable[..., Any], str]
"""A call that writes over an input, and the name of its argument that is written to ("" where it is the first one)."""

_ROWWISE: dict[Any, int] = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
"""Ops that on the CPU read each row whole, or each element, before they write it: how many inputs, from the first, they
may write over."""


_READ_AFTERWARDS = {(aten.binary_cross_entropy_backward.default, 3)}
"""Inputs that a kernel reads once more when it has written its result (weights), by the op and their positions."""


def overwriting(target: Any, position: int, device: str = "cpu") -> Form | None:
    """The form of an op that writes its (first) result over an input, with bits equal to the op's own.

    Args:
        target: the op.
        position: of that input among the op's arguments; -1 for one given by name or in a list.
        device: its type.

    Returns:
        The form; ``None`` where there is none, or only one that torch has generated, which computes elsewhere and
        copies.
    """
    if target is batch_norm_backward:
        return (target, "out") if position in (0, 1) else None
    if target is gradient_of_rows:
        return (target, "out") if position == LOGITS else None
    if writes_over(target, position):
        return target, "out"
    if writes_part(target):
        return (target, "out") if position == 0 else None
    if target in _ROWWISE:
        return _written_to(target, False) if device == "cpu" and 0 <= position < _ROWWISE[target] else None
    if is_elementwise(target) and (target, position) not in _READ_AFTERWARDS:
        return _written_to(target, position == 0)
    return None


def rounds_over(node: torch.fx.Node, made: torch.Tensor) -> bool:
    """Whether an op's kernel rounds a result such as ``made`` alike on memory of its own and over an input.

    Products of complex numbers are compiled twice for the CPU, for memory that overlaps and for memory that does not, in which
    their parts are rounded otherwise.
    """
    if not isinstance(node.target, OpOverload) or not (made.is_complex() and made.device.type == "cpu"):
        return True
    return node.target in _WITHOUT_PRODUCTS and bool(node.kwargs.get("alpha", 1) == 1)


_WITHOUT_PRODUCTS = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.where.self, aten.masked_fill.Scalar}


def has_form(target: Any) -> bool:
    """Whether the op may have a form that overwrites an input: ``overwriting`` returns ``None`` for any other."""
    return not isinstance(target, OpOverload) or _may_write(target)


@functools.cache
def _may_write(target: OpOverload) -> bool:
    return target in _ROWWISE or is_elementwise(target)


@functools.cache
def _written_to(target: OpOverload, first: bool) -> Form | None:
    if target is aten.mul.Scalar:  # `mul_` changes the order of the two, and rounds the number to half precision first
        return aten.mul.out, "out"
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = target.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        written = [a for a in form._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in form._schema.arguments if a not in written]
        if len(written) == 1 and others == wanted and torch.Tag.generated not in form.tags:
            return form, written[0].name
    in_place = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    for form in [getattr(in_place, name) for name in in_place.overloads()] if in_place is not None and first else []:
        arguments = form._schema.arguments
        if [(a.name, str(a.type)) for a in arguments] == wanted and torch.Tag.generated not in form.tags:
            return form, ""
    return None


def reads_rows(target: Any) -> bool:
    """Whether the op's overwriting form is for contiguous inputs only."""
    return target in _ROWWISE


def counts_in_place(node: torch.fx.Node, over: torch.fx.Node) -> bool:
    """Whether ``node`` computes integers from ``over`` alone, elementwise, and can write them over it."""
    made, read = node.meta["val"], over.meta["val"]
    same = (made.dtype, made.shape, made.stride()) == (read.dtype, read.shape, read.stride())
    whole = same and not made.dtype.is_floating_point and not made.dtype.is_complex
    position = 0 if node.args[0] is over else -1
    return whole and node.all_input_nodes == [over] and overwriting(node.target, position) is not None


# -- batch norm -------------------------------------------------------------------------------------------------------


def batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, *args: Any, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """``aten.native_batch_norm_backward`` on the CPU, with its own kernel: the same bits in less memory.

    For contiguous tensors that kernel allocates the input's gradient twice, and gives up the first at once. It sums over
    a channel of both tensors first, and then computes each element of the gradient from the same element of each: it may
    write over either. So the kernel is run as it is, and is given the memory to write to where it asks for some (which
    takes some 40 microseconds).

    Args:
        grad: the gradient of the output.
        x: the input.
        args: the op's other arguments.
        out: ``grad`` or ``x``, to write over; ``None`` allocates.

    Returns:
        What the op returns, the first on ``out``.
    """
    op = aten.native_batch_norm_backward.default
    if any(type(one) is not torch.Tensor for one in (grad, x)):  # a fake tensor has no memory
        return op(grad, x, *args)  # type: ignore[no-any-return]
    alike = grad.stride() == x.stride() and (x.is_contiguous() or _layout(x) is not None)
    dx, *others = run_on_cpu(op, (grad, x, *args), like=x, memory=out if alike else None)
    return (dx if out is None or dx is out else out.copy_(dx), *others)


def writes_where_told(grad: TensorSpec, x: TensorSpec, weights: torch.dtype | None) -> bool:
    """Whether `batch_norm_backward` works for such tensors: laid out alike, and of a kind on which it was tried here.

    Args:
        grad: the gradient of the output.
        x: the input.
        weights: dtype of the weight; ``None`` where there is none.
    """
    if grad != x or x.device.type != "cpu":
        return False
    with real_tensors():
        layout = _layout(torch.empty_strided(x.shape, x.stride, device="meta"))
        return layout is not None and _seen_to_write(len(x.shape), x.dtype, weights, layout)


def _layout(x: torch.Tensor) -> torch.memory_format | None:
    """How a tensor without gaps is laid out; ``None`` where it is neither contiguous nor channels last."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    found = (layout for layout in (torch.contiguous_format, channels_last) if x.is_contiguous(memory_format=layout))
    return next(found, None)


@functools.cache
def _seen_to_write(dims: int, dtype: torch.dtype, weights: torch.dtype | None, layout: torch.memory_format) -> bool:
    """Whether the op's kernel gives the same bits on a small example in memory of its own and in given memory.

    What memory torch's kernel asks for, and in which order it reads and writes, is nowhere promised: it is tried
    instead.
    """
    with torch.no_grad():
        shape = (3, 19, 5, 7, 2)[:dims]
        numbers = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device="cpu").reshape(shape)
        grad, x = ((numbers * step).sin().to(dtype).contiguous(memory_format=layout) for step in (1.7, 2.3))
        weight = None if weights is None else torch.arange(1.0, 20.0, device="cpu").cos().to(weights)
        _, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
        rest = (weight, None, None, mean, invstd, True, 1e-5, [True, True, True])
        expected = aten.native_batch_norm_backward.default(grad, x, *rest)
        for over in (None, 0, 1):
            given = [one.clone() for one in (grad, x)]
            out = None if over is None else given[over]
            got = run_on_cpu(aten.native_batch_norm_backward.default, (*given, *rest), like=given[1], memory=out)
            if out is not None and got[0] is not out:
                return False
            if any(a.stride() != b.stride() or not torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                return False
    return True
