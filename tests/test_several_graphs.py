"""A step that is captured as several graphs: one budget over all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat.measure import held_bytes, peak_memory


class Broken(torch.nn.Module):
    """Parts with a break of the graph after each but the last."""

    def __init__(self, parts: int = 2, width: int = 128, layers: int = 4) -> None:
        super().__init__()

        def part() -> torch.nn.Sequential:
            made = [(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(layers)]
            return torch.nn.Sequential(*(module for layer in made for module in layer))

        self.parts = torch.nn.ModuleList(part() for _ in range(parts))
        self.skips = parts < 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()  # not in a loop: Dynamo captures nothing then
        if not self.skips:
            x = self.parts[1](x)
            torch._dynamo.graph_break()
        return self.parts[-1](x).square().mean()


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


@pytest.mark.parametrize("share", [0.8, 0.3])
@pytest.mark.parametrize("parts", [2, 3])
def test_graphs_share_one_budget(share: float, parts: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    original, x = Broken(parts), torch.randn(2048, 128)
    eager = copy.deepcopy(original)
    expected = train(eager, eager, x, 4)
    held = held_bytes(eager, x, gradients=True)
    plain = held + peak_memory(lambda: step(eager, eager, x), "cpu")
    floor = held_bytes(eager, x, gradients=True)
    budget = round(floor + share * (plain - floor))

    module = copy.deepcopy(original)
    scheduled = rematerialize(module, budget=budget, cost_model="unit", time_limit=6.0)
    result = train(scheduled, module, x, 4)
    assert all(map(torch.equal, expected, result))
    assert scheduled.failures == ()
    assert scheduled.runs == (1,) * parts + (3,) * parts  # each planned as it came, then all of them together
    alone, together = scheduled.plans[:parts], scheduled.plans[parts:]
    if share < 0.5:  # the first graphs, alone, left too little for the others
        assert max(plan.predicted_peak_bytes for plan in alone) > budget
    else:
        assert sum(plan.predicted_seconds for plan in together) <= sum(plan.predicted_seconds for plan in alone)
    assert max(plan.predicted_peak_bytes for plan in together) <= budget
    assert {plan.budget_bytes for plan in together} == {budget}
    assert any(plan.rematerializes for plan in together)
    assert any(op.workspace_bytes for plan in together for op in plan.graph.ops if op.name == "outside")
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, scheduled, x), "cpu")
    assert measured <= budget
    assert measured <= 1.02 * max(plan.predicted_peak_bytes for plan in together)
    assert measured >= 0.9 * max(plan.predicted_peak_bytes for plan in together)


def test_the_smallest_budget_is_that_of_all_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Broken(), torch.randn(2048, 128)
    scheduled = rematerialize(module, budget="min", cost_model="unit", time_limit=6.0)
    train(scheduled, module, x, 2)
    least = scheduled.plans[-1].budget_bytes
    assert scheduled.runs == (1, 1, 1, 1)
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, scheduled, x), "cpu")
    assert 0.9 * least <= measured <= least
    smaller = rematerialize(module, budget=int(0.97 * least), cost_model="unit", time_limit=6.0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        smaller(x)
    assert caught.value.smallest_bytes == pytest.approx(least, rel=1e-3)


def test_a_backward_is_that_of_its_forward_whatever_runs_meanwhile() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    original, x = Broken(), torch.randn(256, 128)
    results = []
    for module in (copy.deepcopy(original), copy.deepcopy(original)):
        call = module if not results else rematerialize(module, budget=0.5, cost_model="unit", time_limit=6.0)
        torch.manual_seed(1)
        first = call(x)  # with the plans made as the graphs came
        second = call(2 * x)  # with those made together
        second.backward()
        first.backward()
        results.append([first.detach(), second.detach(), *(p.grad for p in module.parameters())])
    assert call.runs == (1, 1, 1, 1)
    assert all(map(torch.equal, *results))


def test_a_call_that_goes_another_way_runs_the_plans_of_its_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    original, x = Broken(3), torch.randn(256, 128)
    results = []
    for module in (copy.deepcopy(original), copy.deepcopy(original)):
        call = module if not results else rematerialize(module, budget=0.5, cost_model="unit", time_limit=6.0)
        torch.manual_seed(1)
        for skips in (False, False, True, True, False):
            module.skips = skips
            call(x).backward()
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))
    assert call.failures == ()


def step(module: torch.nn.Module, call: Any, x: torch.Tensor) -> None:
    loss = call(x)
    module.zero_grad(set_to_none=True)
    loss.backward()
