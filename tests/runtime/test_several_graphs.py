"""A step that is captured as several graphs: one budget over all of them."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat.graph import ComputationGraph
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner import _curves
from lightning_remat.runtime import _paths, _plans
from lightning_remat.solvers import Curve, plan_curve
from tests.helpers.cases import slow_but


class Broken(torch.nn.Module):
    """Parts with a break of the graph after each but the last."""

    def __init__(self, parts: int = 2, width: int = 128, layers: int = 4) -> None:
        super().__init__()

        def part() -> torch.nn.Sequential:
            made = [(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(layers)]
            return torch.nn.Sequential(*(module for layer in made for module in layer))

        self.parts = torch.nn.ModuleList(part() for _ in range(parts))
        self.skips = parts < 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()  # not in a loop: Dynamo captures nothing then
        if not self.skips:
            x = self.parts[1](x)
            torch._dynamo.graph_break()
        return self.parts[-1](x).square().mean()


def train(call: Any, module: torch.nn.Module, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = call(x)
        module.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in module.parameters()), torch.get_rng_state()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "share", "planned"),
    slow_but({(2, 0.8, (1, 2))}, [(2, 0.8, (1, 2)), (2, 0.3, (3,)), (3, 0.3, (3,))]),
)
def test_graphs_share_one_budget(share: float, parts: int, planned: tuple[int, ...]) -> None:
    """Each is planned as it comes, then all of them together, and again where they were measured to hold less."""
    torch.manual_seed(0)
    original, x = Broken(parts), torch.randn(2048, 128)
    eager = copy.deepcopy(original)
    expected = train(eager, eager, x, 4)
    held = held_bytes(eager, x, gradients=True)
    plain = held + peak_memory(lambda: step(eager, eager, x), "cpu")
    floor = held_bytes(eager, x, gradients=True)
    budget = round(floor + share * (plain - floor))

    module = copy.deepcopy(original)
    scheduled = rematerialize(module, budget=budget, cost_model="unit", time_limit=1.0)
    result = train(scheduled, module, x, 4)
    assert all(map(torch.equal, expected, result))
    assert scheduled.failures == ()
    assert scheduled.runs == tuple(runs for runs in (1, *planned) for _ in range(parts))
    alone, together = scheduled.plans[:parts], scheduled.plans[-parts:]
    if share < 0.5:  # the first graphs, alone, left too little for the others
        assert max(plan.predicted_peak_bytes for plan in alone) > budget
    else:
        assert sum(plan.predicted_seconds for plan in together) <= sum(plan.predicted_seconds for plan in alone)
    assert max(plan.predicted_peak_bytes for plan in together) <= budget
    assert {plan.budget_bytes for plan in together} == {budget}
    assert any(plan.rematerializes for plan in together)
    (whole,) = {id(plan.whole): plan.whole for plan in together}.values()
    assert whole is not None and whole.graphs == parts and all(plan.whole is None for plan in alone)
    assert whole.after.most_bytes == max(plan.predicted_peak_bytes for plan in together)
    assert whole.before.most_bytes == max(plan.baseline_peak_bytes for plan in together)
    assert whole.after.seconds.sum() == sum(plan.predicted_seconds for plan in together)
    assert whole.before.seconds.sum() == sum(plan.baseline_seconds for plan in together)
    assert any(op.workspace_bytes for plan in together for op in plan.graph.ops if op.name == "outside")
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, scheduled, x), "cpu")
    assert measured <= budget
    assert measured <= 1.02 * max(plan.predicted_peak_bytes for plan in together)
    assert measured >= 0.9 * max(plan.predicted_peak_bytes for plan in together)


@pytest.mark.long
def test_sizes_that_come_once_leave_room_for_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many sizes, those that come once run by what larger ones run by, which were planned together: within the budget."""
    monkeypatch.setattr(_plans, "MANY_SHAPES", 1)
    torch.manual_seed(0)
    module = Broken(width=64, layers=3)
    scheduled = rematerialize(module, budget="1500KiB", cost_model="unit", solver="greedy", time_limit=2.0)
    plans, made = [], 0
    for rows in (256, 256, 640, 640, 512, 384, 576):
        x = torch.randn(rows, 64)
        peak = held_bytes(module, x, gradients=True) + peak_memory(lambda x=x: step(module, scheduled, x), "cpu")
        plans.append(len(scheduled.plans) - made)
        made = len(scheduled.plans)
        assert rows in (256, 640) or peak <= 1500 * 1024
    assert plans == [4, 0, 4, 0, 2, 2, 2]
    assert all(plan.for_once and plan.rematerializes for plan in scheduled.plans[-6:])


@pytest.mark.long
@pytest.mark.parametrize("budget", slow_but({0.4}, [0.4, "min"]))
def test_sizes_that_vary(budget: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a call is planned as a whole its graphs run by what is at hand; after some sizes no curve is made any more."""
    curves: list[int] = []

    def counted(graph: ComputationGraph, *args: Any) -> Curve:
        curves.append(len(graph.ops))
        return plan_curve(graph, *args)

    monkeypatch.setattr(_curves, "plan_curve", counted)
    monkeypatch.setattr(_plans, "MANY_SHAPES", 1)
    torch.manual_seed(0)
    original = Broken(width=64, layers=2)
    results, made, plans = [], [], [0]
    for module in (copy.deepcopy(original), copy.deepcopy(original)):
        call = (
            module
            if not results
            else rematerialize(module, budget=budget, cost_model="unit", solver="greedy", time_limit=2.0)
        )
        found = []
        for rows in (512, 768, 640):
            torch.manual_seed(rows)
            x = torch.randn(rows, 64)
            found += train(call, module, x, 3)
            if results:
                made.append(len(curves))
                plans.append(len(call.plans))
        results.append(found)
    assert all(map(torch.equal, *results))
    assert call.failures == ()
    assert made[0] > 0 and (made[0] == made[-1]) is (budget != "min")  # the smallest peak is found out for each
    overheads = []
    for number, (first, after) in enumerate(itertools.pairwise(plans)):
        once = 2 if number else 1  # of many sizes, those that do not come again are not planned together
        assert call.runs[first : first + 2] == (once, once)
        assert all(plan.for_once for plan in call.plans[first : first + 2] if plan.rematerializes and first)
        together = call.plans[after - 2 : after]
        assert not any(plan.for_once for plan in together) and call.runs[after - 1]
        assert max(plan.predicted_peak_bytes for plan in together) <= together[0].budget_bytes
        overheads.append(
            sum(plan.predicted_seconds for plan in together) / sum(plan.baseline_seconds for plan in together)
        )
    assert max(overheads) <= 1.1 * overheads[0]


@pytest.mark.long
def test_the_smallest_budget_is_that_of_all_graphs() -> None:
    torch.manual_seed(0)
    module, x = Broken(), torch.randn(2048, 128)
    scheduled = rematerialize(module, budget="min", cost_model="unit", time_limit=0.4)
    train(scheduled, module, x, 2)
    least = scheduled.plans[-1].budget_bytes
    assert scheduled.runs == (1, 1, 1, 1)
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, scheduled, x), "cpu")
    assert 0.9 * least <= measured <= least
    smaller = rematerialize(module, budget=int(0.97 * least), cost_model="unit", time_limit=0.4)
    with pytest.raises(InfeasibleBudgetError) as caught:
        smaller(x)
    assert caught.value.smallest_bytes == pytest.approx(least, rel=1e-3)


@pytest.mark.long
def test_a_backward_is_that_of_its_forward_whatever_runs_meanwhile() -> None:
    torch.manual_seed(0)
    original, x = Broken(), torch.randn(256, 128)
    results = []
    for module in (copy.deepcopy(original), copy.deepcopy(original)):
        call = module if not results else rematerialize(module, budget=0.5, cost_model="unit", time_limit=0.4)
        torch.manual_seed(1)
        first = call(x)  # with the plans made as the graphs came
        second = call(2 * x)  # with those made together
        second.backward()
        first.backward()
        results.append([first.detach(), second.detach(), *(p.grad for p in module.parameters())])
    assert call.runs == (1, 1, 1, 1)
    assert all(map(torch.equal, *results))


@pytest.mark.long
def test_calls_that_go_different_ways_keep_one_budget() -> None:
    torch.manual_seed(0)
    original, x = Broken(3), torch.randn(1024, 128)
    plain = rematerialize(copy.deepcopy(original), budget=1.0, cost_model="unit", time_limit=1.0)
    plain(x)
    budget = int(0.6 * max(plan.predicted_peak_bytes for plan in plain.plans))
    torch._dynamo.reset()
    results = []
    for module in (copy.deepcopy(original), copy.deepcopy(original)):
        call = module if not results else rematerialize(module, budget=budget, cost_model="unit", time_limit=1.0)
        torch.manual_seed(1)
        for skips in (False, True, False, True, True, False):
            module.skips = skips
            call(x).backward()
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))
    assert call.failures == ()
    for skips in (False, True):
        module.skips = skips
        before = list(call.runs)
        step(module, call, x)
        ran = [i for i, count in enumerate(call.runs) if count > before[i]]
        assert len(ran) == 2 + (not skips)
        assert all(any(op.name == "outside" for op in call.plans[i].graph.ops) for i in ran)  # all made together
        assert max(call.plans[i].predicted_peak_bytes for i in ran) <= budget
        measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, call, x), "cpu")
        assert measured <= budget


class Changing(torch.nn.Module):
    """A part reads what code after it writes to, and eager mode has saved only what was made of it."""

    def __init__(self, change: Callable[[torch.Tensor], object], of_an_input: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16)
        self.change, self.of_an_input = change, of_an_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.of_an_input:
            torch._dynamo.graph_break()
        made = torch.nn.functional.gelu(hidden - 1)
        torch._dynamo.graph_break()
        self.change(hidden)
        return (hidden * self.second(made)).square().mean()


def write_a_part(hidden: torch.Tensor) -> None:
    hidden[0] = 0


@pytest.mark.parametrize("of_an_input", [False, True])
@pytest.mark.parametrize(
    "change", [torch.Tensor.relu_, write_a_part, torch.compiler.disable(torch.Tensor.neg_)], ids=["op", "part", "eager"]
)
def test_what_is_changed_after_a_break_is_copied(change: Callable[[torch.Tensor], object], of_an_input: bool) -> None:
    x = torch.randn(4, 8, 16)
    torch.manual_seed(0)
    module = Changing(change, of_an_input)
    other = copy.deepcopy(module)
    right = train(other, other, x, 4)
    step = rematerialize(module, budget="min", cost_model="unit")
    assert all(map(torch.equal, train(step, module, x, 4), right))
    assert not step.failures and any(
        plan.schedule.evaluations[op] > 1 for plan in step.plans for op in plan.schedule.evaluations
    )


class Thrice(torch.nn.Module):
    """One layer that three graphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.layer(x)).square().mean()


def test_a_weight_that_several_graphs_share_counts_for_each() -> None:
    torch.manual_seed(0)
    module, x = Thrice(), torch.randn(64, 1024)
    call = rematerialize(module, budget="40MiB", cost_model="unit", time_limit=0.4, old_gradients=False)
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        call(x).backward()
    module.zero_grad(set_to_none=True)
    measured = held_bytes(module, x) + peak_memory(lambda: call(x).backward(), "cpu")
    assert call.plan is not None and not call.plan.rematerializes
    predicted = call.plan.predicted_peak_bytes
    assert 0.9 * predicted <= measured <= 1.01 * predicted


def test_what_is_handed_on_counts_once() -> None:
    torch.manual_seed(0)

    class Four(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            torch._dynamo.graph_break()
            x = self.parts[1](x)
            torch._dynamo.graph_break()
            x = self.parts[2](x)
            torch._dynamo.graph_break()
            return self.parts[3](x).square().mean()

    module, x = Four(4, layers=1), torch.randn(4096, 128)
    call = rematerialize(module, budget=1.0, cost_model="unit", time_limit=0.4)
    for _ in range(2):
        step(module, call, x)
    measured = held_bytes(module, x, gradients=True) + peak_memory(lambda: step(module, call, x), "cpu")
    predicted = call.plan.predicted_peak_bytes
    assert 0.95 * predicted <= measured <= 1.01 * predicted


@pytest.mark.long
def test_too_many_ways_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(_paths, "MOST_PATHS", 1)
    module, x = Broken(3), torch.randn(512, 128)
    call = rematerialize(module, budget=0.4, cost_model="unit", time_limit=1.0)
    with caplog.at_level(logging.WARNING, "lightning_remat"):
        for skips in (False, True, False, True):
            module.skips = skips
            call(x).backward()
    assert len([r for r in caplog.records if "different sequences of graphs" in r.message]) == 1


def step(module: torch.nn.Module, call: Any, x: torch.Tensor) -> None:
    loss = call(x)
    module.zero_grad(set_to_none=True)
    loss.backward()
