"""Gradients of several processes come in eager's order: DDP fills its buckets as they come."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import networks
from lightning_remat.capture import _torch as internals
from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep
from tests.helpers.cases import slow_but


def order(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The names of the parameters in the order in which their gradients come; hooks are there in the second run only."""
    run()
    found: list[str] = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
        for name, p in module.named_parameters()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


def compared(module: nn.Module, call: Callable[[Callable[..., Any]], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The same order in eager mode and by a plan; returns how many plans there are."""
    monkeypatch.setattr(internals, "processes", lambda: 3)
    expected = order(module, lambda: call(module).backward())
    step = ScheduledStep(module, RematConfig(budget="min", solver="greedy", cost_model="unit"))
    found = order(module, lambda: call(step).backward())
    assert not step.failures and step.plans
    assert found == expected and len(found) > 3
    return len(step.plans)


NETWORKS = ["gpt2", "t5", "swin", "resnet18", "unet", "mobilenet"]


@pytest.mark.parametrize(
    ("name", "half"),
    slow_but({("mobilenet", False), ("gpt2", True), ("unet", True)}, itertools.product(NETWORKS, (False, True))),
)
def test_networks(name: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = networks.build(name, "tiny")

    def call(step: Callable[..., Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return step(*work.batch)

    compared(work.module, call, monkeypatch)


class Unread(nn.Module):
    """With a layer whose result nothing reads, and one that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unread, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh().sin()
        self.unread(x)
        return x.square().mean()


@pytest.mark.parametrize("processes", [1, 3])
def test_hooks_of_parameters_without_a_gradient_are_not_called(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "processes", lambda: processes)
    module, x = Unread(), torch.randn(4, 8)
    step = ScheduledStep(module, RematConfig(budget="min", solver="greedy", cost_model="unit"))
    found = order(module, lambda: step(x).backward())
    assert sorted(found) == ["first.bias", "first.weight"] and not step.failures


class Parted(nn.Module):
    """Weights that are used twice, out of their order, in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.norm, self.twice = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale, self.unused = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.twice(x).tanh()) * self.scale
        torch._dynamo.graph_break()
        x = functional.bilinear(x, x, self.twice.weight.view(2, 4, 8).repeat(1, 2, 1)) @ self.scale[:2].outer(
            self.scale
        )
        torch._dynamo.graph_break()
        return (self.late(x.sin()) * self.scale + self.twice(x).cos()).square().mean()


def test_weights_that_are_shared_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = Parted(), torch.randn(4, 8)
    assert compared(module, lambda step: step(x), monkeypatch) >= 3


def test_in_one_process_nothing_is_put_in_order() -> None:
    assert internals.processes() == 1
    work = networks.build("resnet18", "tiny")
    step = ScheduledStep(work.module, RematConfig(budget="min", solver="greedy", cost_model="unit"))
    step(*work.batch).backward()
    (graph,) = step._plans.graphs
    assert graph.captured.gradient_arguments  # and the next functions of its node are leaves
    loss = step(*work.batch)
    kinds = {type(one).__name__ for one, _ in internals.captured_node(loss)[0].next_functions if one is not None}
    assert kinds == {"AccumulateGrad"}
