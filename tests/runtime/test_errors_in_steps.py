"""A step that raises an error, and a loop that goes on with the next batch: other batches stay planned."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import InfeasibleBudgetError, RematWarning, rematerialize


class Net(nn.Module):
    """Batch norm takes no batch of one; other errors are the step's own, and come before or after a graph break."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error == "its own" and x.shape[0] == 1:
            raise ValueError("a batch of one")
        if self.error == "after a break":
            torch._dynamo.graph_break()
            if x.shape[0] == 1:
                raise ValueError("a batch of one")
        if self.error == "inside":
            self.check(x)
        return self.layers(x).square().mean()

    @staticmethod
    def check(x: torch.Tensor) -> None:
        if x.shape[0] == 1:
            raise ValueError("a batch of one")


@pytest.mark.parametrize("sizes", [[16, 16, 1, 16, 8, 1, 16, 8], [1, 16, 16, 8, 8], [1, 1, 16, 1, 16]])
@pytest.mark.parametrize("error", ["batch norm", "its own", "after a break", "inside"])
def test_what_comes_after_an_error_is_planned(error: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    eager = Net(error)
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, "min", cost_model="unit", solver="greedy", time_limit=0.05)
    good = 0
    for number, size in enumerate(sizes):
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(number))
        if size == 1:
            for run in (eager, step):
                with pytest.raises(ValueError, match="a batch of one|more than 1 value per channel"):
                    run(x)
            continue
        good += 1
        for module, run in ((eager, eager), (other, step)):
            module.zero_grad()
            run(x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
        assert sum(step.runs) >= good and not step.failures


def test_shapes_of_which_nothing_can_be_captured_are_told_of() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        found = x @ weight
        for _ in range(2):
            if x.shape[0] == 3:
                torch._dynamo.graph_break()
        return found.square().mean()

    step: Any = rematerialize(loss, "min", cost_model="unit", solver="greedy", time_limit=0.05)
    step(torch.randn(16, 8)).backward()
    with pytest.warns(RematWarning, match="for some shapes nothing could be captured"):
        step(torch.randn(3, 8)).backward()
    step(torch.randn(16, 8)).backward()
    assert sum(step.runs) == 2


@pytest.mark.parametrize("budget", ["1KiB", "min"])
def test_nothing_keeps_a_module_whose_step_has_raised(budget: str) -> None:
    def called() -> weakref.ref[nn.Module]:
        net = Net("its own")
        step = rematerialize(net, budget, cost_model="unit", solver="greedy", time_limit=0.05)
        error = InfeasibleBudgetError if budget != "min" else ValueError
        with pytest.raises(error):
            step(torch.randn(16 if budget != "min" else 1, 8)).backward()
        if budget == "min":
            step(torch.randn(16, 8)).backward()
            assert step.plan is not None
        return weakref.ref(net)

    found = called()
    torch.compiler.reset()
    gc.collect()
    assert found() is None
