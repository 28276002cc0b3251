"""Buffers that a step assigns to their own names are a part of one graph, and end as in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize


class Table(nn.Module):
    """A table that the forward moves to where its input is, as transformers' CTRL does."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)
        self.table = nn.Buffer(torch.randn(64), persistent=persistent)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.table = self.table.to(device=hidden.device, dtype=hidden.dtype)
        self.seen = self.seen + 1
        for _ in range(3):
            hidden = self.drop(torch.tanh(hidden + self.table))
        return self.last(hidden).square().mean()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_is_assigned_to_itself(persistent: bool) -> None:
    torch.manual_seed(0)
    eager, x = Table(persistent), torch.randn(64, 16)
    ours = copy.deepcopy(eager)
    step = rematerialize(ours, 0.6, cost_model="unit", solver="greedy")

    def trained(module: nn.Module, call: nn.Module | object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer, losses = torch.optim.AdamW(module.parameters()), []
        for _ in range(3):
            losses.append(call(x))  # type: ignore[operator]
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return [*losses, *module.parameters(), *module.buffers()]

    assert all(map(torch.equal, trained(eager, eager), trained(ours, step)))
    assert sum(step.runs) == 3 and len(step.runs) == len(step.plans) and not step.failures
    assert all(plan.rematerializes for plan in step.plans)
    assert ours.state_dict().keys() == eager.state_dict().keys() and float(ours.seen) == 3


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_a_buffer_that_is_written_in_place_is_not_copied_to_itself(budget: Any) -> None:
    """Autograd counts what is written to a tensor."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    step = rematerialize(module, budget=budget, cost_model="unit", solver="greedy")
    counters = [one.num_batches_tracked for one in module if isinstance(one, nn.BatchNorm1d)]
    for run in (module, step, step):
        before = [one._version for one in counters]
        run(torch.randn(3, 4)).sum().backward()
        assert [one._version for one in counters] == [version + 1 for version in before]
    assert [int(one) for one in counters] == [3, 3]
