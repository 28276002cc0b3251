"""What is planned, and agreed upon among processes: each question has an answer of its own, and a budget may be lowered."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep
from tests.helpers.training import network


class OneProcess:
    """An agreement with itself: as in `Agreement`, a question that was answered keeps its answer."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}

    def once(self, question: str, answer: Callable[[], Any]) -> Any:
        if question not in self.answers:
            self.answers[question] = json.dumps(answer())
        return json.loads(self.answers[question])

    def questions(self, about: str) -> set[str]:
        return {question for question in self.answers if question.split()[0] == about}


def stepped(function: Callable[..., Any], agreement: OneProcess, **options: Any) -> ScheduledStep:
    return ScheduledStep(
        function, RematConfig(**{"cost_model": "unit", "solver": "greedy", **options}), agreement=agreement
    )


def test_costs_are_those_of_the_ops_that_were_asked_about() -> None:
    agreement, x = OneProcess(), torch.randn(8, 8, requires_grad=True)
    functions = (lambda x: x.tanh().sum(), lambda x: x.sigmoid().sum(), lambda x: x.sigmoid().sum())
    for function in functions:
        torch._dynamo.reset()
        stepped(function, agreement, budget=1.0)(x).backward()
    assert len(agreement.questions("costs")) == 2, "the same structure and bytes, but other ops"


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(3), nn.Sequential(nn.Linear(4, 64), *network(3, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("agreement", [OneProcess(), None], ids=["several processes", "one"])
def test_a_lowered_budget_holds_for_plans_made_together(agreement: OneProcess | None) -> None:
    torch.manual_seed(0)
    module = InParts()
    step = ScheduledStep(module, RematConfig(budget=0.9, cost_model="unit", solver="greedy"), agreement=agreement)
    x = torch.randn(64, 16)
    for _ in range(3):
        step(x).backward()
    before = step.last_plan
    assert before is not None and len(step.plans) > 2
    budget = step.tighten()
    assert budget is not None and budget < before.predicted_peak_bytes
    for _ in range(2):
        step(x).backward()
        assert step.last_plan is not None and step.last_plan.predicted_peak_bytes <= budget


def test_a_budget_that_cannot_be_lowered_stays(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module = network(3)
    other = copy.deepcopy(module)
    step = ScheduledStep(
        lambda x: module(x).square().mean(), RematConfig(budget="min", cost_model="unit", solver="greedy")
    )
    x = torch.randn(64, 16)
    step(x).backward()
    plans, config = list(step.plans), step.config
    with pytest.raises(InfeasibleBudgetError):
        step.tighten(1)
    assert step.config == config and step.plans == plans
    with caplog.at_level(logging.INFO, "lightning_remat"):
        for _ in range(3):
            module.zero_grad()
            torch.manual_seed(3)
            step(x).backward()
    told = [record for record in caplog.records if record.name.startswith("lightning_remat")]
    assert step.plans == plans and not told, "it goes on as before, and plans nothing"
    for _ in range(4):
        other.zero_grad()
        torch.manual_seed(3)
        other(x).square().mean().backward()
    for (name, ours), (_, eager) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad), name
