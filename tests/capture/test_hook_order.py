"""Hooks of tensors of a step run in eager's order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from lightning_remat import rematerialize


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def one_more(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 1


def noise(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(gradient)


class Hooked(torch.nn.Module):
    """Hooks on what is used before, between and after them."""

    def __init__(self, hooks: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        before = h.square()
        h.register_hook(self.hooks[0])
        between = h.sin()
        for hook in self.hooks[1:]:
            h.register_hook(hook)
        after = self.second(h)
        after.register_hook(self.hooks[0])
        return (before + between + after).sum()


@pytest.mark.parametrize(
    "hooks",
    [(twice,), (twice, one_more), (one_more, twice), (twice, one_more, twice), (noise, twice, one_more, noise)],
    ids=lambda hooks: "-".join(hook.__name__ for hook in hooks),
)
def test_in_the_order_of_registration(hooks: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> None:
    torch.manual_seed(0)
    eager, x = Hooked(hooks), torch.randn(4, 8)
    module = copy.deepcopy(eager)
    scheduled = rematerialize(module, 1.0, cost_model="unit")
    for seed in range(2):
        for call in (eager, scheduled):
            torch.manual_seed(seed)
            call(x).backward()
        for p, q in zip(eager.parameters(), module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert scheduled.runs == (2,)
