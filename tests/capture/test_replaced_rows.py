"""Rows that a mask chooses are replaced by what has a gradient, and eager's bits come out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize

Replace = Callable[["Masked", torch.Tensor, torch.Tensor, torch.Tensor], None]


class Masked(nn.Module):
    """A token in the place of some rows, in between two layers."""

    def __init__(self, replace: Replace) -> None:
        super().__init__()
        self.first, self.last, self.replace = nn.Linear(8, 16), nn.Linear(16, 4), replace
        self.token = nn.Parameter(torch.randn(16))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.first(x))
        self.replace(self, hidden, x, mask)
        return self.last(hidden.tanh()).square().mean()


def by_mask(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[mask] = self.token


def by_other_mask(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[~mask, :3] = self.token[:3].exp()


def twice(self: Masked, hidden: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[mask] = self.token
    hidden[x[..., 0] > 0] = self.token * 2


def scaled(_self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[mask] *= 2


def by_hidden(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, _mask: torch.Tensor) -> None:
    hidden[hidden.sum(-1) > 0] = self.token


def drawn(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, _mask: torch.Tensor) -> None:
    hidden[torch.rand(hidden.shape[:2]) < 0.4] = self.token


def constant(_self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[mask] = 0.5


def detached(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden[mask] = self.token.detach()


def filled(self: Masked, hidden: torch.Tensor, _x: torch.Tensor, mask: torch.Tensor) -> None:
    hidden.masked_fill_(mask[..., None], self.token[0])


@pytest.mark.parametrize(
    "replace", [by_mask, by_other_mask, twice, scaled, by_hidden, drawn, constant, detached, filled]
)
def test_bits(replace: Replace) -> None:
    torch.manual_seed(0)
    eager = Masked(replace)
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    batches = [(torch.randn(4, 6, 8), torch.rand(4, 6) < 0.4) for _ in range(4)]
    for seed, batch in enumerate([*batches, *batches]):
        losses, states = [], []
        for module, run in ((eager, eager), (other, step)):
            torch.manual_seed(seed)
            module.zero_grad()
            loss = run(*batch)
            loss.backward()
            losses.append(loss.detach())
            states.append(torch.get_rng_state())
            torch.optim.SGD(module.parameters(), 0.1).step()
        assert torch.equal(*losses) and torch.equal(*states)
        for (name, p), q in zip(eager.named_parameters(), other.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None) and (p.grad is None or torch.equal(p.grad, q[1].grad)), name
    assert step.plans and not step.failures
    counts = len({int(mask.sum()) for _, mask in batches})
    in_parts = replace in (by_hidden, drawn)
    one = replace in (constant, detached, filled)
    if not in_parts:
        assert len(step.plans) == 1 if one else len(step.plans) >= counts > 1
        assert all(any(op.target == "aten.tanh.default" for op in plan.graph.ops) for plan in step.plans)
