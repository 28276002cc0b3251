"""Blocks that the user has marked with ``torch.compiler.nested_compile_region``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_remat import rematerialize
from tests.helpers.training import assert_same

BLOCKS = 4


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = nn.Linear(16, 48), nn.Linear(48, 16), norm, nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Marked(Block):
    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Outer(Marked):
    """A region with two in it, of which one is checkpointed."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm)
        self.first, self.second = Marked(nn.LayerNorm(16)), Marked(nn.LayerNorm(16))

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(checkpoint(self.first, x, use_reentrant=False)))


class Net(nn.Module):
    def __init__(self, kind: type[Block], norm: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(norm(16)) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(net: nn.Module, step, steps: int = 3) -> dict[str, object]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        losses.append(step(torch.randn(32, 16)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return {"losses": losses, "parameters": list(net.parameters()), "buffers": list(net.buffers())}


@pytest.mark.long
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("kind", [Marked, Outer])
def test_marked_blocks_are_captured_whole_and_rematerialized(kind: type[Block], norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = Net(kind, norm)
    scheduled = copy.deepcopy(net)
    step = rematerialize(scheduled, budget="min", cost_model="unit", time_limit=2.0)
    assert_same(trained(net, net), trained(scheduled, step))
    assert step.runs == (3,) and step.failures == ()
    assert step.plan.rematerializes


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_the_graph_is_that_of_unmarked_blocks(norm: type[nn.Module]) -> None:
    graphs = []
    for kind in (Block, Marked):
        net = Net(kind, norm)
        step = rematerialize(net, budget=1.0, cost_model="unit")
        step(torch.randn(32, 16))
        graphs.append(step.plan.graph)
    plain, marked = graphs
    assert [op.target for op in marked.ops] == [op.target for op in plain.ops]
    assert [op.module for op in marked.ops] == [op.module for op in plain.ops]
    assert {op.module for op in marked.ops} >= {f"blocks.{i}.down" for i in range(BLOCKS)}
    assert sorted(marked.storages) == sorted(plain.storages)
