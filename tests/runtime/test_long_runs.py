"""Runs of many steps on many shapes: what is kept for them does not grow, and the bits stay those of eager mode."""

from __future__ import annotations

import copy
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import Rematerialized, rematerialize
from lightning_remat._recent import Recent
from lightning_remat.capture._torch import _exchange
from lightning_remat.runtime import _sized_plans
from lightning_remat.runtime._captures import STATIC_CAPTURES

SHORTEST = 17


class Sequences(nn.Module):
    """Sequences of shape (batch, 6, time), with convolutions, batch norm and dropout."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class Pair:
    """The same training twice: in eager mode, and as scheduled."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.eager, self.module = module, copy.deepcopy(module)
        self.step = rematerialize(self.module, cost_model="unit", solver="greedy", time_limit=1.0, **options)
        self._optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (self.eager, self.module)]

    def train(self, number: int, size: int) -> None:
        """One step of both, with the same bits."""
        losses = []
        for call, optimizer in zip((self.eager, self.step), self._optimizers, strict=True):
            torch.manual_seed(number)
            loss = call(torch.randn(2, 6, size))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses), f"step {number}, size {size}"

    def assert_same(self) -> None:
        """All that was trained has the same bits, and what was captured ran."""
        found, expected = self.module.state_dict(), self.eager.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not self.step.failures and any(plan.rematerializes for plan in self.step.plans)


def ours() -> int:
    """Objects of this package, and all that the garbage collector sees, as they are now."""
    gc.collect()
    return len(gc.get_objects())


def sized(step: Rematerialized) -> Any:
    """What holds the plans of the one graph with symbolic sizes."""
    *_, graph = step.scheduled._plans.graphs
    assert len(step.scheduled._plans.graphs) == STATIC_CAPTURES + 1 and graph.sized is not None
    return graph.sized


def trained(pair: Pair, steps: int, shapes: int, then: Callable[[int], None] = lambda _number: None) -> None:
    for number in range(steps):
        pair.train(number, SHORTEST + number * 181 % shapes)
        then(number + 1)


def test_the_last_entries_stay() -> None:
    found: Recent[int, int] = Recent(3)
    for key in range(3):
        found[key] = key
    assert 0 in found and found.get(1) == 1
    found[3] = 3
    assert list(found) == [0, 1, 3] and found.get(2) is None and len(found) == 3


@pytest.mark.parametrize("share", [True, False])
def test_what_is_forgotten_is_found_again(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    """With room for few sizes, costs and versions: everything is derived again, and nothing is planned twice."""
    monkeypatch.setattr(_exchange, "MOST_VERSIONS", 1)
    monkeypatch.setattr(_sized_plans, "MOST_POINTS", 2)
    monkeypatch.setattr(_sized_plans, "MOST_SIZES", 3)
    module = Sequences()
    whole = rematerialize(copy.deepcopy(module), budget=0.6, cost_model="unit", solver="greedy")
    whole(torch.randn(2, 6, SHORTEST + 11)).backward()
    assert whole.plan is not None
    pair = Pair(module, budget=0.6 if share else whole.plan.budget_bytes)
    trained(pair, 30, 12)
    plans = len(pair.step.plans)
    trained(pair, 12, 12)
    assert len(pair.step.plans) == plans == len(pair.step.runs) and sum(pair.step.runs) == 42
    assert len(sized(pair.step)._known) == 3 and len(sized(pair.step)._costs) == 2
    assert len(pair.step.scheduled._plans.graphs[-1].exchange._versions) <= 2
    pair.assert_same()


def test_the_last_plan_is_that_of_the_last_sizes() -> None:
    pair = Pair(Sequences(), budget=0.6)
    trained(pair, 12, 12)
    for size in (19, 27, 19):
        pair.train(size, size)
        plan = pair.step.plan
        assert plan is not None and plan is pair.step.plan
        assert {tensor.shape for tensor in plan.graph.tensors} >= {(2, 6, size)}
        assert plan.timeline().peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes


def test_where_there_are_many_plans_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sized_plans, "MOST_PLANS", 3)
    pair = Pair(Sequences(), budget=0.7)
    for number, size in enumerate((20, 40, 60, 70, 100, 130, 160, 200)):
        pair.train(number, size)
        plan = pair.step.plan
        assert plan is not None and plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.predicted_peak_bytes == plan.timeline().peak_bytes
    assert len(pair.step.plans) == STATIC_CAPTURES + 3  # of the graph with symbols
    pair.assert_same()


@pytest.mark.long
class Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).tanh().mean()


class Counting(nn.Module):
    """Reads a value that changes from call to call: in the end it runs as before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Conv1d(6, 6, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.layer(x) * float(str(self.calls))).mean()


@pytest.mark.filterwarnings("ignore:Counting:UserWarning")
@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("make", [Sequences, Broken, Counting])
def test_what_is_no_longer_used_is_let_go_of(make: type[nn.Module], method: bool) -> None:
    """Dynamo keeps what it has captured: neither a step nor a network may be kept with it."""

    def train() -> list[weakref.ref[Any]]:
        module = make()
        step = rematerialize(module.forward if method else module, cost_model="unit", solver="greedy", time_limit=1.0)
        for size in (9, 9, 9, 10, 11, 12, 13):
            step(torch.randn(2, 6, size)).backward()
        assert step.plans
        return [*map(weakref.ref, (module, step, *module.parameters(), *step.plans))]

    kept = train()
    for _ in range(3):  # what holds others until it is gone itself is found in a second run
        gc.collect()
    assert not any(one() for one in kept)


@pytest.mark.parametrize("make", [Sequences, Broken])
def test_a_step_may_be_gone_before_its_backward(make: type[nn.Module]) -> None:
    module, x = make(), torch.randn(2, 6, 9)
    eager = copy.deepcopy(module)
    torch.manual_seed(1)
    loss = rematerialize(module, budget="min", cost_model="unit", solver="greedy", time_limit=1.0)(x)
    for _ in range(3):
        gc.collect()
    loss.backward()
    torch.manual_seed(1)
    expected = eager(x)
    expected.backward()
    assert torch.equal(loss, expected)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad)


def test_memory_is_flat() -> None:
    """400 steps over 12 shapes; `test_ten_thousand_steps` is the long one."""
    _is_flat(Pair(Sequences(1), budget=0.6), steps=400, shapes=12, begins=100)


@pytest.mark.slow
def test_ten_thousand_steps() -> None:
    _is_flat(Pair(Sequences(1), budget=0.6), steps=10_000, shapes=500, begins=1_000)


def _is_flat(pair: Pair, steps: int, shapes: int, begins: int) -> None:
    """What lives after ``begins`` steps, when each shape was seen, is what lives in the end."""
    objects: dict[int, int] = {}
    traced: dict[int, int] = {}

    def look(number: int) -> None:
        if number in (begins, steps):
            objects[number] = ours()
        if number == steps - begins:
            tracemalloc.start(1)
        if number in (steps - begins + begins // 2, steps):
            gc.collect()
            traced[number] = tracemalloc.get_traced_memory()[0]

    try:
        trained(pair, steps, shapes, look)
    finally:
        tracemalloc.stop()
    print(f"objects {objects}, bytes traced {traced}, plans {len(pair.step.plans)}")
    assert objects[steps] - objects[begins] < 500
    assert traced[steps] - traced[steps - begins + begins // 2] < 100_000
    assert len(sized(pair.step)._known) <= shapes
    pair.assert_same()
