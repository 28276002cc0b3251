"""Steps that assign to ``.data``: teachers that follow their students, and masked weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import RematWarning, rematerialize


class Taught(nn.Module):
    """A student, and a teacher whose parameters are assigned in the step."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(not frozen)

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.student.parameters(), self.teacher.parameters(), strict=True)

    def distance(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return functional.mse_loss(self.student(x), target)


class Follows(Taught):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for one, other in self.pairs():
                other.data = other.data * 0.9 + one.data * 0.1
        return self.distance(x)


class FollowsAfterwards(Taught):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.distance(x)
        for one, other in self.pairs():
            other.data = other.data * 0.9 + one.data * 0.1
        return loss + self.distance(x + 1)


class ChangesWhatItHasAssigned(Taught):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [other.data for _, other in self.pairs()]
        for one, other in self.pairs():
            value = other.data * 0.9
            other.data = value
            value.add_(one.data, alpha=0.1)
        return self.distance(x) + sum(one.square().mean() for one in kept) * self.student(x).mean()


class TakesTheStudents(Taught):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in self.pairs():
            other.data = one.data
        return self.distance(x)


class Inserted(Taught):
    """The frozen layers are part of what is trained, and move before they are read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in self.pairs():
            other.data = other.data * 0.9 + one.data * 0.1
        return (self.student(x) * self.teacher(x)).square().mean()


class Masked(Taught):
    """As in PixelCNN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.student[0]
        first.weight.data *= torch.ones_like(first.weight).tril()
        return self.distance(x)


class ReadBefore(Taught):
    """Autograd has saved the teacher's parameters: eager mode's backward reads what they are assigned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.student(x) * self.teacher(self.student[0](x)[:, :16])).square().mean()
        for one, other in self.pairs():
            other.data = other.data * 0.9 + one.data * 0.1
        return loss


class Trained(Taught):
    """The parameters that are assigned have gradients."""

    def __init__(self) -> None:
        super().__init__(frozen=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in self.pairs():
            other.data = other.data * 0.9 + one.data * 0.1
        return (self.student(x) - self.teacher(x)).square().mean()


def trained(make: Callable[[], nn.Module], budget: Any = None) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    module = make()
    step: Any = module if budget is None else rematerialize(module, budget=budget, cost_model="unit", solver="greedy")
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    found: dict[str, Any] = {}
    for i in range(4):
        loss = step(torch.randn(32, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss {i}"] = loss.detach()
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    addresses = {p.data_ptr() for p in module.parameters()}
    return found | module.state_dict() | {"shared": len(addresses)}, step


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    ] == []


@pytest.mark.parametrize(
    "make", [Follows, FollowsAfterwards, ChangesWhatItHasAssigned, TakesTheStudents, Inserted, Masked]
)
@pytest.mark.parametrize("budget", ["min", 1.0])
def test_what_is_assigned_is_captured(make: Callable[[], nn.Module], budget: Any) -> None:
    expected, _ = trained(make)
    found, step = trained(make, budget)
    assert_same(expected, found)
    assert not step.failures
    assert step.runs == (4,)


@pytest.mark.parametrize("make", [ReadBefore, Trained])
def test_what_eager_mode_reads_otherwise_runs_as_before(make: Callable[[], nn.Module]) -> None:
    expected, _ = trained(make)
    with pytest.warns(RematWarning, match=r"assigns to the \.data of a tensor .* p\.data\.copy_\(value\)"):
        found, step = trained(make, "min")
    assert_same(expected, found)
    assert sum(step.runs) == 0
