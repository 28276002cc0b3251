"""Gradients that several parts of a step add to one tensor: in eager's order, whatever the parts do with it."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep
from tests.helpers.cases import diagonal
from tests.helpers.parts import USES, Parts


class Looped(Parts):
    """Dynamo leaves a loop with breaks alone: its parts are functions of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x = self.linear(x).sin()
        for part in self.parts:
            torch._dynamo.graph_break()
            h = self.part(part, h, x)
        return (h * x).square().mean()


def steps(module: nn.Module, step: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        module.zero_grad()
        loss = step(torch.randn(16, 8))
        loss.backward()
        found += [loss.detach(), *(torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters())]
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("make", "seed"), diagonal([Parts, Looped], range(8)))
def test_random_parts(make: type[Parts], seed: int) -> None:
    draw = random.Random(seed)
    parts = [draw.choices(sorted(USES), k=draw.randint(1, 4)) for _ in range(3)]
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        module = make(parts)
        step: Any = (
            ScheduledStep(module, RematConfig(budget="min", time_limit=0.1), name="parts") if planned else module
        )
        found.append(steps(module, step))
    assert all(map(torch.equal, *found)), parts
    assert len(step.plans) >= 3 <= sum(step.runs) / 3
    assert not step.failures


class Shown(Parts):
    """A part does much with a tensor, and the loss comes from a view of it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).sin()
        torch._dynamo.graph_break()
        view, unread = x.view(-1), self.part(["product", "viewed"], x, x)
        torch._dynamo.graph_break()
        self.unread = unread.detach()
        return view.square().mean()


def test_a_part_without_a_backward() -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        module = Shown([])
        step: Any = (
            ScheduledStep(module, RematConfig(budget="min", time_limit=0.1), name="shown") if planned else module
        )
        found.append(steps(module, step))
    assert all(map(torch.equal, *found))
    assert step.plans


def test_nothing_is_kept() -> None:
    """After a step there are no more tensors than after one in eager mode."""
    held = []
    for planned in (False, True):
        module = Parts([["again", "again"], ["scaled", "again"], ["linear"]])
        step: Any = (
            ScheduledStep(module, RematConfig(budget="min", time_limit=0.1), name="parts") if planned else module
        )
        for _ in range(2):
            step(torch.randn(16, 8)).backward()
            gradients = sum(p.grad.norm() for p in module.parameters() if p.grad is not None)
            module.zero_grad()
        gc.collect()
        held.append(
            sum(type(one) is torch.Tensor and one.shape == (8, 8) and not one.is_meta for one in gc.get_objects())
        )
        assert gradients > 0
    assert held[1] == held[0]


class PassedOn(nn.Module):
    """Parts add what they are given to something, read the sum, and return it: its gradient is a sum, passed on whole."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.before(x).tanh()
        x = self.layers[0](first.sin().cos())
        torch._dynamo.graph_break()
        second = x + first
        x = self.layers[1](second.sin().cos())
        torch._dynamo.graph_break()
        third = x + first
        x = self.layers[2](third.sin().cos())
        torch._dynamo.graph_break()
        x = x + first
        return (x + (((0 + first) + second) + third)).tanh().square().mean()


def test_a_sum_that_an_addition_passes_on_is_one_summand() -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        module = PassedOn()
        step: Any = ScheduledStep(module, RematConfig(budget="min", time_limit=0.1)) if planned else module
        found.append(steps(module, step))
    assert all(map(torch.equal, *found))
    assert len(step.plans) >= 4 and not step.failures
