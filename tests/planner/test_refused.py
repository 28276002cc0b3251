"""Schedules that the verifier refuses: graphs on which solvers counted less than it, and that no such defect ends a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import RematWarning, rematerialize
from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.planner import RematConfig, _make, _plan_cache, make_plan
from lightning_remat.runtime import _planning
from lightning_remat.schedule import verify
from lightning_remat.solvers import Problem, solve
from lightning_remat.solvers.portfolio import _auto
from tests.helpers.graphs import unit_chain


def summed(saved_bytes: int = 4) -> ComputationGraph:
    """A sum, whose backward is the tangent expanded: a view."""
    x, y, total = Tensor("x", 0, role=TensorRole.BATCH), Tensor("y", 1), Tensor("total", 2)
    tangent, wide = Tensor("tangent", 3, role=TensorRole.TANGENT), Tensor("wide", 3)
    ops = (
        Op("exp", "exp", (0,), (1,), seconds=1.0),
        Op("sum", "sum", (1,), (2,), seconds=1.0),
        Op("expand", "expand", (3,), (4,), Phase.BACKWARD),
    )
    storages = (8, saved_bytes, 1, 64)
    return ComputationGraph(
        ops, (x, y, total, tangent, wide), storages, (0, 3), (2,), backward_outputs=(4,), device="cpu"
    )


def only_passed_on(old_gradients: int = 50) -> ComputationGraph:
    """A forward that hands its input on as a view, while old gradients are there."""
    tensors = (
        Tensor("x", 0, role=TensorRole.BATCH),
        Tensor("view", 0),
        Tensor("tangent", 1, role=TensorRole.TANGENT),
        Tensor("gradient", 2),
    )
    ops = (
        Op("view", "view", (0,), (1,)),
        Op("mul", "mul", (1, 2), (3,), Phase.BACKWARD, seconds=1.0),
    )
    return ComputationGraph(
        ops, tensors, (100, 10, 10), (0, 2), (1,), (), (3,), forward_resident_bytes=old_gradients, device="cpu"
    )


@pytest.mark.parametrize("graph", [summed(), only_passed_on()], ids=["backward", "forward"])
def test_what_is_held_where_only_views_run_counts(graph: ComputationGraph) -> None:
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    assert verify(graph, problem.expand(problem.captured), peak) == peak
    assert solve(graph, peak, "no_remat").peak_bytes == peak
    for method in ("auto", "milp", "greedy"):
        assert solve(graph, peak - 1, method).schedule is None
    for budget in ("min", 0.7, peak):
        plan = make_plan(graph, RematConfig(budget=budget, time_limit=1.0))
        assert plan.predicted_peak_bytes <= plan.budget_bytes


def refuse(monkeypatch: pytest.MonkeyPatch, where: Any, *methods: str) -> None:
    """Let the verifier refuse what these methods find; all of them where none is named."""
    solves = where.solve

    def solve_or_refuse(graph: ComputationGraph, budget: int, method: str = "auto", *args: Any, **options: Any) -> Any:
        if not methods or method in methods:
            raise ScheduleError(f"step 6 (view_1): {method} made it")
        return solves(graph, budget, method, *args, **options)

    monkeypatch.setattr(where, "solve", solve_or_refuse)


def test_another_solver_is_asked_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, _make, "auto")
    for budget in (0.5, "min"):
        plan = make_plan(unit_chain(12).replace(device="cpu"), RematConfig(budget=budget, time_limit=2.0))
        assert plan.solver.startswith("greedy")
        assert plan.rematerializes
        assert "auto was refused: step 6 (view_1): auto made it" in plan.notes
    assert "another one is asked; please report it" in caplog.text


def test_a_step_that_fits_is_planned_where_its_own_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, _make, "no_remat")
    plan = make_plan(unit_chain(12).replace(device="cpu"), RematConfig(budget=1.0, time_limit=2.0))
    assert plan.solver.startswith("auto")


def test_auto_takes_its_next_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuses_the_first(*args: Any) -> int:
        asked.append(1)
        if len(asked) == 1:
            raise ScheduleError("so it is")
        return verify(*args)

    monkeypatch.setattr(_auto, "verify", refuses_the_first)
    solution = solve(unit_chain(12), 12, "auto", 2.0)
    assert solution.schedule is not None
    assert any("breaks a rule" in note and "so it is" in note for note in solution.notes)


class Net(torch.nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        made = [
            (torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.GELU(), torch.nn.Dropout(0.2)) for _ in "1234"
        ]
        self.first = torch.nn.Sequential(*(module for layer in made[:2] for module in layer))
        self.last = torch.nn.Sequential(*(module for layer in made[2:] for module in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x).square().mean()


def train(call: Any, module: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(module.parameters())
    losses = []
    for _ in range(3):
        loss = call(torch.randn(64, 32))
        module.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(t.detach().clone() for t in module.state_dict().values())]


def trains_as_eager(original: Net, **options: Any) -> Any:
    torch._dynamo.reset()
    eager, module = copy.deepcopy(original), copy.deepcopy(original)
    expected = train(eager, eager)
    call = rematerialize(module, cost_model="unit", time_limit=1.0, **options)
    with pytest.warns(RematWarning, match=r"breaks a rule .*Please report it with .*captured graph") as caught:
        found = train(call, module)
    assert all(map(torch.equal, expected, found))
    assert len([w for w in caught if w.category is RematWarning]) == 1
    assert len(call.failures) == 1
    assert "breaks a rule" in call.failures[0]
    return call


@pytest.mark.parametrize("budget", [0.6, "min"])
def test_where_all_are_refused_the_run_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: Any
) -> None:
    monkeypatch.setattr(_plan_cache, "cache_directory", lambda: tmp_path)
    refuse(monkeypatch, _make)
    if budget == "min":
        monkeypatch.setattr(_make, "find_smallest", lambda *_: _make.solve(None, 0))
    call = trains_as_eager(Net(), budget=budget)
    assert call.plan.solver == "none"
    assert not call.plan.rematerializes
    assert call.runs == (3,)
    (file,) = (tmp_path / "plans").glob("refused-*.json")
    assert ComputationGraph.load(file) == call.plan.graph


def test_what_is_refused_of_a_plan_for_several_graphs_leaves_that_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ScheduleError("step 6 (view_1)")

    monkeypatch.setattr(_planning, "plan_together", refused)
    call = trains_as_eager(Net(breaks=True), budget=0.6)
    assert call.runs == (3, 3)
    assert any(plan.rematerializes for plan in call.plans)
