"""What is known of single ATen ops (which are views, draw random numbers, mutate), and functions to call for some."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_remat.capture._own_functions import draws
from lightning_remat.capture._torch import OpOverload, real_tensors, run_below_autograd

aten = torch.ops.aten

# These hand back memory of their input although their schemas do not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.lift.default,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}

# Their scalar results lie on a storage as large as the input, for as long as anyone keeps the loss.
_PADDED = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
}


def is_view(target: Any) -> bool:
    """Whether every tensor that the op returns lies on its first input's storage."""
    return isinstance(target, OpOverload) and _is_view(target)


@functools.cache
def _is_view(target: OpOverload) -> bool:
    if target in _UNDECLARED_VIEWS:
        return True
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


_ELEMENTWISE = {
    aten.hardtanh_backward.default,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.hardswish.default,
    aten.hardsigmoid_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
}
"""Elementwise ops that torch (2.11 or 2.13) does not tag as such."""


def is_elementwise(target: Any) -> bool:
    """Whether each element of the result is computed from one element of each input."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target in _ELEMENTWISE)


def is_random(target: Any) -> bool:
    """Whether the op draws random numbers."""
    if isinstance(target, OpOverload):
        return _is_seeded(target)
    return target is dropout_mask or draws(target)


@functools.cache
def _is_seeded(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


_KNOWN = ("aten", "prims", "torchvision")


def repeats(target: Any) -> bool:
    """Whether the op is known to give the same bits a second time, or is tagged as one that draws random numbers.

    An operator of the user's own may draw without saying so, count its calls, or talk to other processes.
    """
    return not isinstance(target, OpOverload) or target.namespace in _KNOWN or is_random(target)


def mutates(target: Any) -> bool:
    """Whether the op overwrites one of its inputs."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_padded(target: Any) -> bool:
    """Whether a scalar that the op returns lies on a far larger storage."""
    return target in _PADDED


@functools.cache
def compact(target: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``target``, with its result copied to a storage of its own size."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return target(*args, **kwargs).clone()

    call.__name__ = str(target)  # and not `__module__` too: FX would write a call of the op itself into the code
    return call


@functools.cache
def spaced(target: OpOverload, form: Callable[..., Any], out: str) -> Callable[..., torch.Tensor]:
    """``target`` with a result that has gaps: a function of its shape, strides, dtype and device before the op's own arguments.

    Args:
        target: the op.
        form: the form of it that writes its result to a given tensor.
        out: the name of that argument of ``form``.
    """

    def call(
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        result = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        form(*args, **kwargs, **{out: result})
        return result

    call.__name__ = str(target)
    return call


def cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch norm of cuDNN in training mode, functional: output, batch statistics, reserve space, new running statistics."""
    statistics = running_mean.clone(), running_var.clone()
    return *aten.cudnn_batch_norm.default(x, weight, bias, *statistics, training, momentum, eps), *statistics


def lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """``aten.mkldnn_rnn_layer``, with the kernel for training where its last argument (``train``) is true.

    Eager runs that kernel where gradients are enabled. It has other bits than the one for inference, and returns what
    the backward needs. A captured graph runs with gradients disabled, and the op itself would choose the kernel for
    inference.
    """
    found: tuple[torch.Tensor, ...] = run_below_autograd(aten.mkldnn_rnn_layer.default, *args, gradients=args[-1])
    return found


def lstm_layer_backward(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """``aten.mkldnn_rnn_layer_backward``, with its gradients, which it computes in float32, cast to the layer's dtype.

    Autograd does so in eager mode, for each gradient that has another dtype than what it is the gradient of.
    """
    return tuple(gradient.to(x.dtype) for gradient in aten.mkldnn_rnn_layer_backward.default(x, *args))


def _batch_norm_again(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm evaluated a second time: the same output and batch statistics, the running ones left alone."""
    del running_mean, running_var
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten._native_batch_norm_legit.no_stats(
        x, weight, bias, training, momentum, eps
    )
    return result


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """The forms of a functional batch norm in training mode, which reads the running statistics (its arguments 3 and 4) only
    to compute their new values. Each takes the same arguments, and returns the same, but without the running
    statistics.

    Attributes:
        statistics: positions of the new running statistics among the functional form's results.
        in_place: writes them over the old ones.
        again: for a second evaluation: is given ``None`` for the running statistics, and returns the same bits.
    """

    statistics: tuple[int, int]
    in_place: Callable[..., Any]
    again: Callable[..., Any]


_BATCH_NORMS: dict[Any, BatchNorm] = {
    aten._native_batch_norm_legit_functional.default: BatchNorm(
        (3, 4), aten._native_batch_norm_legit.default, _batch_norm_again
    ),
    cudnn_batch_norm: BatchNorm((4, 5), aten.cudnn_batch_norm.default, aten.cudnn_batch_norm.default),
}


def may_be_batch_norm(target: Any) -> bool:
    """Whether `training_batch_norm` knows forms of some calls."""
    return target in _BATCH_NORMS


def training_batch_norm(target: Any, args: tuple[Any, ...]) -> BatchNorm | None:
    """The forms of a batch norm that computes its statistics from the batch; ``None`` for any other call."""
    return _BATCH_NORMS[target] if target in _BATCH_NORMS and args[5] else None


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What ``aten._safe_softmax`` runs: which rows are masked out whole is half of the work, and small to keep."""
    result = aten.softmax.int(x, dim, dtype)
    masked_rows = aten.all.dim(aten.isneginf.default(x), dim, True)
    zero = aten.scalar_tensor.default(0.0, dtype=result.dtype, device=result.device)
    return aten.where.self(masked_rows, zero, result)  # type: ignore[no-any-return]


PARTS: dict[OpOverload, Callable[..., torch.Tensor]] = {aten._safe_softmax.default: _safe_softmax}
"""Ops that are captured as the ops that torch runs inside of them, each with the function that calls these."""


def dropout_mask(shape: tuple[int, ...], stride: tuple[int, ...], p: float, device: torch.device) -> torch.Tensor:
    """The elements that dropout keeps: the numbers that eager draws, at one byte an element.

    Eager on the CPU fills a tensor of the input's own dtype; the generator gives the same numbers to a boolean one.
    """
    return torch.empty_strided(shape, stride, dtype=torch.bool, device=device).bernoulli_(1.0 - p)


def dropout_noise(mask: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What eager dropout on the CPU multiplies by: ``scale`` where an element is kept, 0 elsewhere."""
    # `mask * scale` would make a copy of the mask in this dtype as well; bytes are converted far faster than booleans.
    return mask.view(torch.uint8).to(dtype).mul_(scale)


def dropout_scale(p: float, dtype: torch.dtype) -> float:
    """What eager dropout on the CPU multiplies kept elements by: ``1 / (1 - p)`` as rounded in ``dtype``.

    ``native_dropout`` multiplies by the unrounded number instead, which differs in the last bit for some ``p``
    (0.15 in float32).
    """
    with real_tensors():
        return float(torch.ones((), dtype=dtype, device="cpu").div_(1.0 - p)) if p < 1.0 else 0.0
