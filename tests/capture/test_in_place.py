"""What eager mode computes in place on transposed activations stays so, and random numbers come to the same elements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize

InPlace = Callable[[torch.Tensor, torch.Tensor], Any]

CASES: dict[str, InPlace] = {
    "masked_fill": lambda h, mask: h.masked_fill_(mask, -2.0),
    "tril": lambda h, _: h.tril_(),
    "cumsum": lambda h, _: h.cumsum_(-1),
    "scatter": lambda h, _: h.scatter_(-1, torch.zeros_like(h[..., :1], dtype=torch.long), 0.5),
    "index_add": lambda h, _: h.index_add_(-1, torch.tensor([1, 3]), h[..., :2].clone()),
    "masked_scatter": lambda h, mask: h.masked_scatter_(mask.expand_as(h), torch.ones(h.numel())),
    "renorm": lambda h, _: h.renorm_(2, 1, 1.0),
    "dropout": lambda h, _: functional.dropout(h, 0.3, inplace=True),
    "noise": lambda h, _: h.add_(torch.empty_like(h).normal_(), alpha=0.1),
    "uniform": lambda h, _: h.mul_(torch.empty_like(h).uniform_()),
    "clamp": lambda h, _: h.clamp_(-1, 1),
    "add": lambda h, mask: h.add_(mask.float()),
    "copy": lambda h, _: h.copy_(h * 2),
    "fill": lambda h, _: h[..., 0].fill_(0.0),
}


class Net(nn.Module):
    """Sums whose order depends on how the activations lie."""

    def __init__(self, in_place: InPlace) -> None:
        super().__init__()
        self.first, self.second, self.in_place = nn.Linear(8, 9), nn.Linear(9, 9), in_place

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).transpose(1, 2)
        self.in_place(hidden, mask)
        shares = (hidden + hidden.sum(-1, keepdim=True) + hidden.sum((0, 1), keepdim=True)).softmax(-1)
        return self.second((shares @ hidden.transpose(1, 2)).tanh()).square().mean()


@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, budget: float | str) -> None:
    torch.manual_seed(0)
    eager = Net(CASES[case])
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=budget, cost_model="unit", solver="greedy", time_limit=0.05)
    for seed in range(3):
        x, mask = torch.randn(5, 9, 8), torch.rand(9, 9) < 0.3
        losses, states = [], []
        for module, run in ((eager, eager), (other, step)):
            torch.manual_seed(seed)
            module.zero_grad()
            loss = run(x, mask)
            loss.backward()
            losses.append(loss.detach())
            states.append(torch.get_rng_state())
        assert torch.equal(*losses) and torch.equal(*states)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
    assert len(step.plans) == 1 and not step.failures


def test_a_gradient_that_lies_transposed() -> None:
    """torch's own gradient of a minimum fills its result in place."""
    torch.manual_seed(0)
    one, other = torch.randn(5, 10, 5).permute(2, 1, 0), torch.randn(10, 5).t()
    found = []
    step: Any = rematerialize(
        lambda x, y: torch.minimum(x * 1.5, y * 1.5).sin().sum(), "min", cost_model="unit", solver="greedy"
    )
    for run in (step.original, step):
        given = [value.clone().requires_grad_() for value in (one, other.t())]
        run(given[0], given[1]).backward()
        found += [value.grad for value in given]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and step.plans
