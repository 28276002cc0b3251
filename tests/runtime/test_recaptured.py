"""Functions in which sizes change with each call are left alone where they save little, while the rest stays planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.runtime import _captures, _recaptured
from tests.helpers import training

OFTEN = 3


@torch.compiler.disable
def chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Rows that a detector has found, say: their number is known only now."""
    return scores.topk(count).indices


class Detector(nn.Module):
    """A body for images of several sizes, and a head of which the loss is computed for some rows."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])
        self.head = nn.Linear(32, wide)

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        hidden = self.body(x)
        return self.losses(hidden, count) + hidden.square().mean()

    def losses(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        rows = chosen(hidden.detach().sum(1), count)
        return loss_of(self.head, hidden, rows)


def loss_of(head: nn.Module, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return head(hidden[rows]).tanh().sin().square().mean()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recaptured, "OFTEN", OFTEN)
    monkeypatch.setattr(_captures, "OFTEN", OFTEN)


def trained(call: Any, module: nn.Module, calls: int) -> list[Any]:
    numbers = torch.Generator().manual_seed(2)
    torch.manual_seed(1)
    found = []
    for number in range(calls):
        x = torch.randn(64 + 8 * (number % 2), 32, generator=numbers)
        found.append(torch.autograd.grad(call(x, 11 + number), list(module.parameters())))
    return found


def seeded(wide: int) -> Detector:
    torch.manual_seed(0)
    return Detector(wide)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*since sizes in it change with each")
def test_what_saves_little_is_left_and_the_rest_stays_planned() -> None:
    calls = 2 * OFTEN + 1  # first the function that goes on after the break is left, then what that calls
    module = seeded(wide=4)
    step = rematerialize(module, 0.5, cost_model="unit", solver="greedy")
    ours = trained(step, module, calls)
    again = seeded(wide=4)
    training.assert_same(trained(again, again, calls), ours)
    assert any("loss_of" in failure for failure in step.failures)
    plans, runs = len(step.plans), sum(step.runs)
    step(torch.ones(64, 32), 40).backward()
    assert sum(step.runs) > runs, "what is around it runs by plans"
    assert len(step.plans) == plans, "nothing is captured for another number of rows"


@pytest.mark.long
def test_what_saves_much_stays_planned() -> None:
    module, calls = seeded(wide=2048), OFTEN + 1
    step = rematerialize(module, 0.5, cost_model="unit", solver="greedy")
    ours = trained(step, module, calls)
    again = seeded(wide=2048)
    training.assert_same(trained(again, again, calls), ours)
    assert not step.failures
