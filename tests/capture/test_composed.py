"""Ops that torch composes otherwise for tensors that are traced are captured as eager mode composes them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize


def steps(module: nn.Module, *batch: torch.Tensor, **options: Any) -> tuple[Any, bool]:
    """The step after two calls, and whether losses and gradients have had eager's bits."""
    other = copy.deepcopy(module)
    options = {"budget": "min", "cost_model": "unit", "solver": "greedy", "time_limit": 0.05, **options}
    step: Any = rematerialize(other, **options)
    found: list[list[torch.Tensor]] = []
    for one, run in ((module, module), (other, step)):
        results = []
        for _ in range(2):
            one.zero_grad()
            loss = run(*batch)
            loss.backward()
            results += [loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)]
        found.append(results)
    return step, len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


class Product(nn.Module):
    """A product of two batches, of which one may be a constant."""

    def __init__(self, left: tuple[int, ...], right: tuple[int, ...], trained: int) -> None:
        super().__init__()
        for number, shape in enumerate((left, right)):
            value = torch.randn(shape)
            name = ("left", "right")[number]
            if trained in (number, 2):
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.matmul(self.left, self.right)
        return (product * product.detach().cos()).sum() * x.sum() * self.scale + (product * 0.5).tanh().sum()


SHAPES = [
    ((5, 5, 5), (1, 5, 5)),
    ((1, 5, 5), (5, 5, 5)),
    ((4, 7, 9), (1, 9, 1)),
    ((1, 7, 9), (4, 9, 3)),
    ((2, 3), (5, 3, 4)),
]


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_a_batch_that_is_repeated(left: tuple[int, ...], right: tuple[int, ...], trained: int) -> None:
    torch.manual_seed(0)
    step, same = steps(Product(left, right, trained), torch.full((2,), 0.7))
    assert same
    assert len(step.plans) == 1 and not step.failures


def test_a_batch_that_is_repeated_with_sizes_that_vary() -> None:
    """A graph convolution: the same neighbours for all graphs of a batch."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = torch.rand(1, 9, 9)
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (self.near @ self.first(x)).tanh()
            return self.second(self.near @ hidden).square().mean()

    torch.manual_seed(0)
    eager = Graph()
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=1.0, cost_model="unit", solver="greedy", time_limit=0.05)
    for batch in (5, 7, 6, 5):
        x = torch.randn(batch, 9, 8)
        losses = []
        for module, run in ((eager, eager), (other, step)):
            module.zero_grad()
            loss = run(x)
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
    assert step.plans and not step.failures


class Loss(nn.Module):
    """A cross entropy over weighted classes."""

    weight: torch.Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.logits, self.options = nn.Linear(8, 37), options
        self.register_buffer("weight", torch.rand(37))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x)
        if logits.dim() > 2:
            logits = logits.transpose(1, 2)
        return functional.cross_entropy(logits, target, self.weight, **self.options).sum()


OPTIONS = list(itertools.product([0.0, 0.1], ["mean", "sum", "none"], [-100, 3], [0, 7], [False, True]))


@pytest.mark.parametrize(("smoothing", "reduction", "ignored", "number", "sequences"), OPTIONS)
def test_a_weighted_loss(smoothing: float, reduction: str, ignored: int, number: int, sequences: bool) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(53, 5, 8), torch.randint(37, (53, 5))
    if not sequences:
        x, target = x[:, 0], target[:, 0].clone()
    target[:number] = ignored
    module = Loss(label_smoothing=smoothing, reduction=reduction, ignore_index=ignored)
    step, same = steps(module, x, target)
    assert same
    assert len(step.plans) == 1 and not step.failures


VALUES = {
    "singular values": torch.linalg.svdvals,
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "spectral norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "of symmetric ones": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "upper": lambda x: torch.linalg.eigvalsh(x @ x.mT, UPLO="U"),
    "complex": lambda x: torch.linalg.eigvals(x).abs(),
    "condition": torch.linalg.cond,
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_without_vectors(name: str, trained: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(9, 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = VALUES[name](x + self.shift if trained else x)
            parts = (found * self.scale).tanh().sum() + (found * found.detach().cos() * self.scale).sum()
            return parts + self.shift.sum()

    torch.manual_seed(0)
    step, same = steps(Scaled(), torch.randn(5, 9, 9))
    assert same
    assert len(step.plans) == 1 and not step.failures
