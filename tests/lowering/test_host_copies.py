"""Tensors that wait on the host: eager's bits, and less memory by what was predicted. The schedules are made by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import _host_memory, rematerialize
from lightning_remat._rematerialize import Rematerialized
from lightning_remat.errors import ScheduleError
from lightning_remat.lowering import lower
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.schedule import Compute, Copy, Schedule
from lightning_remat.solvers import solve
from tests.exactness.test_exactness import Outcome, eager, gpt2, unet
from tests.helpers.host_copies import Copies, planned_with_copies, with_fetches
from tests.helpers.nets import Net, inputs, net, same


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return planned_with_copies(monkeypatch)


def scheduled(module: nn.Module, **options: Any) -> Rematerialized:
    options = {"budget": 0.5, "cost_model": "unit", **options}
    return rematerialize(module, offload="host", tiling="off", **options)


def saved_bytes(step: Rematerialized) -> int:
    """Bytes that would wait on the device without copies."""
    assert step.plan is not None
    return step.plan.baseline_timeline().saved_bytes


@pytest.mark.long
@pytest.mark.parametrize("make", [gpt2, unet])
def test_networks_train_with_eagers_bits_in_the_memory_that_was_predicted(make: Any, copies: Copies) -> None:
    module, batch, right = eager(make)
    step = scheduled(module, cost_model="profile")
    Outcome(module, step, batch).assert_same(right)
    plan = step.plan
    assert plan is not None and step.runs == (3,) and not step.failures
    assert len(copies.to_host) == len(copies.to_device) == 3 * plan.copies // 2
    assert sum(copies.to_host) == sum(copies.to_device) == 3 * plan.host_bytes
    timeline = plan.timeline()
    assert saved_bytes(step) - timeline.saved_bytes == plan.host_bytes > saved_bytes(step) / 4

    def training_step() -> None:
        loss = step(*batch)
        module.zero_grad(set_to_none=True)
        loss.backward()

    measured = held_bytes(module, batch, gradients=True) + peak_memory(training_step, "cpu")
    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.001)
    assert measured < 0.98 * plan.baseline_peak_bytes


def deep(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.first(x)
    for layer in self.layers:
        g = layer(h)
        h = h + functional.dropout(g.tanh() * functional.gelu(g), 0.2).view(-1, 8, 4).transpose(1, 2).reshape(-1, 32)
    return self.last(self.norm(h)).square().mean()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_computed_again_and_what_is_fetched_go_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = planned_with_copies(monkeypatch, lambda graph, schedule: with_fetches(graph, schedule, seed))
    module = net(deep, norm=nn.BatchNorm1d(32), layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(4)))
    other = copy.deepcopy(module)
    step = scheduled(other, budget=0.4 + 0.05 * (seed % 6), cost_model="profile")
    for trained, run in ((module, module), (other, step)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(3):
            run(inputs(512)).backward()
            optimizer.step()
    assert_same(module, other)
    assert step.plan is not None and step.plan.rematerializes and copies.to_device

    x = inputs(512)

    def training_step() -> None:
        loss = step(x)
        other.zero_grad()
        loss.backward()

    measured = held_bytes(other, x, gradients=True) + peak_memory(training_step, "cpu")
    assert measured <= 1.001 * step.plan.predicted_peak_bytes  # what only was read to compute again goes earlier


# -- small ones -------------------------------------------------------------------------------------------------------


def wide(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.norm(self.first(x))
    h = functional.dropout(h.tanh().sin(), 0.2) * functional.gelu(h).view(-1, 8, 4).transpose(1, 2).reshape(-1, 32)
    return self.last(h).square().mean()


def both(**options: Any) -> tuple[Net, Net, Rematerialized]:
    """A network, a copy of it, and that one's step with copies."""
    module = net(wide, norm=nn.BatchNorm1d(32))
    other = copy.deepcopy(module)
    return module, other, scheduled(other, **options)


def assert_same(module: nn.Module, other: nn.Module) -> None:
    assert all(map(same, module.state_dict().values(), other.state_dict().values()))
    gradients = [[p.grad for p in one.parameters()] for one in (module, other)]
    assert all(map(same, *gradients))


def test_gradients_are_accumulated_and_two_shapes_take_turns(copies: Copies) -> None:
    module, other, step = both()
    for trained, run in ((module, module), (other, step)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for number in range(8):
            run(inputs(32 if number % 3 else 16)).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(module, other)
    assert len(step.plans) == 2 and all(plan.copies for plan in step.plans) and min(step.runs) >= 2
    assert copies.to_host and sum(copies.to_host) == sum(copies.to_device)


def test_a_backward_runs_twice(copies: Copies) -> None:
    module, other, step = both()
    for run in (module, step):
        torch.manual_seed(1)
        loss = run(inputs())
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(module, other)
    assert len(copies.to_device) == 2 * len(copies.to_host) > 0


def test_two_forwards_come_before_their_backwards(copies: Copies) -> None:
    module, other, step = both()
    for run in (module, step):
        torch.manual_seed(1)
        first, second = run(inputs(32)), run(inputs(32) + 1)
        (first * 2).backward()
        second.backward()
    assert_same(module, other)
    assert copies.to_device


@pytest.mark.parametrize("backward", [False, True])
def test_a_step_that_ends_in_between_leaves_nothing_behind(
    backward: bool, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, other, step = both()
    step(inputs()).backward()
    fails_at, waits = (len(copies.to_host) if backward else 0) + 2, []
    own = _host_memory.Transfer.wait

    def failing(transfer: _host_memory.Transfer) -> torch.Tensor:
        waits.append(transfer)
        if len(waits) == fails_at:
            raise torch.OutOfMemoryError("as if")
        return own(transfer)

    with monkeypatch.context() as patched:
        patched.setattr(_host_memory.Transfer, "wait", failing)
        with pytest.raises(torch.OutOfMemoryError):
            step(inputs()).backward()
    assert len(waits) == fails_at
    other.load_state_dict(module.state_dict())
    other.zero_grad()
    for run in (module, step):
        torch.manual_seed(1)
        run(inputs()).backward()
    assert_same(module, other)


def test_ops_are_observed_one_by_one(copies: Copies) -> None:
    module, other, step = both()
    torch.manual_seed(1)
    module(inputs()).backward()
    step(inputs()).backward()
    other.load_state_dict(net(wide, norm=nn.BatchNorm1d(32)).state_dict())
    other.zero_grad()
    before, seen = len(copies.to_host), []

    def observe(op: str, _module: str, _args: Any, _kwargs: Any, run: Any) -> Any:
        seen.append(op)
        return run()

    torch.manual_seed(1)
    with step._step.observed(observe):
        step(inputs()).backward()
    assert_same(module, other)
    assert seen.count("begin_to_host") == len(copies.to_host) - before == seen.count("begin_to_device") > 0


def test_a_gradient_comes_in_another_layout(copies: Copies) -> None:
    """The backward is made once more for it, and fetches what the same forward has sent."""

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh().sin())

    found = []
    for wrap in (False, True):
        module = net(forward)
        run = scheduled(module) if wrap else module
        output = run(inputs())
        output.t().backward(torch.arange(128.0).view(4, 32))
        found.append([p.grad for p in module.parameters()])
    assert all(map(same, *found))
    assert copies.to_host and len(copies.to_device) == len(copies.to_host)


def test_an_output_without_a_gradient(copies: Copies) -> None:
    def forward(self: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x).tanh()
        return self.last(h.sin()).sum(), h.exp().cos()

    found = []
    for wrap in (False, True):
        module = net(forward)
        run = scheduled(module) if wrap else module
        for take in (0, 1):
            run(inputs())[take].sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert all(map(same, *found))
    assert copies.to_device


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_does_not_fill_memory_of_its_own_is_not_copied() -> None:
    step = rematerialize(net(lambda self, x: self.last(self.first(x)[:8].tanh()).square().mean()), budget=1.0)
    step(inputs()).backward()
    captured = step._step._plans.graphs[0].captured
    graph = captured.graph
    schedule = solve(graph, 2**60, "no_remat").schedule
    assert schedule is not None
    part = next(t for op, one in enumerate(graph.ops) if one.target.startswith("aten.slice") for t in one.outputs)
    (made,) = (i for i, s in enumerate(schedule.steps) if isinstance(s, Compute) and part in graph.ops[s.op].outputs)
    before, after = schedule.steps[: made + 1], schedule.steps[made + 1 :]
    with pytest.raises(ScheduleError, match="does not fill memory of its own"):
        lower(captured, Schedule((*before, Copy(part, False, False), *after), schedule.boundary + 1))
    with pytest.raises(ScheduleError, match="has not begun"):
        lower(captured, Schedule((*before, Copy(part, False, True), *after), schedule.boundary + 1))
