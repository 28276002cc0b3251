"""Gradients added to those at hand as soon as they are made, as eager's autograd does.

Captured code returns all of its gradients when its backward ends, and autograd adds them then: for a moment there are the old
ones and all of the new ones. Where nothing but one captured graph has a part in a parameter's gradient, and nobody looks at it
on the way, it is added inside of the backward, by the operation that autograd would have run, and given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from lightning_remat.capture import _torch as internals


class Accumulator:
    """What the backward of one captured graph hands its gradients to.

    Args:
        inputs: the captured function's arguments, when it is captured.

    Attributes:
        positions: of the parameters among them whose gradients may be added here.
        alone: whether the present call's gradients come from this graph alone; otherwise they are returned to autograd.
        hand_over: takes each gradient as soon as it is made, by the parameter's position among the arguments (see
            `capture.from_joint`).
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
        """A backward begins, with these parameters by position; gradients at ``dropped`` are none."""
        self._parameters = {
            position: parameter
            for position, parameter in parameters.items()
            if position not in dropped and _is_plain(parameter) and internals.accumulates_into(parameter)
        }

    def _added(self, gradient: torch.Tensor, position: int) -> torch.Tensor | None:
        """``None`` for a gradient that was added; one that autograd has to see comes back."""
        parameter = self._parameters.pop(position, None)
        old = parameter.grad if parameter is not None else None
        if not self.alone or old is None or old.layout is not torch.strided or old.dtype is not gradient.dtype:
            return gradient
        old.add_(gradient)
        return None


def _is_plain(value: object) -> bool:
    """Whether it is a parameter that is trained and whose gradients nobody looks at on their way."""
    if type(value) is not torch.nn.Parameter or not value.requires_grad:
        return False
    return not value._backward_hooks and not getattr(value, "_post_accumulate_grad_hooks", None)
