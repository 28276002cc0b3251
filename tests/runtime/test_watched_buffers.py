"""Buffers that the backward reads again are copied in the first runs of a plan, to see whether they move: within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.measure import held_bytes, peak_memory


class Tabled(nn.Module):
    """Activations are multiplied with a table, a tenth or so of what the step saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(256, 256))
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x) * self.table)
        return x.square().mean()


@pytest.mark.parametrize("budget", [0.5, "min"])
def test_the_first_runs_are_within_the_budget(budget: Any) -> None:
    torch.manual_seed(0)
    network, x = Tabled(), torch.randn(256, 256)
    step = rematerialize(network, budget=budget, solver="greedy", cost_model="profile")

    def trained() -> None:
        loss = step(x)
        network.zero_grad()
        loss.backward()

    trained()
    first = step.plan
    assert first is not None and first.rematerializes
    for run in range(1, 4):
        measured = held_bytes(network, x, gradients=True) + peak_memory(trained)
        plan = step.plan
        assert plan is not None and measured <= plan.budget_bytes == first.budget_bytes
        assert abs(plan.predicted_peak_bytes / measured - 1) <= 0.02
        copied = network.table.nbytes if run < 2 else 0
        assert first.predicted_peak_bytes - plan.predicted_peak_bytes == network.table.nbytes - copied
    assert len(step.plans) == 1
