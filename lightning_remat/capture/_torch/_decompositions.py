"""Ops stay whole in a traced graph: torch's unasked decompositions of them are taken away meanwhile.

AOTAutograd decomposes some ops (``upsample_bilinear2d``, ``lstm``), by their ``py_kernels``, although no decompositions
of them are asked for; the decomposed op has other bits and another speed than eager's. They are kept whole, cuDNN's
batch norm as ``_batch_norm_with_update`` (see `calls_cudnn`). Others are composed as in eager mode (``_composed``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from lightning_remat.capture._torch._composed import composed_as_in_eager, is_transformed
from lightning_remat.capture._torch._symbols import SYMBOLIC, specialized

aten = torch.ops.aten

# Ops whose Python decompositions stay. The batch norms' kernels overwrite the running statistics without saying so, which
# a functional graph cannot hold; `dropout` becomes `native_dropout`, which the capture knows how to split.
_KEEP_DECOMPOSED = (
    "miopen_batch_norm",
    "native_batch_norm",
    "dropout",
    "empty",
    "broadcast_tensors",
)

# With symbolic sizes these stay decomposed too: torch's C++ does the same as its Python, but reads sizes as numbers.
_KEEP_FOR_SYMBOLS = ("matmul",)

_COMPOSITE_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _unasked_decompositions(symbolic: bool) -> list[OpOverload]:
    kept = (*_KEEP_DECOMPOSED, *(_KEEP_FOR_SYMBOLS if symbolic else ()))
    return [
        op
        for op in _overloads(tuple(dir(torch.ops.aten)))
        if not op.py_kernels.keys().isdisjoint(_COMPOSITE_KEYS) and op.__name__.partition(".")[0] not in kept
    ]


@functools.lru_cache(maxsize=1)
def _overloads(names: tuple[str, ...]) -> list[OpOverload]:
    """All overloads of these ATen ops."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]


def _upsample(op: OpOverload, x: torch.Tensor, output_size: Any, *others: Any, **named: Any) -> torch.Tensor:
    """An overload that takes ``scale_factors``, as torch's own kernel computes it, which refuses symbolic sizes."""
    arguments = [*others, *named.values()]  # in the schema's order
    factors: list[float] | None = arguments.pop()
    scales: Sequence[float | None] = factors or [None] * (x.dim() - 2)
    if output_size is None and factors is not None:
        as_int: Any = torch.sym_int  # without types before torch 2.14
        output_size = [as_int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
    made: torch.Tensor = op(x, output_size, *arguments, *scales)
    return made


def _upsamplings() -> list[tuple[OpOverload, OpOverload]]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "upsample_" in name]
    return [(p.vec, p.default) for p in packets if {"vec", "default"} <= set(getattr(p, "overloads", list)())]


def _cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm of cuDNN, traced: where it overwrites the running statistics, torch's op that says so.

    That one has a functional form, and runs cuDNN's kernel where eager does. torch itself traces the native batch norm
    instead, which has other bits.
    """
    if training and running_mean is not None:
        op = torch.ops.aten._batch_norm_with_update.default
        return op(x, weight, bias, running_mean, running_var, momentum, eps)
    # Past this function, to what torch has for the key: it makes the op differentiable and calls it below.
    op_at = torch.ops.aten.cudnn_batch_norm.default._op_dk
    return op_at(DispatchKey.Autograd, x, weight, bias, running_mean, running_var, training, momentum, eps)


def _lstm_layer(op: OpOverload, *args: Any) -> Any:
    """A layer of oneDNN's LSTM, traced: its argument ``train`` notes whether gradients are enabled.

    By whether they are, the kernel chooses between two ways with other bits; ``train`` it does not read.
    """
    return op._op_dk(DispatchKey.Autograd, *args[:-1], torch.is_grad_enabled())


class _Power(torch.autograd.Function):
    """A tensor to the power of a number that varies, with the gradient that eager mode computes.

    torch before 2.14 takes such an exponent for a constant there, later ones make a tensor of it, which rounds otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exponent: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        return x.pow(exponent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.exponent == 0:  # the graph is guarded on it
            return torch.zeros_like(x, memory_format=torch.contiguous_format), None
        found = gradient * (ctx.exponent * x.pow(ctx.exponent - 1)).conj()
        return (found.real if found.is_complex() and not x.is_complex() else found), None


def _power(op: OpOverload, x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """``x ** exponent``, traced."""
    if not isinstance(exponent, SYMBOLIC) or not x.requires_grad or not torch.is_grad_enabled():
        return op._op_dk(DispatchKey.Autograd, x, exponent)  # type: ignore[no-any-return]
    if is_transformed():
        return op._op_dk(DispatchKey.Autograd, x, specialized(exponent))  # type: ignore[no-any-return]
    return _Power.apply(x, exponent)  # type: ignore[no-any-return,no-untyped-call]


def _power_in_place(op: OpOverload, x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """``x.pow_(exponent)``, traced."""
    varies = isinstance(exponent, SYMBOLIC)
    if varies and x.requires_grad and torch.is_grad_enabled():
        return x.copy_(x.clone().pow(exponent))  # its gradient reads what was there, as eager mode's does
    return op._op_dk(DispatchKey.Autograd, x, exponent)  # type: ignore[no-any-return]


def _powers(op: OpOverload, tensors: Sequence[torch.Tensor], exponent: Any) -> Any:
    """``torch._foreach_pow(tensors, exponent)``, traced: the graph is guarded on the exponent."""
    return op._op_dk(DispatchKey.Autograd, tensors, specialized(exponent))


_DIFFERENTIATED: dict[OpOverload, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.pow.Tensor_Scalar: _power,
    aten.pow_.Scalar: _power_in_place,
    aten._foreach_pow.Scalar: _powers,
    aten._foreach_pow_.Scalar: _powers,
}
"""What ops with a gradient of their own are traced by, instead of torch's."""


@contextlib.contextmanager
def whole_ops(symbolic: bool = False) -> Iterator[None]:
    """While open, the ops that eager runs are traced: torch's unasked Python decompositions are taken away.

    Args:
        symbolic: whether sizes are symbols.
    """
    import torch._decomp  # registers them
    import torch._refs

    removed: list[tuple[OpOverload, DispatchKey, Any]] = []
    ops = _unasked_decompositions(symbolic)
    composed = composed_as_in_eager(symbolic)
    try:
        for op in ops:
            for key in _COMPOSITE_KEYS:
                if key in op.py_kernels:
                    removed.append((op, key, op.py_kernels.pop(key)))
            op._dispatch_cache.clear()
        for vec, op in _upsamplings():
            vec.py_kernels[DispatchKey.CompositeImplicitAutograd] = functools.partial(_upsample, op)
            vec._dispatch_cache.clear()
        torch.ops.aten.cudnn_batch_norm.default.py_kernels[DispatchKey.Autograd] = _cudnn_batch_norm
        for op, kernel in composed.items():
            op.py_kernels[DispatchKey.CompositeImplicitAutograd] = kernel
            op._dispatch_cache.clear()
        for op, kernel in _DIFFERENTIATED.items():
            op.py_kernels[DispatchKey.Autograd] = functools.partial(kernel, op)
            op._dispatch_cache.clear()
        yield
    finally:
        for op in composed:
            op.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
            op._dispatch_cache.clear()
        for op in _DIFFERENTIATED:
            op.py_kernels.pop(DispatchKey.Autograd, None)
            op._dispatch_cache.clear()
        for vec, _ in _upsamplings():
            vec.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
            vec._dispatch_cache.clear()
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
        for op in ops:
            op._dispatch_cache.clear()


def calls_cudnn(x: torch.Tensor) -> bool:
    """Whether ``_batch_norm_with_update`` of such a tensor was traced for cuDNN's batch norm: its device has that."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::cudnn_batch_norm", x.device.type.upper())
