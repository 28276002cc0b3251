"""Ops that torch composes of others, as it composes them in eager mode.

Some compositions ask whether a tensor has a gradient, or is of a subclass. All tensors that are traced are of one, and torch
then goes another way, with other bits: in `matmul`, `cross_entropy` and singular values or eigenvalues alone
(``_linalg_svd`` and ``_linalg_eigh`` compute vectors too where they are asked to, ``_linalg_eigvals`` never).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten

MEAN = 1
"""Which reduction of a loss is its mean."""


def composed_as_in_eager(symbolic: bool) -> dict[OpOverload, Callable[..., torch.Tensor]]:
    """By which functions such ops are traced.

    Args:
        symbolic: whether sizes are symbols: products are decomposed by torch's Python then, which asks as eager mode does.
    """
    found: dict[OpOverload, Callable[..., torch.Tensor]] = {aten.cross_entropy_loss.default: _cross_entropy}
    if not symbolic:
        found[aten.matmul.default] = _matmul
    for packet in (aten.linalg_svdvals, aten.linalg_eigvalsh, aten.linalg_eigvals):
        found[packet.default] = _values_alone
    return {op: functools.partial(kernel, op) for op, kernel in found.items()}


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is open, whose tensors are of a subclass in eager mode, too."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _matmul(op: OpOverload, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product of two batches of matrices of which one is repeated, traced: in a loop, unless that one has a gradient.

    torch's kernel asks for gradients, and takes all that are traced, as tensors of a subclass, for tensors that have some. For
    such it lays the batch out as rows of one matrix, whose product and gradients have other bits.
    """
    if left.dim() == right.dim() == 3 and left.shape[0] != right.shape[0] and 1 in (left.shape[0], right.shape[0]):
        repeated = left if left.shape[0] == 1 else right
        if not repeated.requires_grad and not is_transformed():
            number = (right if repeated is left else left).shape[0]
            factors = [one.expand(number, *one.shape[1:]).reshape(number, *one.shape[1:]) for one in (left, right)]
            product = torch.bmm(*factors)
            return aten._unsafe_view.default(product, product.shape)  # type: ignore[no-any-return]
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, left, right)  # type: ignore[no-any-return]


@torch.library.custom_op("lightning_remat::weights_of_targets", mutates_args=())
def weights_of_targets(weight: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """The sum of the weights of the classes that are targets and not ignored: of so many numbers, as eager mode adds them."""
    return weight.gather(0, target.masked_select(~ignored).flatten()).sum()


@weights_of_targets.register_fake
def _(weight: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    del target, ignored
    return weight.new_empty(())


def _cross_entropy(
    op: OpOverload,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """A cross entropy with weights and smoothed labels, traced: its mean is over the weights of targets that are not ignored.

    For tensors that are traced, torch's kernel adds up zeros for those that are, which has other bits.
    """
    smoothed = label_smoothing > 0 and x.shape != target.shape
    if weight is None or weight.requires_grad or reduction != MEAN or not smoothed:  # with a gradient, it is an error
        arguments = (x, target, weight, reduction, ignore_index, label_smoothing)
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, *arguments)  # type: ignore[no-any-return]
    classes = 0 if x.dim() == 1 else 1
    logs = torch.log_softmax(x, classes, x.dtype)
    loss = aten.nll_loss_nd.default(logs, target, weight, reduction, ignore_index)
    shape = [1] * x.dim()
    shape[classes] = weight.shape[0]
    smooth = -(logs * weight.view(shape)).sum(classes)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    mean_of_classes = smooth.sum() / weights_of_targets(weight, target, ignored)
    return (1 - label_smoothing) * loss + mean_of_classes * (label_smoothing / x.shape[classes])  # type: ignore[no-any-return]


def _values_alone(op: OpOverload, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Singular values or eigenvalues, traced: without the vectors where no gradient needs them, by another algorithm."""
    if (x.requires_grad and torch.is_grad_enabled()) or is_transformed():
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, x, *others, **named)  # type: ignore[no-any-return]
    if op is aten.linalg_svdvals.default:
        return aten._linalg_svd.default(x, False, False, **named)[1]  # type: ignore[no-any-return]
    if op is aten.linalg_eigvalsh.default:
        return aten._linalg_eigh.default(x, *others, compute_v=False)[0]  # type: ignore[no-any-return]
    return aten._linalg_eigvals.default(x)  # type: ignore[no-any-return]
