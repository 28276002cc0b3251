"""A step that writes to one of several alike modules before it calls any: the others are not taken for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize


class Scaled(nn.Module):
    """What is written to is the module's own, or held by something that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.doubled, self.settings = 1.0, False, [{"shift": 0.0}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * (2 if self.doubled else 1) * self.scale + self.settings[0]["shift"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), Scaled(), nn.Dropout(0.5)) for _ in range(3))
        self.blocks: Any = nn.ModuleList(blocks)


WRITES: dict[str, Callable[[Any], Any]] = {
    "evaluated": lambda net: net.blocks[0].eval(),
    "all but one": lambda net: (net.blocks.eval(), net.blocks[2].train()),
    "dropout": lambda net: setattr(net.blocks[0][3], "p", 0.1),
    "momentum": lambda net: setattr(net.blocks[1][1], "momentum", 0.9),
    "flag": lambda net: setattr(net.blocks[0][2], "doubled", True),
    "number": lambda net: setattr(net.blocks[1][2], "scale", 3.0),
    "inside": lambda net: net.blocks[0][2].settings[0].update(shift=0.3),
    "itself": lambda net: setattr(net, "seen", 1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["of a function", "of a module"])
@pytest.mark.parametrize("name", WRITES)
def test_bits(name: str, inside: bool) -> None:
    torch.manual_seed(0)
    eager = Net()
    other = copy.deepcopy(eager)

    def step(net: Net, x: torch.Tensor) -> torch.Tensor:
        WRITES[name](net)
        for block in net.blocks:
            x = block(x)
        return x.square().mean()

    if inside:
        Net.forward = step  # type: ignore[assignment]
    options: dict[str, Any] = {"cost_model": "unit", "solver": "greedy", "time_limit": 0.05}
    planned: Any = rematerialize(other if inside else lambda x: step(other, x), "min", **options)
    runs = (eager if inside else lambda x: step(eager, x), planned)
    for seed in range(3):
        losses = []
        for net, run in zip((eager, other), runs, strict=True):
            net.train()
            net.zero_grad()
            torch.manual_seed(seed)
            loss = run(torch.randn(8, 16))
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
        assert all(map(torch.equal, eager.buffers(), other.buffers()))
    assert planned.plans and not planned.failures
