"""Writes to parts of tensors: eager's bits, predicted memory, and no copies of what is needed no longer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture._scatters import _VIEWS, copied, written
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.schedule import Compute

aten = torch.ops.aten
Network = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def part_of_a_row(h: torch.Tensor, _layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A table in which a few elements of each row are written: torch's op for one copies all of the table."""
    table = torch.zeros(64, h.shape[0], 64)
    for i in range(8):
        table[i][2:6] = torch.tanh(h[:4] * i)
    return table


def row_by_row(h: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """As loops over time fill their results."""
    table = torch.zeros(h.shape[0], 16, 64)
    for i in range(16):
        h = torch.tanh(layer(h))
        table[:, i] = h
    return table


def with_steps_and_numbers(h: torch.Tensor, _layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    table = h.new_ones(h.shape[0], 64).clone()
    table[::2, 1:40:3] = h[::2, :13]
    table.diagonal().copy_(h[0])
    table[:, 5] = 2.5
    return table * h


def in_another_type(h: torch.Tensor, _layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    table = torch.zeros(4, h.shape[0], 64, dtype=torch.bfloat16)
    table[1] = h
    table[2, :, 3] = h[:, 0]
    table[3, :] = h[0]  # the same for all
    return table.float()


def transposed(h: torch.Tensor, _layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    table = torch.zeros(64, 3, h.shape[0]).permute(2, 1, 0)
    table[:, 1] = h
    table[3:9, :, 2] = h[3:9, :3]
    return table


def as_it_lies(h: torch.Tensor, _layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Names a place in a storage."""
    table = torch.zeros(h.shape[0], 64)
    table[4][3:] = h[0, 3:]
    return table[4:6].as_strided((3, 64), (64, 1), 128) * h[:3]


class Writing(torch.nn.Module):
    def __init__(self, fill: Network) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.again = torch.nn.Linear(64, 64)
        self.fill = fill
        self.register_buffer("kept", torch.zeros(3, 64))
        self.kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        table = self.fill(h, self.again)
        with torch.no_grad():
            self.kept[1] = h[0]
            self.kept[2].copy_(h[1].double() + self.kept[1])
        return (table.sin() * table).sum() + self.again(h).mean() + self.kept.sum()


def step(call: Any, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.zero_grad(set_to_none=True)
    loss: torch.Tensor = call(x)
    loss.backward()
    return loss.detach()


NETWORKS: list[Network] = [part_of_a_row, row_by_row, with_steps_and_numbers, in_another_type, transposed, as_it_lies]


@pytest.mark.long
@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("fill", NETWORKS, ids=lambda fill: fill.__name__)
def test_bits_and_memory(fill: Network, budget: float | str) -> None:
    torch.manual_seed(0)
    eager, x = Writing(fill), torch.randn(512 if fill is part_of_a_row else 64, 64)
    module = copy.deepcopy(eager)
    scheduled: Rematerialized = rematerialize(module, budget, cost_model="profile", time_limit=2.0)
    for _ in range(3):
        assert torch.equal(step(scheduled, module, x), step(eager, eager, x))
        for (name, p), q in zip(eager.named_parameters(), module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None, name
            assert torch.equal(p.grad, q.grad), name
        assert torch.equal(eager.kept, module.kept)
    assert scheduled.runs == (3,)
    plan = scheduled.plan
    assert plan is not None
    used = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(scheduled, module, x), "cpu")
    assert used <= plan.budget_bytes
    assert used <= plan.predicted_peak_bytes
    targets = {op.target for op in plan.graph.ops}
    if fill is as_it_lies:
        assert not any("written to" in target for target in targets)
    else:
        assert plan.predicted_peak_bytes == pytest.approx(used, rel=0.02)
        assert not any("scatter" in target or target == "aten.copy.default" for target in targets)
        over = [s for s in plan.schedule.steps if isinstance(s, Compute) and s.over >= 0]
        assert any("written to" in plan.graph.ops[s.op].target for s in over)


class OfAnySize(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        table, other = torch.zeros(len(x), 4, 8), torch.zeros(len(x), 8)
        for i in range(4):
            table[:, i] = h * i
        table[1:, 2] = h[1:]
        other.copy_(h.sin())
        return (table.sin() * table).sum() + (other * h).sum()


def test_batches_of_any_size() -> None:
    torch.manual_seed(0)
    eager = OfAnySize()
    module = copy.deepcopy(eager)
    scheduled = rematerialize(module, 0.95, cost_model="unit")
    for size in (8, 16, 24, 40, 8):
        x = torch.randn(size, 8)
        assert torch.equal(step(scheduled, module, x), step(eager, eager, x))
        for p, q in zip(eager.parameters(), module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert scheduled.runs == (2, 1, 1, 1)
    assert "copied" in {op.target for op in scheduled.plans[-1].graph.ops}


@pytest.mark.parametrize(
    ("target", "where"),
    [
        (aten.select_scatter.default, (1, 2)),
        (aten.select_scatter.default, (0, -1)),
        (aten.slice_scatter.default, (0, 1, 4, 2)),
        (aten.slice_scatter.default, (1, None, None, 2)),
        (aten.diagonal_scatter.default, ()),
        (aten.diagonal_scatter.default, (1, 2, 0)),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_forms_are_those_of_torch(target: Any, where: tuple[Any, ...], order: tuple[int, ...]) -> None:
    x = torch.randn(5, 6, 7, 2)[..., 1].permute(order)  # with gaps
    form = written(_VIEWS[target])
    source = torch.randn_like(_VIEWS[target](x, *where), dtype=torch.float64)
    before, expected = x.clone(), target(x, source.float(), *where)
    made = form(x, source, *where)
    assert torch.equal(made, expected)
    assert torch.equal(x, before)
    assert made.stride() == expected.stride()
    assert made.untyped_storage().nbytes() <= x.untyped_storage().nbytes()
    assert form(x, source, *where, out=x) is x
    assert torch.equal(x, expected)


def test_every_form_is_tried() -> None:
    tried = {mark.args[1][i][0] for mark in test_forms_are_those_of_torch.pytestmark[1:] for i in range(6)}  # type: ignore[attr-defined]
    assert tried == set(_VIEWS)


def test_what_is_copied_lies_as_told() -> None:
    source = torch.randn(6)
    made = copied(source, (2, 6), (1, 2), torch.float64, torch.device("cpu"))
    assert made.stride() == (1, 2)
    assert torch.equal(made, source.double().expand(2, 6))
