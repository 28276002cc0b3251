"""Gradient accumulation inside of a captured backward: each gradient is added to ``.grad`` as soon as it is computed.

Captured code returns all of its gradients when its backward ends, and autograd accumulates them then: for a moment the
old ones and all of the new ones are held. Where one captured graph alone contributes to a parameter's gradient, and no
hook sees it, it is added inside of the backward, by the operation that autograd would have run, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from lightning_remat.capture import _torch as internals


class Accumulator:
    """Accumulates the gradients of one captured graph's backward.

    Args:
        inputs: the captured function's arguments, when it is captured.

    Attributes:
        positions: positions of the parameters among the arguments whose gradients may be added here.
        alone: whether the present call's gradients come from this graph alone; otherwise they are returned to autograd.
        hand_over: by a parameter's position among the arguments, what is given its gradient as soon as that is computed
            (see `lightning_remat.capture.from_joint`).
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        self.positions = tuple(i for i, value in enumerate(inputs) if _is_plain(value))
        self.alone = False
        self._parameters: dict[int, torch.nn.Parameter] = {}  # of the present backward, until their gradients are there

        def accumulate_grad(gradient: torch.Tensor, position: int) -> torch.Tensor | None:
            return self._added(gradient, position)

        self.hand_over: Mapping[int, Callable[[torch.Tensor, int], torch.Tensor | None]] = dict.fromkeys(
            self.positions, accumulate_grad
        )

    def begin(self, parameters: Mapping[int, torch.nn.Parameter], dropped: Collection[int | None]) -> None:
        """A backward begins, with these parameters by position; those at ``dropped`` get no gradients."""
        self._parameters = {
            position: parameter
            for position, parameter in parameters.items()
            if position not in dropped and _is_plain(parameter) and internals.accumulates_into(parameter)
        }

    def _added(self, gradient: torch.Tensor, position: int) -> torch.Tensor | None:
        """Add a gradient, and return ``None``; or return the gradient itself, where autograd has to accumulate it."""
        parameter = self._parameters.pop(position, None)
        old = parameter.grad if parameter is not None else None
        if not self.alone or old is None or old.layout is not torch.strided or old.dtype is not gradient.dtype:
            return gradient
        old.add_(gradient)
        return None


def _is_plain(value: object) -> bool:
    """Whether a value is a trainable parameter without hooks that see its gradients."""
    if type(value) is not torch.nn.Parameter or not value.requires_grad:
        return False
    return not value._backward_hooks and not getattr(value, "_post_accumulate_grad_hooks", None)
