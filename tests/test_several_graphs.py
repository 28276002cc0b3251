"""A step that is captured as several graphs: one budget over all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.measure import held_bytes, peak_memory


class Broken(torch.nn.Module):
    """Two halves with a break of the graph between them."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()

        def half() -> torch.nn.Sequential:
            parts = [(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(layers)]
            return torch.nn.Sequential(*(module for part in parts for module in part))

        self.first, self.second = half(), half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def train(call: Any, module: torch.nn.Module, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = call(x)
        module.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in module.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize(("share", "captures"), [(0.8, 1), (0.3, 2)])
def test_graphs_share_one_budget(share: float, captures: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    original, x = Broken(), torch.randn(2048, 128)
    eager = copy.deepcopy(original)
    expected = train(eager, eager, x, 4)
    held = held_bytes(eager, x, gradients=True)
    plain = held + peak_memory(lambda: step(eager, eager, x), "cpu")
    floor = held_bytes(eager, x, gradients=True)
    budget = round(floor + share * (plain - floor))

    module = copy.deepcopy(original)
    scheduled = rematerialize(module, budget=budget, cost_model="unit")
    result = train(scheduled, module, x, 4)
    assert all(map(torch.equal, expected, result))
    assert scheduled.failures == ()
    if captures == 1:
        assert scheduled.runs == (4, 4)
    else:  # the first graph left too little for the second: both were planned again, now that both were known
        assert scheduled.runs == (1, 1, 3, 3)
        assert max(plan.predicted_peak_bytes for plan in scheduled.plans[:2]) > budget
        assert any(op.name == "outside" for op in scheduled.plans[2].graph.ops)
    plans = scheduled.plans[-2:]
    assert max(plan.predicted_peak_bytes for plan in plans) <= budget
    assert any(plan.rematerializes for plan in plans)
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, scheduled, x), "cpu")
    assert measured <= budget
    assert measured <= 1.02 * max(plan.predicted_peak_bytes for plan in plans)


def step(module: torch.nn.Module, call: Any, x: torch.Tensor) -> None:
    loss = call(x)
    module.zero_grad(set_to_none=True)
    loss.backward()
