"""A step in parts of very different size: what is asked for is a budget of the whole, from the first run on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import InfeasibleBudgetError, Plan, rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.measure import held_bytes, peak_memory
from tests.helpers.training import assert_same, fit

WIDTH, ROWS = 64, 512


def layers(count: int, width: int = WIDTH) -> nn.Sequential:
    made = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)]
    return nn.Sequential(*(module for layer in made for module in layer))


class Uneven(nn.Module):
    """Three parts: one in which nothing can be saved, a large one, and one of a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.large, self.small = nn.Linear(WIDTH, WIDTH), layers(4), layers(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bias(x)
        torch._dynamo.graph_break()
        x = self.large(x)
        torch._dynamo.graph_break()
        return self.small(x).square().mean()


class Step(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Uneven()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(module: nn.Module, call: Any, x: torch.Tensor) -> torch.Tensor:
    loss = call(x)
    module.zero_grad(set_to_none=True)
    loss.backward()
    return loss.detach()


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(module: nn.Module, call: Any, measured: list[int] | None = None) -> list[torch.Tensor]:
    """Three steps, the second measured if asked for; what they end with."""
    torch.manual_seed(3)
    optimizer, losses, x = torch.optim.SGD(module.parameters(), lr=0.1), [], inputs()
    for number in range(3):
        if measured is not None and number == 1:
            held = held_bytes(module, x, gradients=True)
            measured.append(held + peak_memory(lambda: losses.append(step(module, call, x)), "cpu"))
        else:
            losses.append(step(module, call, x))
        optimizer.step()
    return [*losses, *(t.detach().clone() for t in module.state_dict().values()), torch.get_rng_state()]


def uneven() -> Uneven:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Uneven()


def planned(budget: Any, time_limit: float = 0.5) -> Callable[[nn.Module], Any]:
    return lambda module: rematerialize(module, budget=budget, cost_model="unit", time_limit=time_limit)


def whole(plans: Sequence[Plan]) -> list[Plan]:
    """Those that were made for the call as a whole."""
    return [plan for plan in plans if any(op.name == "outside" for op in plan.graph.ops)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("budget", [pytest.param(0.9, marks=SLOW), 0.6, "min", pytest.param("2MiB", marks=SLOW)])
def test_a_budget_is_that_of_the_whole_step(budget: Any) -> None:
    original = uneven()
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    expected = train(eager, eager)
    call, measured = planned(budget)(module), []
    assert all(map(torch.equal, expected, train(module, call, measured)))
    assert call.failures == ()
    assert call.runs == (1, 1, 1, 2, 2, 2)
    together = whole(call.plans)
    assert len(together) == 3
    (limit,) = {plan.budget_bytes for plan in together}
    if isinstance(budget, float):
        plain = max(plan.baseline_peak_bytes for plan in together)
        floor = held_bytes(module, inputs(), gradients=True)
        assert 0.9 * budget <= (limit - floor) / (plain - floor) <= 1.1 * budget
    assert any(plan.rematerializes for plan in together)
    assert max(plan.predicted_peak_bytes for plan in together) <= limit
    assert 0.8 * limit <= max(measured) <= limit


@pytest.mark.parametrize("budget", [0.05, pytest.param(600_000, marks=SLOW)])
def test_a_budget_that_is_too_small_is_refused_for_the_whole_step_each_time(budget: Any) -> None:
    module = uneven()
    call = planned(budget)(module)
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as caught:
            call(inputs())
    assert call.runs == (2, 2, 2)
    assert not whole(call.plans)
    smallest = caught.value.smallest_bytes
    assert smallest >= max(plan.predicted_peak_bytes for plan in call.plans)
    if budget == 0.05:
        return
    measured: list[int] = []
    train(module, planned(int(1.02 * smallest))(module), measured)
    assert max(measured) <= 1.02 * smallest


def test_less_than_the_budget_is_planned_for_the_whole_step_too() -> None:
    original = uneven()
    eager = copy.deepcopy(original)
    expected = train(eager, eager)
    call, measured = planned(0.9)(copy.deepcopy(original)), []
    call(inputs())
    smaller = call.scheduled.tighten()
    assert smaller is not None
    assert smaller < call.plans[3].budget_bytes
    module = call.original
    module.load_state_dict(original.state_dict())
    assert all(map(torch.equal, expected, train(module, call, measured)))
    assert max(measured) <= smaller
    assert {plan.budget_bytes for plan in whole(call.plans)[3:]} == {smaller}
    assert call.runs[-6:] == (1, 1, 1, 2, 2, 2)  # the first of them measured, then planned again


@pytest.mark.parametrize("budget", [0.6, pytest.param("min", marks=SLOW), pytest.param("2MiB", marks=SLOW)])
def test_a_lightning_step_in_parts_has_one_budget(budget: Any) -> None:

    def data() -> DataLoader[Any]:
        return DataLoader(TensorDataset(inputs().repeat(6, 1)), ROWS)

    plain = fit(Step, train=data)
    remat = RematCallback(budget, cost_model="unit", time_limit=0.5, artifacts=False)
    scheduled = fit(Step, remat, train=data, log_every_n_steps=2)
    assert_same(plain.results, scheduled.results)
    assert remat.failures == ()
    first, again = whole(remat.plans)[:3], whole(remat.plans)[3:]
    assert len(again) == 3  # a measured step held less than was planned for
    assert list(remat.runs) == [1, 1, 1, 1, 1, 1, 4, 4, 4]
    assert remat.measured_peak_bytes is not None
    assert remat.measured_peak_bytes <= again[0].budget_bytes <= first[0].budget_bytes
    assert remat.measured_peak_bytes == pytest.approx(max(plan.predicted_peak_bytes for plan in again), rel=0.01)
