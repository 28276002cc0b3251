"""What a captured graph hands out of one tensor: views of it, detached, made without gradients, and written to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.exactness import check

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x.t() if x.dim() == 2 else x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() > 1 else x,
    "first": lambda x: x[0] if x.dim() > 1 else x,
    "last": lambda x: x[:, -1] if x.dim() > 1 and x.shape[1] else x,
    "rest": lambda x: x[1:] if x.shape[0] > 2 else x,
    "narrow": lambda x: x.narrow(-1, 0, 2) if x.shape[-1] > 2 else x,
    "flat": lambda x: x.reshape(-1),
    "half": lambda x: x.chunk(2, -1)[0] if x.shape[-1] > 1 else x,
    "row": lambda x: x.unbind(0)[0] if x.dim() > 1 else x,
    "repeated": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "diagonal": lambda x: x.diagonal() if x.dim() == 2 else x,
    "same": lambda x: x.view(x.shape),
    "copied": lambda x: x.flip(0),
}


@torch.compiler.disable
def left_alone(x: torch.Tensor) -> torch.Tensor:
    return x * 1


class Net(nn.Module):
    """A view of an activation is handed to a function that is left alone, made in one of two ways, and used after it."""

    def __init__(self, view: str, way: str) -> None:
        super().__init__()
        self.net, self.view, self.way = nn.Linear(8, 8), VIEWS[view], way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        view = self.view(h)
        if self.way == "detached":
            other = view.detach()
        else:
            with torch.no_grad():
                other = self.view(h)
        known = left_alone(other)
        weights = torch.arange(float(view.numel())).view(view.shape)
        return (view * known + view * weights + other * weights * h.sum()).sum()


@pytest.mark.parametrize("way", ["detached", "without gradients"])
@pytest.mark.parametrize("view", ["turned", "last", "half"])
def test_a_view_goes_to_what_is_left_alone_without_its_gradient(view: str, way: str) -> None:
    report = check(Net(view, way), torch.randn(8, 8), budget="min", cost_model="unit", solver="greedy")
    assert report.equal, report.summary()


def made(seed: int) -> Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
    """A function of two matrices that returns several tensors, most of them views of others."""
    numbers = random.Random(seed)
    steps = [
        (
            numbers.random(),
            numbers.random() < 0.25,
            [VIEWS[numbers.choice(list(VIEWS))] for _ in range(numbers.randint(0, 2))],
            numbers.random() < 0.35,
            numbers.random() > 0.15,
        )
        for _ in range(numbers.randint(2, 7))
    ]
    count = numbers.randint(2, len(steps))

    def function(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        known = [x, weight, (x @ weight).tanh()]
        for which, computes, views, detached, gradients in steps:
            value = known[int(which * len(known))]
            value = (value * 1.5).sin() if computes else value
            with torch.set_grad_enabled(gradients):
                for view in views:
                    value = view(value) if value.dim() else value
            known.append(value.detach() if detached else value)
        return tuple(known[-count:])

    return function


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*no operation with gradients could be captured")
@given(st.integers(0, 100_000), st.booleans(), st.booleans())
@settings(max_examples=15)
def test_whatever_a_function_returns_of_a_tensor(seed: int, trained: bool, writes: bool) -> None:
    function, start = made(seed), torch.Generator().manual_seed(seed)
    given_x, given_weight = (torch.randn(4, 4, generator=start) for _ in range(2))

    def run(call: Callable[..., Sequence[torch.Tensor]], has: Sequence[bool] | None) -> tuple[list[bool], Any]:
        """What is found, for outputs that have gradients where ``has`` says so, or as they come."""
        x, weight = given_x.clone().requires_grad_(trained), given_weight.clone().requires_grad_()
        outputs = call(x, weight)
        has = [one.grad_fn is not None for one in outputs] if has is None else has
        values = [one.detach().clone() for one in outputs]
        places = [one.untyped_storage().data_ptr() for one in outputs]
        inside = [{x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()} & {place} for place in places]
        shared = [[place == other for other in places] for place in places]
        laid = [(one.shape, one.stride()) for one in outputs]
        free = [i for i, one in enumerate(outputs) if not has[i] and not inside[i] and 0 not in one.stride()]
        if writes and free:
            with torch.no_grad():
                outputs[free[0]].add_(1.0)
            return list(has), (values, shared, laid, [one.detach().clone() for one in outputs])
        losses = [
            (one * torch.arange(float(one.numel())).view(one.shape)).sum() for one in outputs if one.grad_fn is not None
        ]
        gradients = torch.autograd.grad(sum(losses), [weight, x][: 1 + trained], allow_unused=True) if losses else ()
        return list(has), (values, shared, laid, gradients)

    has, (values, shared, laid, last) = run(function, None)
    planned = rematerialize(function, "min", cost_model="unit", solver="greedy")
    for _ in range(2):
        _, (others, shared_too, laid_too, last_too) = run(planned, has)
        assert (shared_too, laid_too) == (shared, laid)
        for one, other in zip((*values, *last), (*others, *last_too), strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
