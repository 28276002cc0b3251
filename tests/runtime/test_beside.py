"""What runs between and around captured graphs is measured in one step, and planned for."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat._profiler import profiler_running
from lightning_remat.measure import peak_memory, track_peak
from lightning_remat.planner import RematWarning, _make
from lightning_remat.runtime import _measured_step, _measuring
from tests.helpers.cases import slow_but
from tests.helpers.training import assert_same, measured

MIB = 2**20

NUMBERS = 2 * 4 + 12
"""Bytes: no plan knows of a loss and its gradient, and unit costs know nothing of what drawing a mask takes."""


def network(width: int, layers: int) -> torch.nn.Sequential:
    made = [(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(layers)]
    return torch.nn.Sequential(*(module for layer in made for module in layer))


def mean(y: torch.Tensor) -> torch.Tensor:
    """Nothing to plan for: it holds nothing, and its gradient is one number."""
    return y.mean()


def itself(loss: torch.Tensor) -> torch.Tensor:
    """Of what computes its own loss."""
    return loss


def of_pairs(y: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: larger than anything that the module holds."""
    return torch.cdist(y, y).exp().neg().softmax(-1).log().mean()


class Between(torch.nn.Module):
    """What Dynamo leaves alone, in the middle, holds as much for its backward as a graph does."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.second, self.times = network(64, 4), network(64, 4), times

    @torch._dynamo.disable
    def between(self, y: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            y = torch.tanh(y + 1)
        return y.repeat_interleave(4, 0).sin()[::4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x))).square().mean()


class Before(torch.nn.Module):
    """One graph, and then what Dynamo leaves alone: it returns a loss that the graph has not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(64, 4), network(64, 4)

    @torch._dynamo.disable
    def rest(self, y: torch.Tensor) -> torch.Tensor:
        return self.second(y).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


def steps(
    call: Any, module: torch.nn.Module, x: torch.Tensor, loss: Callable[..., Any], count: int
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        found = loss(call(x))
        module.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return [*losses, *(p.detach().clone() for p in module.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize(("loss", "share"), [(mean, 0.3), (of_pairs, 0.3), (of_pairs, "min"), (of_pairs, 1.0)])
def test_a_loss_outside_of_the_module(loss: Callable[..., Any], share: float | str) -> None:
    torch.manual_seed(0)
    original, x = network(64, 8), torch.randn(1024, 64)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    expected = steps(eager, eager, x, loss, 5)
    call = rematerialize(module, budget=share, cost_model="unit", time_limit=2.0)
    assert_same(expected, steps(call, module, x, loss, 5))
    assert call.failures == ()
    peak = measured(call, module, x, loss)
    assert peak <= call.plan.budget_bytes
    if loss is of_pairs:
        assert call.plan.predicted_peak_bytes == pytest.approx(peak, rel=0.02)
        assert call.runs[0] == 2  # as it came, and measured; then with the loss beside it
        assert sum(call.runs) == 6
    else:
        assert peak - NUMBERS <= call.plan.predicted_peak_bytes <= peak + x.nbytes
        assert len(call.plans) == 1


def test_what_a_loss_needs_is_left_to_it() -> None:
    """A size: the first plan fills it, the next leaves room."""
    torch.manual_seed(0)
    module, x = network(64, 8), torch.randn(1024, 64)
    eager = copy.deepcopy(module)
    steps(eager, eager, x, of_pairs, 1)
    plain = measured(eager, eager, x, of_pairs)
    call = rematerialize(module, budget=int(0.9 * plain), cost_model="unit", time_limit=0.4)
    steps(call, module, x, of_pairs, 3)
    assert not call.plans[0].rematerializes
    assert call.plan.rematerializes
    assert measured(call, module, x, of_pairs) <= call.plan.budget_bytes == int(0.9 * plain)


def test_where_there_is_no_room_for_a_loss_this_is_said() -> None:
    torch.manual_seed(0)
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=8 * MIB, cost_model="unit", time_limit=0.4)
    with pytest.raises(InfeasibleBudgetError) as caught:
        steps(call, module, x, of_pairs, 3)
    assert caught.value.smallest_bytes > 8 * MIB
    with pytest.raises(InfeasibleBudgetError):  # each time
        call(x)
    call = rematerialize(module, budget=caught.value.smallest_bytes, cost_model="unit", time_limit=0.4)
    steps(call, module, x, of_pairs, 3)
    assert measured(call, module, x, of_pairs) <= caught.value.smallest_bytes


def test_a_device_that_had_room_for_a_step_goes_on_to_have_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With "auto" less may be left free than was to be, but no training that fits is ended."""
    torch.manual_seed(0)
    monkeypatch.setattr(_make, "device_bytes", lambda *_, **__: 8 * MIB)
    module, x = network(64, 8), torch.randn(1024, 64)
    eager = copy.deepcopy(module)
    call = rematerialize(module, budget="auto", cost_model="unit", solver="greedy")
    with caplog.at_level(logging.WARNING, "lightning_remat"):
        assert_same(steps(eager, eager, x, of_pairs, 4), steps(call, module, x, of_pairs, 4))
    assert call.runs == (4,) and call.plan.budget_bytes == 8 * MIB
    assert [record.message for record in caplog.records if "keeps its plans" in record.message]


@pytest.mark.long
@pytest.mark.parametrize("share", slow_but({"min"}, [0.3, "min"]))
def test_between_two_graphs(share: float | str) -> None:
    torch.manual_seed(0)
    original, x = Between(4), torch.randn(2048, 64)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)

    def loss(found: torch.Tensor) -> torch.Tensor:
        return found

    expected = steps(eager, eager, x, loss, 6)
    call = rematerialize(module, budget=share, cost_model="unit", time_limit=1.0)
    assert_same(expected, steps(call, module, x, loss, 6))
    peak = measured(call, module, x, loss)
    assert peak <= call.plan.budget_bytes
    assert call.plan.predicted_peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.filterwarnings("ignore:only a part of Before:lightning_remat.planner.RematWarning")
def test_what_runs_as_before_after_one_graph() -> None:
    torch.manual_seed(0)
    original, x = Before(), torch.randn(1024, 64)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    expected = steps(eager, eager, x, itself, 5)
    call = rematerialize(module, budget="min", time_limit=2.0)
    assert_same(expected, steps(call, module, x, itself, 5))
    assert len(call.scheduled.last_plan.graph.ops) > 0 and sum(call.runs) == 5
    peak = measured(call, module, x, itself)
    assert peak == pytest.approx(call.plan.predicted_peak_bytes, rel=0.01)
    assert peak <= call.plan.budget_bytes


def test_a_profiler_of_the_users_is_left_alone() -> None:
    torch.manual_seed(0)
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    with torch.profiler.profile() as profiler:
        steps(call, module, x, of_pairs, 3)
    assert any("cdist" in event.name for event in profiler.events())
    assert len(call.plans) == 1
    steps(call, module, x, of_pairs, 3)  # measured now
    assert len(call.plans) > 1


def test_a_step_that_another_measurement_cuts_short_counts_as_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network(64, 3)
    step = rematerialize(module, budget=0.7, cost_model="unit", solver="greedy")
    x = torch.randn(64, 64)
    made: list[_measured_step.MeasuredStep] = []

    class Noted(_measured_step.MeasuredStep):
        def __init__(self, device: torch.device, reduces: bool = False) -> None:
            super().__init__(device, reduces)
            made.append(self)

    monkeypatch.setattr(_measuring, "MeasuredStep", Noted)
    of_pairs(step(x)).backward()
    between = step(x)
    assert len(made) == 1
    assert peak_memory(lambda: torch.ones(1024), device="cpu") >= 4096
    of_pairs(between).backward()
    of_pairs(step(x)).backward()
    assert len(step.plans) == 1 and len(made) == 2  # it is measured in the next one
    step(x)
    assert len(step.plans) == 2
    step.close()


def test_costs_are_measured_though_a_step_waits_for_its_backward(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever is captured meanwhile has its workspaces measured; the step that waits is measured in its next call."""
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))
    torch._dynamo.reset()
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    of_pairs(call(x)).backward()
    between = call(x)  # measured, and not yet at its end
    other = rematerialize(torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Softmax(1)), budget=1.0)
    other(torch.randn(8, 24)).sum().backward()
    assert not [one for one in caplog.records if "were not measured" in one.getMessage()]
    of_pairs(between).backward()
    assert len(call.plans) == 1
    of_pairs(call(x)).backward()
    call(x)
    assert len(call.plans) == 2


def test_no_backward_ends_nothing() -> None:
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    for _ in range(4):
        call(x)
    call.close()
    with track_peak("cpu") as peak:
        torch.zeros(MIB)
    assert peak.peak_bytes == 4 * MIB
    assert sum(call.runs) == 4


def test_steps_are_measured_no_more_than_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Counted(_measured_step.MeasuredStep):
        def __init__(self, device: torch.device, reduces: bool = False) -> None:
            begun.append(device)
            super().__init__(device, reduces)

    monkeypatch.setattr(_measuring, "MeasuredStep", Counted)
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    steps(call, module, x, of_pairs, 8)
    assert 1 <= len(begun) <= _measuring.MEASURED


def update_something() -> None:
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_another_thread_that_updates_ends_nothing() -> None:
    """Torch's profiler can be stopped by the thread only that started it: left on, it ends the process with a crash."""
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    of_pairs(call(x)).backward()
    of_pairs(call(x)).backward()
    assert profiler_running()
    thread = threading.Thread(target=update_something)
    thread.start()
    thread.join()
    assert profiler_running()
    update_something()
    assert not profiler_running()
    call(x)
    assert len(call.plans) == 2


def test_in_another_thread_no_step_is_measured() -> None:
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    left_on = []

    def train() -> None:
        for _ in range(3):
            left_on.append(profiler_running())
            of_pairs(call(x)).backward()
            left_on.append(profiler_running())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert left_on == [False] * 6 and sum(call.runs) == 3
    of_pairs(call(x)).backward()
    assert profiler_running()  # here it can be
    call(x)
    assert len(call.plans) == 2


def test_where_no_backward_comes_the_measuring_ends() -> None:
    module, x = network(64, 8), torch.randn(1024, 64)
    call = rematerialize(module, budget=0.7, cost_model="unit", time_limit=0.4)
    of_pairs(call(x)).backward()
    call(x)
    for _ in range(_measured_step.MOST_UPDATES - 1):
        update_something()
        assert profiler_running()
    update_something()
    assert not profiler_running()
    of_pairs(call(x)).backward()  # measured instead
    call(x)
    assert len(call.plans) == 2


ENDS_IN_THE_MIDST = """
import torch
from lightning_remat import rematerialize
from lightning_remat._profiler import profiler_running

module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
call = rematerialize(module, budget=1.0, cost_model="unit", solver="greedy")
call(x).exp().sum().backward()
call(x)
assert profiler_running()
"""


@pytest.mark.long
def test_a_process_may_end_while_a_step_is_measured() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_IN_THE_MIDST], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Cloned(torch.nn.Module):
    """A graph break comes first, and what is computed before it has no gradients: a physics-informed network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        u = self.second(self.first(x).sin()).sum(-1, keepdim=True)
        (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        return (slope[:, 1:2] + u * slope[:, :1]).square().mean()


def test_what_runs_as_before_in_front_of_the_first_graph() -> None:
    torch.manual_seed(0)
    original, x = Cloned(), torch.randn(4096, 16)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    call = rematerialize(module, budget="min", time_limit=1.0)

    def step() -> None:  # which leaves no loss behind: it would hold the clone
        loss = call(x)
        module.zero_grad()
        loss.backward()

    for _ in range(3):
        step()
    peak = measured(call, module, x, mean)
    assert peak == pytest.approx(call.plan.predicted_peak_bytes, rel=0.01)
    assert peak <= call.plan.budget_bytes
    eager(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), eager.parameters(), strict=True))


class InFront(torch.nn.Module):
    """What Dynamo leaves alone comes first, and needs more than all that is captured: features, trained or not."""

    def __init__(self, trains: bool, graphs: int) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 64))
        self.first, self.second = network(64, 4), network(64, 4)
        self.trains, self.graphs = trains, graphs

    @torch._dynamo.disable
    def in_front(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.trains):
            return self.features(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.in_front(x))
        if self.graphs > 1:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.filterwarnings("ignore:only a part of InFront:lightning_remat.planner.RematWarning")
@pytest.mark.parametrize("graphs", [1, 2])
@pytest.mark.parametrize("trains", [False, True])
def test_what_needs_more_in_front_of_the_first_graph_sets_the_peak(trains: bool, graphs: int) -> None:
    """Its backward comes after that of the first graph."""
    torch.manual_seed(0)
    original, x = InFront(trains, graphs), torch.randn(1024, 64)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)

    expected = steps(eager, eager, x, itself, 5)
    call = rematerialize(module, budget="min", time_limit=1.0)
    assert_same(expected, steps(call, module, x, itself, 5))
    assert call.plans[0].rematerializes  # before it was measured
    plan, peak = call.scheduled.last_plan.of_whole(), measured(call, module, x, itself)
    assert peak <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(peak, rel=0.005)
    assert peak == pytest.approx(measured(eager, eager, x, itself), rel=0.005)
    assert not call.scheduled.last_plan.rematerializes  # it would not lower the peak
    first = call.plans[-graphs]
    assert "Code that is not captured sets the peak of the step" in first.explain(curve_seconds=0)
    if graphs > 1:
        assert first.whole.after.most_bytes == plan.predicted_peak_bytes
        assert first.whole.after.ops[0] == "outside"


@pytest.mark.filterwarnings("ignore:only a part of InFront:lightning_remat.planner.RematWarning")
def test_a_size_that_is_less_than_what_comes_first_is_refused() -> None:
    torch.manual_seed(0)
    module, x = InFront(False, 1), torch.randn(1024, 64)
    eager = copy.deepcopy(module)
    steps(eager, eager, x, itself, 1)
    needed = measured(eager, eager, x, itself)
    call = rematerialize(module, budget=needed - 1024, time_limit=1.0)
    with pytest.raises(InfeasibleBudgetError, match="set by code that is not captured") as caught:
        steps(call, module, x, itself, 3)
    assert caught.value.smallest_bytes == pytest.approx(needed, rel=0.005)


class Matched(torch.nn.Module):
    """What Dynamo leaves alone, at the end, compares with targets, of which there are other numbers in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(64, 4)

    @torch._dynamo.disable
    def weights(self, y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.cdist(y, targets).exp().neg().softmax(-1).sum(-1, keepdim=True)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return (y * self.weights(y, targets)).square().mean()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*was captured in 5 calls or more:lightning_remat.planner.RematWarning")
@pytest.mark.parametrize("budget", slow_but({"4MiB"}, ["min", 0.5, "4MiB"]))
def test_more_beside_a_known_graph_is_measured(budget: float | str) -> None:
    """Plans stay as they are for other sizes of the targets; steps that may hold more than any before are measured."""
    torch.manual_seed(0)
    original, x = Matched(), torch.randn(1024, 64)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(n, 64, generator=generator) for n in (10, 20, 15, 30, 25, 40, 500, 490, 35, 480)]
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    call = rematerialize(module, budget=budget, cost_model="unit", solver="greedy", time_limit=2.0)
    told = pytest.warns(RematWarning, match="sizes of what is not captured")
    with told if budget == "4MiB" else contextlib.nullcontext():
        for number, targets in enumerate(batches):
            one, other = (functools.partial(each, targets=targets) for each in (eager, call))
            assert_same(steps(one, eager, x, itself, 1), steps(other, module, x, itself, 1))
            if number > 6:
                peak = measured(other, module, x, itself) + targets.nbytes
                plan = call.scheduled.last_plan.of_whole()
                assert peak - NUMBERS <= plan.predicted_peak_bytes <= plan.budget_bytes
                assert number == 8 or plan.predicted_peak_bytes == pytest.approx(peak, rel=0.05)
    (later,) = {id(plan) for plan in call.plans[-1:]}
    assert id(call.scheduled.last_plan) == later and sum(call.runs[-1:]) >= 3


def of_rows(y: torch.Tensor) -> torch.Tensor:
    """As of a language model: each row for itself, and larger than what the module holds."""
    return y.repeat(1, 32).float().log_softmax(-1).exp().square().mean()


def of_products(y: torch.Tensor) -> torch.Tensor:
    return (y @ y.T).softmax(-1).diagonal().log().mean()


@pytest.mark.long
@pytest.mark.parametrize(("loss", "budget"), slow_but({(of_rows, 0.8)}, [(of_rows, 0.8), (of_products, "min")]))
def test_a_loss_outside_of_a_graph_with_symbolic_sizes(loss: Callable[..., Any], budget: float | str) -> None:
    torch.manual_seed(0)
    original = network(64, 6)
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    call = rematerialize(module, budget=budget, cost_model="unit", solver="greedy", time_limit=2.0)
    for number, rows in enumerate((256, 400, 320, 320, 768, 768, 700, 200)):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        assert_same(steps(eager, eager, x, loss, 1), steps(call, module, x, loss, 1))
        if number > 5:
            peak, plan = measured(call, module, x, loss), call.scheduled.last_plan
            assert peak <= plan.budget_bytes + NUMBERS
            assert 0.99 * peak - NUMBERS <= plan.predicted_peak_bytes
            assert rows == 200 or plan.predicted_peak_bytes <= 1.1 * peak
    assert call.failures == ()
    assert call.scheduled.captured == 4 and len(call.plans) < 12  # the fourth has symbolic sizes
