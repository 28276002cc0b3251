"""Autocast casts a parameter once in a region and adds the gradients of its uses in the low precision; so does the schedule."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.planner import RematWarning
from tests.helpers.training import Classifier, assert_same, compare


def bf16(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


class Shared(nn.Module):
    """One layer, used three times; ``inside`` is entered within the captured function."""

    def __init__(self, inside=contextlib.nullcontext, beside: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1)
        self.inside, self.beside = inside, beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.inside():
            for _ in range(3):
                x = x + self.dropout(self.layer(self.norm(x))).tanh()
        loss = x.float().square().mean()
        if self.beside:  # the parameter has a use in float32 too, before and after in the engine's order
            loss = loss + (self.layer.weight * 1.7).sin().sum()
        return loss


class Twice(Shared):
    """Two regions, each with a cache of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with bf16():
                x = x + self.layer(self.layer(x)).tanh()
        return x.float().square().mean()


def results(make, around, budget):
    found = []
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    for remat in (False, True):
        torch.manual_seed(0)
        module = make()
        step = rematerialize(module, budget=budget, cost_model="unit") if remat else module
        with around():
            loss = step(x)
        loss.backward()
        found.append({"loss": loss.detach(), "gradients": [p.grad for p in module.parameters()]})
    assert_same(*found)
    return step


@pytest.mark.long
@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize(
    ("make", "around"),
    [
        (Shared, bf16),
        (lambda: Shared(beside=True), bf16),
        (lambda: Shared(inside=bf16), contextlib.nullcontext),
        (lambda: Shared(inside=bf16), bf16),
        (lambda: Shared(inside=lambda: bf16(enabled=False)), bf16),
        (Shared, lambda: bf16(cache_enabled=False)),
    ],
    ids=["around", "beside", "inside", "both", "off-inside", "no-cache"],
)
def test_a_parameter_used_several_times(make, around, budget):
    step = results(make, around, budget)
    assert step.plans and not step.failures


def test_the_cast_is_one():
    casts = {}
    for cache in (True, False):
        step = results(Shared, lambda cache=cache: bf16(cache_enabled=cache), 1.0)
        shapes = [step.plan.graph.tensors[op.outputs[0]].shape for op in step.plan.graph.ops if "_to_copy" in op.target]
        casts[cache] = shapes.count((32, 32))
    assert casts[False] - casts[True] >= 4  # three casts and three gradients are one each


def test_several_regions_run_as_before():
    with pytest.warns(RematWarning, match="is used 2 times under autocast|is used 4 times under autocast"):
        results(Twice, contextlib.nullcontext, 0.5)


class Siamese(Classifier):
    """The same network on two halves of a batch."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        one, other = self.net(x), self.net(x.flip(1))
        loss = (one - other).square().mean() + one.square().mean()
        self.log("loss", loss)
        return loss


def test_a_module_called_twice_in_a_mixed_precision_step():
    compare(Siamese, budget=0.5, precision="bf16-mixed")


@pytest.mark.filterwarnings("ignore:.*could not be captured")
@pytest.mark.parametrize("around", [contextlib.nullcontext, bf16])
def test_bilinear_layers_run_as_before_under_autocast(around):
    """Their kernel calls products by itself, in low precision there."""
    torch.manual_seed(0)
    layer, x = nn.Bilinear(8, 8, 4), torch.randn(6, 8)
    step = rematerialize(lambda x: layer(x, x + 1).square().mean(), "min", cost_model="unit", solver="greedy")
    gradients = []
    for run in (step.original, step):
        layer.zero_grad()
        with around():
            loss = run(x)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *gradients))
    assert bool(step.plans) is (around is contextlib.nullcontext)
    assert bool(step.plans) or "bilinear" in step.failures[0]
