"""Steps that call ``loss.backward()``: hooks of parameters run, attributes of optimizers are set, the rest is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep


class Own(torch.optim.SGD):
    """With a number of its own, which the step sets."""

    rate = 0.0

    def take(self, loss: Tensor, rate: float) -> None:
        self.rate = rate
        loss.backward()


class Trained:
    """A network whose parameters change while the backward of the step runs, or after it."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.optimizer = Own(self.net.parameters(), lr=0.1)
        self.kind, self.calls = kind, 0
        self.each = {p: torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()}
        for parameter in self.net.parameters():
            if kind == "scaled":
                parameter.register_hook(self.scale)
            elif kind != "after":
                parameter.register_post_accumulate_grad_hook(self.update)

    def scale(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * 2

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        self.calls += 1
        assert parameter.grad is not None
        if self.kind == "by optimizers":
            self.each[parameter].step()
            self.each[parameter].zero_grad()
            return
        parameter.add_(parameter.grad, alpha=-self.optimizer.rate if self.kind == "inside" else -0.1)
        parameter.grad = None

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        if self.kind == "inside":
            self.optimizer.take(loss, 0.2)
        else:
            loss.backward()
        return loss.detach()

    def train(self, call: Callable[[Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(1)
        found: list[Any] = []
        for number in range(4):
            frames = torch._dynamo.utils.counters["frames"]["total"]
            found.append(call(torch.randn(4, 8)))
            if number == 3:  # what runs the backward is no frame to be captured
                assert torch._dynamo.utils.counters["frames"]["total"] == frames
            if self.kind in ("scaled", "after"):
                found += [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
                self.optimizer.step()
                self.optimizer.zero_grad()
        return [*found, *self.net.parameters(), torch.tensor(self.calls), torch.tensor(self.optimizer.rate)]


@pytest.mark.parametrize("kind", ["at once", "by optimizers", "inside", "scaled", "after"])
def test_hooks_of_parameters_run(kind: str) -> None:
    one, other = Trained(kind), Trained(kind)
    step = ScheduledStep(other.step, RematConfig(budget=1.0, solver="greedy", cost_model="unit"))
    plain, scheduled = one.train(one.step), other.train(step)
    assert all(map(torch.equal, plain, scheduled)) and len(plain) == len(scheduled)
    assert one.calls == (0 if kind == "after" else 16)
    assert step.failures == []
    assert sum(step.runs) == 4
    assert not torch.autograd._profiler_enabled(), "a measured step has ended with its call"
