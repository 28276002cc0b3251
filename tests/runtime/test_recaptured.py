"""Functions in which sizes change with each call are left alone where they save little, while the rest stays planned."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.runtime import _captures
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


class Cropped(nn.Module):
    """A network on boxes of the batch, which functions draw that compute no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(cropped(x)).square().mean()


def cropped(x: torch.Tensor) -> torch.Tensor:
    begin = random.randrange(1 << 20)
    return from_there(x * 2, begin)


def from_there(x: torch.Tensor, begin: int) -> torch.Tensor:
    x = x[:, : 17 + begin % 60] + 1
    torch._dynamo.graph_break()
    return turned(x, begin)


def turned(x: torch.Tensor, begin: int) -> torch.Tensor:
    return x.flip(1)[:, : 9 + begin % 7][:, :8] + begin % 3


def test_what_has_no_gradients_is_soon_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is planned, and it would be captured with each call."""
    monkeypatch.setattr(_captures, "OFTEN", 1000)
    found = []
    for run in (False, True):
        random.seed(0)
        torch.manual_seed(0)
        module = Cropped()
        call = rematerialize(module, 1.0, cost_model="unit", solver="greedy") if run else module
        losses = []
        for number in range(24):
            if number == 20:
                captured = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            loss = call(torch.randn(4, 80))
            loss.backward()
            losses.append(loss.detach())
        found.append(losses)
        if run:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == captured
            assert call.failures == () and sum(call.runs) == 24
    training.assert_same(*found)


class Noisy(nn.Module):
    """Draws noise from a seed of NumPy's, in a function that is captured without a graph, and then as Python runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net(x).tanh()
        for _ in range(2):
            self.calls += 1
            seed = np.random.SeedSequence(entropy=self.calls * 7919).generate_state(1)[0]
            hidden = half(self.net, hidden + 0.1 * noise(seed))
            if hidden.sum().item() > 1e9:
                break
        return hidden.square().sum()


def noise(seed: Any) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(int(seed)))


def half(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).tanh()


def test_what_has_no_graph_is_soon_left() -> None:
    found = []
    for run in (False, True):
        torch.manual_seed(0)
        module = Noisy()
        call = rematerialize(module, 1.0, cost_model="unit", solver="greedy") if run else module
        losses = []
        for number in range(12):
            if number == 8:
                frames = torch._dynamo.utils.counters["frames"]["total"]
            loss = call(torch.ones(4, 8))
            loss.backward()
            losses.append(loss.detach())
        found.append(losses)
        if run:
            assert torch._dynamo.utils.counters["frames"]["total"] == frames
            assert sum(call.runs) >= 24
    training.assert_same(*found)


class Targets(nn.Module):
    """A network, in front of the first ops on targets whose number varies, and of a value that Python asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), targets)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets * 2 - 1
        torch._dynamo.graph_break()
        return self.assigned(self.head(hidden), targets)

    def assigned(self, found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.cdist(targets, found).min(1).values.mean() + found.square().mean()


@pytest.mark.filterwarnings("ignore:.*since sizes (of little )?in it change with each")
def test_a_network_is_captured_on_its_own_where_the_sizes_of_targets_vary() -> None:
    found = []
    for run in (False, True):
        torch.manual_seed(0)
        module = Targets()
        call = rematerialize(module, 0.5, cost_model="unit", solver="greedy") if run else module
        x, gradients, calls = torch.randn(256, 32), [], _captures.VARIES + 3 * OFTEN + 2
        for number in range(calls):
            if number == calls - 1 and run:
                plans, runs = len(call.plans), sum(call.runs)
            gradients.append(torch.autograd.grad(call(x, torch.rand(3 + number, 4)), list(module.parameters())))
        found.append(gradients)
        if run:
            said = "\n".join(call.failures)
            assert "sizes of little in it change" in said and "Targets.forward" in said
            assert sum(call.runs) > runs, "the network runs by its plan"
            assert len(call.plans) == plans, "nothing is captured or planned for another number of targets"
            assert any(plan.rematerializes for plan in call.plans[-3:])
    training.assert_same(*found)
