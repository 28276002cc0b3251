"""Gradients of an extremum or median over all elements have eager's zeros: of which sign, and beside infinite ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize


class Scaled(nn.Module):
    """Activations less the one that is found; the backward begins with the factor that is given."""

    def __init__(self, op: str, transposed: bool = False) -> None:
        super().__init__()
        self.layer, self.op, self.transposed = nn.Linear(6, 5), op, transposed

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).tanh().round(decimals=1)  # so that several are found
        hidden = hidden + self.layer(x).sin()
        found = getattr(hidden.t() if self.transposed else hidden, self.op)()
        return found * factor


@pytest.mark.parametrize("factor", [1.0, -1.0, -math.inf, math.nan])
@pytest.mark.parametrize("op", ["max", "min", "median", "nanmedian"])
def test_bits_and_signs(op: str, factor: float) -> None:
    torch.manual_seed(0)
    eager = Scaled(op)
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    for number in range(3):
        x = torch.randn(4, 6).round()
        given = [x.clone().requires_grad_() for _ in range(2)]
        for run, one in zip((eager, step), given, strict=True):
            run(one, torch.tensor(factor)).backward()
        assert _bits(given[0].grad) == _bits(given[1].grad), number
    for p, q in zip(eager.parameters(), other.parameters(), strict=True):
        assert _bits(p.grad) == _bits(q.grad)
    assert step.plans and not step.failures


def test_all_that_are_equal_share_the_gradient() -> None:
    for x in (torch.tensor([1.0, 3.0, 3.0, -2.0]), torch.tensor([1.0, math.nan, math.nan, 3.0])):
        step: Any = rematerialize(
            lambda x: -(x * 2).max() * 3, budget=1.0, cost_model="unit", solver="greedy", time_limit=0.05
        )
        given = [x.clone().requires_grad_() for _ in range(2)]
        (-(given[0] * 2).max() * 3).backward()
        step(given[1]).backward()
        assert _bits(given[0].grad) == _bits(given[1].grad)
        assert given[1].grad is not None and given[1].grad.count_nonzero() == 2 and step.plans


@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_what_lies_transposed_runs_as_before() -> None:
    step: Any = rematerialize(Scaled("max", transposed=True), budget="min", time_limit=0.05)
    step(torch.randn(4, 6), torch.tensor(1.0)).backward()
    assert not step.plans and "lays out the gradient of max" in step.failures[0]


def _bits(value: torch.Tensor | None) -> list[int]:
    assert value is not None
    return value.nan_to_num(nan=7.0).contiguous().view(torch.int32).tolist()  # type: ignore[no-any-return]
