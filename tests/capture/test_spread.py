"""Sums at places that lie in a grid, as matrix products, in steps that may have other bits than eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_remat import rematerialize
from lightning_remat.capture.fusing import _rules, _spread
from lightning_remat.capture.fusing._spread import added_in_grid, spread_by_products
from tests.helpers.fused_forms import take_fused

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules, "LEFT", ())
    monkeypatch.setattr(_spread, "FEWEST", 1)


def places(sizes: tuple[int, ...], goals: tuple[int, ...]) -> list[torch.Tensor]:
    """Of each dimension: some of them twice or never, some counted from the end."""
    shapes = [(size, *[1] * (len(sizes) - 1 - i)) for i, size in enumerate(sizes)]
    return [torch.randint(-goal, goal, shape) for shape, goal in zip(shapes, goals, strict=True)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("goals", [(4, 5), (14, 3), (1, 1)], ids=str)
def test_sums_are_those_of_the_op(layout: torch.memory_format, strided: bool, goals: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 3, 8, 20 if strided else 10, dtype=torch.float64).contiguous(memory_format=layout)
    values = values[..., ::2] if strided else values
    base = torch.randn(2, 3, *goals, dtype=torch.float64)
    indices = places((8, 10), goals)
    expected = aten.index_put.default(base, [None, None, *indices], values, True)
    found = added_in_grid(base, indices, values)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("before", [(), (2,), (2, 3)], ids=str)
def test_any_number_of_dimensions(sizes: tuple[int, ...], before: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    goals = tuple(size + 2 for size in sizes)
    base, values, indices = torch.randn(*before, *goals), torch.randn(*before, *sizes), places(sizes, goals)
    expected = aten.index_put.default(base, [*[None] * len(before), *indices], values, True)
    torch.testing.assert_close(added_in_grid(base, indices, values), expected)


ROWS, COLUMNS = torch.randint(0, 4, (6, 1)), torch.randint(0, 5, (7,))
BASE, VALUES = torch.zeros(2, 4, 5), torch.ones(2, 6, 7)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((BASE, [None, ROWS, COLUMNS], VALUES, True), True),
        ((BASE, [None, ROWS, COLUMNS], VALUES, False), False),  # one of them stays, not their sum
        ((BASE, [None, ROWS, COLUMNS], torch.ones(7), True), False),  # values that are repeated
        ((BASE, [None, torch.zeros(7, dtype=torch.int64), COLUMNS], torch.ones(2, 7), True), False),  # single places
        ((BASE, [torch.zeros(3, 1, dtype=torch.int64), None, COLUMNS], torch.ones(3, 7, 4), True), False),
        ((BASE, [None, ROWS], torch.ones(2, 6, 1, 5), True), False),  # of the middle
        ((BASE.long(), [None, ROWS, COLUMNS], VALUES.long(), True), False),
    ],
)
def test_which_are_found(arguments: tuple[Any, ...], found: bool) -> None:
    base, indices, values, accumulate = arguments
    given = [one for one in indices if one is not None]

    def step(base: torch.Tensor, values: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        left = iter(given)
        where = [one if one is None else next(left) for one in indices]
        return aten._unsafe_index_put.default(base, where, values, accumulate)

    module = make_fx(step, tracing_mode="fake")(base, values, *given)
    spread_by_products(module.graph)
    assert any(node.target is added_in_grid for node in module.graph.nodes) is found
    if found:
        module.recompile()
        torch.testing.assert_close(module(base, values, *given), step(base, values, *given))


@pytest.mark.parametrize(("limit", "value"), [("FEWEST", 85), ("LARGEST", 30)])
@pytest.mark.usefixtures("everywhere")
def test_where_they_stay(limit: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spread, limit, value)
    test_which_are_found((BASE, [None, ROWS, COLUMNS], VALUES, True), False)


def test_on_the_cpu_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spread, "FEWEST", 1)
    test_which_are_found((BASE, [None, ROWS, COLUMNS], VALUES, True), False)


class Interpolated(nn.Module):
    """Called with rows; returns a loss. Nearest rows and columns, whose gradient adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        rows, columns = torch.arange(10).floor_divide(2), torch.arange(12).floor_divide(2)
        return self.last(aten._unsafe_index.Tensor(x, [None, rows[:, None], columns])).square().mean()


@pytest.mark.usefixtures("everywhere")
def test_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    take_fused(monkeypatch)
    module, x = Interpolated(), torch.randn(3, 5, 6)
    step = rematerialize(module, 1.0, fuse="fast", solver="no_remat", cost_model="flops")

    def gradients(call: Callable[..., torch.Tensor]) -> Tensors:
        return torch.autograd.grad(call(x), list(module.parameters()))

    for one, other in zip(gradients(step), gradients(module), strict=True):
        torch.testing.assert_close(one, other)
    assert step.plan is not None and not step.failures
    assert any("added_in_grid" in op.target for op in step.plan.graph.ops)
