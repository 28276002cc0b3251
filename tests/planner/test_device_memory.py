"""What the device's allocator makes of a plan: predicted, budgeted, arranged, put back, and compared with what is measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.allocator import Arrangement, Footprint, Holdings, Segment, footprint, footprint_together
from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks.dashboard import over_prediction, plan_metrics
from lightning_remat.callbacks.optimizer_state import optimizer_state_bytes
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import ConfigError, InfeasibleBudgetError
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.measure import PeakMemory, held_bytes
from lightning_remat.planner import Plan, RematConfig, RematWarning, _make, _together, make_plan
from lightning_remat.planner._device_memory import (
    DeviceAllocator,
    DeviceMemory,
    arrangements,
    segment_of,
    with_expandable_segments,
)
from lightning_remat.planner._surroundings import Surroundings
from lightning_remat.planner._together import plan_together
from lightning_remat.runtime import _planning
from lightning_remat.schedule import simulate, verify
from lightning_remat.solvers import Problem, solve
from tests.helpers.graphs import random_graph
from tests.helpers.places import DATA
from tests.helpers.training import Classifier, callback, compare, fit

MIB, GIB = 2**20, 2**30
DEVICE = int(0.3 * 79.18 * GIB)
"""Bytes: 0.3 of an H100, as in the recorded runs."""

ALL = tuple(Arrangement)


@functools.cache
def batch_24() -> tuple[ComputationGraph, int]:
    """GPT-2 124M with its costs on an H100, at 24 x 1024 and float32 parameters as in the recorded run; its optimizer's bytes.

    Captured at 16 x 1024 in bfloat16: what depends on the batch is half as much again, and parameters take twice as much.
    """
    with lzma.open(DATA / "h100" / "gpt2.json.xz", "rt") as file:
        graph = ComputationGraph.from_dict(json.load(file))
    parameters = {graph.tensors[t].storage for t in graph.inputs if graph.tensors[t].role is not TensorRole.BATCH}
    shapes = {t.shape for t in graph.tensors if t.storage in parameters}
    fixed = parameters | {graph.tensors[t].storage for t in graph.backward_outputs}
    storages = []
    for storage, nbytes in enumerate(graph.storages):
        like_a_weight = any(graph.tensors[t].shape in shapes for t in graph.tensors_on[storage])
        storages.append(2 * nbytes if storage in fixed else nbytes if like_a_weight else nbytes * 3 // 2 // 512 * 512)
    ops = [
        dataclasses.replace(op, seconds=1.5 * op.seconds, workspace_bytes=op.workspace_bytes * 3 // 2)
        for op in graph.ops
    ]
    state = 2 * sum(storages[s] for s in parameters)
    old = 2 * graph.forward_resident_bytes
    return graph.replace(
        storages=tuple(storages), ops=tuple(ops), resident_bytes=state, forward_resident_bytes=old
    ), state


@functools.cache
def planned(allowed: tuple[Arrangement, ...]) -> Plan:
    """``budget="auto"`` there, with these arrangements of memory; without any, by allocated bytes alone."""
    graph, state = batch_24()
    memory = DeviceMemory(Holdings(later_bytes=state), allowed, DEVICE) if allowed else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_make, "device_bytes", lambda _device, margin, _held: int((1 - margin) * DEVICE))
        return make_plan(graph, RematConfig(time_limit=10), memory=memory)


class TestAutoWithinReservedMemory:
    """The case that ran out of memory by fragmentation on an H100."""

    def test_a_plan_by_allocated_bytes_alone_runs_out(self) -> None:
        plan = planned(())
        assert plan.footprint is None and plan.rematerializes
        taken = footprint(plan.graph, plan.schedule, plan.budget_bytes, Holdings(later_bytes=batch_24()[1]))
        assert not taken.fits

    @pytest.mark.parametrize("allowed", [ALL[:1], ALL], ids=["leave", "auto"])
    def test_what_is_planned_fits(self, allowed: tuple[Arrangement, ...]) -> None:
        plan = planned(allowed)
        assert plan.footprint is not None and plan.footprint.fits
        assert plan.footprint.arrangement in allowed
        holdings = Holdings(later_bytes=batch_24()[1])
        again = footprint(plan.graph, plan.schedule, plan.budget_bytes, holdings, plan.footprint.arrangement)
        assert again == plan.footprint
        assert plan.predicted_peak_bytes <= plan.predicted_allocated_bytes <= plan.predicted_reserved_bytes
        assert plan.predicted_reserved_bytes <= plan.budget_bytes < DEVICE
        assert verify(plan.graph, plan.schedule, plan.budget_bytes) == plan.predicted_peak_bytes
        assert plan.lower_bound_seconds <= plan.predicted_seconds
        assert "reserved" in plan.summary()

    def test_expandable_segments_cost_less_time_than_planning_around_fragmentation(self) -> None:
        left, arranged = planned(ALL[:1]), planned(ALL)
        assert arranged.footprint is not None and arranged.footprint.arrangement is Arrangement.EXPANDABLE
        assert arranged.predicted_seconds < left.predicted_seconds


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([(Arrangement.AS_IT_IS,), ALL]), st.booleans())
def test_what_is_settled_is_within_the_budget_or_said(
    seed: int, allowed: tuple[Arrangement, ...], reserved: bool
) -> None:
    graph = random_graph(seed)
    graph = graph.replace(storages=tuple(3 * MIB * nbytes + 1000 for nbytes in graph.storages))
    problem = Problem(graph)
    budget = int(1.02 * problem.evaluate(problem.captured).peak_bytes)
    memory = DeviceMemory(Holdings(), allowed)

    def again(within: int) -> tuple[ComputationGraph, Any]:
        assert within < budget
        solution = solve(graph, within, "greedy", 1.0)
        if solution.schedule is None:
            raise InfeasibleBudgetError(within, within + 1, "", "")
        return graph, solution

    first = solve(graph, budget, "no_remat")
    _, solution, taken = memory.settle(graph, first, budget, reserved, again)
    assert solution.schedule is not None
    verify(graph, solution.schedule, budget)
    assert solution.lower_bound_seconds <= solution.seconds
    within = taken.fits and taken.reserved_bytes <= budget if reserved else taken.allocated_bytes <= budget
    assert within != any("fragmented" in note for note in solution.notes)


def test_the_step_as_it_is_fits_the_whole_of_its_peak() -> None:
    """What is not split off would count beside it: with expandable segments all is, and nothing is evaluated again."""
    graph, _ = batch_24()
    graph = graph.replace(
        storages=tuple(-(-nbytes // 512) * 512 for nbytes in graph.storages),
        ops=tuple(dataclasses.replace(op, workspace_bytes=-(-op.workspace_bytes // 512) * 512) for op in graph.ops),
        resident_bytes=-(-graph.resident_bytes // 512) * 512,
    )
    problem = Problem(graph)
    as_it_is = footprint(graph, problem.expand(problem.captured))
    plan = make_plan(graph, RematConfig(budget=1.0, time_limit=5), memory=DeviceMemory(Holdings(), ALL))
    assert plan.budget_bytes == plan.baseline_peak_bytes < as_it_is.allocated_bytes
    assert not plan.rematerializes and plan.footprint is not None
    assert plan.footprint.arrangement is Arrangement.EXPANDABLE
    assert plan.footprint.allocated_bytes <= plan.budget_bytes


# -- settings of the allocator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text", "allowed"),
    [
        ("auto", "", ALL),
        ("auto", "garbage_collection_threshold:0.8", ALL),
        ("auto", "expandable_segments:False", (Arrangement.AS_IT_IS, Arrangement.ARENA)),
        ("auto", "garbage_collection_threshold:0.8, max_split_size_mb:128", (Arrangement.AS_IT_IS, Arrangement.ARENA)),
        ("leave", "", (Arrangement.AS_IT_IS,)),
    ],
)
def test_what_the_user_has_set_stays(option: str, text: str, allowed: tuple[Arrangement, ...]) -> None:
    assert arrangements(option, text) == allowed


def test_expandable_segments_are_switched_beside_other_settings() -> None:
    text = "roundup_power2_divisions:[256:1,>:4],garbage_collection_threshold:0.8"
    on = with_expandable_segments(text, True)
    assert on == f"{text},expandable_segments:True"
    assert with_expandable_segments(on, False) == f"{text},expandable_segments:False"
    assert with_expandable_segments("", True) == "expandable_segments:True"


class StandIn:
    """The settings of an allocator that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str = "") -> None:
        self.text, self.set = text, list[str]()
        monkeypatch.setattr(internals, "allocator_settings", lambda: self.text)
        monkeypatch.setattr(internals, "set_allocator_settings", self._set)

    def _set(self, text: str) -> None:
        self.text = text
        self.set.append(text)


def test_the_allocator_is_arranged_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, "garbage_collection_threshold:0.8")
    allocator, cpu = DeviceAllocator(), torch.device("cpu")
    expandable = Footprint(1, 1, Arrangement.EXPANDABLE)
    allocator.arrange(None, cpu)
    allocator.arrange(Footprint(1, 1), cpu)
    allocator.put_back()
    assert stand_in.set == []
    allocator.arrange(expandable, cpu)
    allocator.arrange(expandable, cpu)
    assert stand_in.set == ["garbage_collection_threshold:0.8,expandable_segments:True"]
    allocator.put_back()
    allocator.put_back()
    assert stand_in.set[1:] == ["garbage_collection_threshold:0.8,expandable_segments:False"]
    left = DeviceAllocator("leave")
    left.arrange(expandable, cpu)
    assert len(stand_in.set) == 2


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allocator='arena': give one of 'auto', 'leave'"):
        RematCallback(allocator="arena")


def test_a_snapshot_is_read_as_torch_gives_it() -> None:
    snapshot = {
        "device": 0,
        "address": 140249019711488,
        "total_size": 2097152,
        "segment_type": "small",
        "is_expandable": False,
        "blocks": [
            {"size": 512, "requested_size": 4, "state": "active_allocated"},
            {"size": 1024, "requested_size": 4, "state": "active_pending_free"},
            {"size": 2095616, "requested_size": 0, "state": "inactive"},
        ],
    }
    segment = segment_of(snapshot)
    assert segment.small and segment.nbytes == 2 * MIB
    assert segment.blocks == ((512, True), (1024, True), (2095616, False))


def test_on_the_cpu_there_is_nothing_to_arrange() -> None:
    assert DeviceAllocator().memory(torch.device("cpu")) is None


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[DeviceMemory]:
    """Steps on the CPU are planned as if an allocator like CUDA's were there, which is well off with expandable segments."""
    made: list[DeviceMemory] = []

    def memory(
        self: DeviceAllocator, device: torch.device, *, later_bytes: int = 0, begins: bool = True
    ) -> DeviceMemory:
        made.append(DeviceMemory(Holdings(later_bytes=later_bytes), arrangements(self._option, "")))
        return made[-1]

    monkeypatch.setattr(DeviceAllocator, "memory", memory)
    return made


def network() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


def losses(module: nn.Module, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        loss = call(torch.randn(1024, 512)).square().mean()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in module.parameters() if p.grad is not None)]


def test_a_step_is_planned_arranged_and_put_back(seen: list[DeviceMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch)
    torch.manual_seed(0)
    module, other = network(), network()
    other.load_state_dict(module.state_dict())
    step = rematerialize(module, budget=0.6, solver="greedy", cost_model="unit")
    assert all(map(torch.equal, losses(module, step), losses(other, other)))
    plan = step.plan
    assert plan is not None and plan.rematerializes and plan.footprint is not None and seen
    assert plan.predicted_allocated_bytes <= plan.budget_bytes
    assert plan.predicted_reserved_bytes >= plan.predicted_allocated_bytes >= plan.predicted_peak_bytes
    assert stand_in.set == (
        ["expandable_segments:True"] if plan.footprint.arrangement is Arrangement.EXPANDABLE else []
    )
    step.close()
    assert stand_in.text in ("", "expandable_segments:False")


@pytest.mark.parametrize("batches", [1, 2])
def test_gradients_that_are_added_to_are_there_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """What the allocator holds when a run begins has neither them in it nor the optimizer's state."""
    weights = held_bytes(*Classifier().parameters())
    later: list[int] = []

    def memory(
        self: DeviceAllocator, device: torch.device, *, later_bytes: int = 0, begins: bool = True
    ) -> DeviceMemory:
        held = (Segment(0, MIB, False, ((MIB - 512, True), (512, False))),) if begins else ()
        later.append(later_bytes)
        return DeviceMemory(Holdings(segments=held, later_bytes=later_bytes))

    monkeypatch.setattr(DeviceAllocator, "memory", memory)
    _, _, remat = compare(Classifier, accumulate_grad_batches=batches, plans=None, budget="min")
    (plan, *_) = remat.plans
    assert later[0] == optimizer_state_bytes(fit(Classifier).trainer.optimizers, torch.device("cpu")) + weights * (
        batches > 1
    )
    assert plan.predicted_allocated_bytes >= MIB + later[0]


def test_the_smallest_peak_is_what_the_allocator_takes(seen: list[DeviceMemory]) -> None:
    module = network()
    step = rematerialize(module, budget="min", solver="greedy", cost_model="unit", allocator="leave")
    losses(module, step)
    plan = step.plan
    assert plan is not None and plan.footprint is not None
    assert plan.budget_bytes == max(plan.predicted_peak_bytes, plan.predicted_allocated_bytes)


def test_several_graphs_are_within_the_budget_together(seen: list[DeviceMemory]) -> None:
    module = network()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = module[0](module[1](x))  # type: ignore[index]
        torch._dynamo.graph_break()
        return module[2](module[3](x))  # type: ignore[index, no-any-return]

    step = rematerialize(broken, budget=0.7, solver="greedy", cost_model="unit")
    losses(module, step)
    together = [plan for plan in step.plans if plan.footprint is not None][-2:]
    assert len(together) == 2 and together[0].footprint == together[1].footprint
    assert together[0].budget_bytes == together[1].budget_bytes
    assert all(plan.predicted_allocated_bytes <= plan.budget_bytes for plan in together)


def test_what_is_held_elsewhere_keeps_no_graphs_from_fitting(
    seen: list[DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nearly the whole budget is held while no graph runs, the graphs may do with less, for what the allocator adds."""
    module, calls = network(), []

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = module[0](module[1](x))  # type: ignore[index]
        torch._dynamo.graph_break()
        return module[2](module[3](x))  # type: ignore[index, no-any-return]

    def recorded(*args: Any, **others: Any) -> list[Plan]:
        calls.append((args, others))
        return plan_together(*args, **others)

    def with_more(*args: Any) -> Footprint:
        found = footprint_together(*args)
        return dataclasses.replace(found, allocated_bytes=found.allocated_bytes + MIB)

    monkeypatch.setattr(_planning, "plan_together", recorded)
    step = rematerialize(broken, budget=0.7, solver="greedy", cost_model="unit")
    losses(module, step)
    (parts, config), others = calls[-1]
    first = step.plans[-2]  # of the two graphs that were planned together last
    budget = first.budget_bytes
    more = budget - 1024 - (first.graph.resident_bytes - parts[0].beside.backward_bytes)
    beside = dataclasses.replace(parts[0].beside, elsewhere_bytes=more)
    monkeypatch.setattr(_together, "footprint_together", with_more)
    parts = [dataclasses.replace(parts[0], beside=beside), *parts[1:]]
    plans = plan_together(parts, dataclasses.replace(config, budget=budget), **others)
    assert plans[0].footprint is not None and plans[0].footprint.allocated_bytes <= budget
    assert budget - MIB < plans[0].predicted_peak_bytes <= budget
    assert max(simulate(plan.graph, plan.schedule).peak_bytes for plan in plans) <= budget - MIB


def test_sizes_that_vary_are_seen_as_the_allocator_sees_them(seen: list[DeviceMemory]) -> None:
    module = network()
    step = rematerialize(module, budget="40MiB", solver="greedy", cost_model="unit")
    for rows in (256, 512, 768, 1000, 900):
        step(torch.randn(rows, 512)).square().mean().backward()
    assert not step.failures
    for plan in (*step.plans, step.plan):
        assert plan is not None and plan.footprint is not None
        assert plan.predicted_allocated_bytes <= plan.budget_bytes


def test_plans_with_a_footprint_are_files(seen: list[DeviceMemory], tmp_path: Path) -> None:
    module = network()
    step = rematerialize(module, budget=0.6, solver="greedy", cost_model="unit")
    losses(module, step)
    assert step.plan is not None
    step.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == step.plan
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["footprint"]  # one that an earlier release saved
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "old.json").footprint is None


def test_a_fit_says_both_and_leaves_the_allocator_as_it_was(
    seen: list[DeviceMemory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandIn(monkeypatch)
    with caplog.at_level(logging.INFO, logger="lightning_remat"):
        _, _, remat = compare(Classifier)
    assert remat.plan is not None and remat.plan.footprint is not None and seen
    metrics = plan_metrics(remat.plan)
    assert metrics["remat/predicted_reserved_GiB"] * GIB == remat.plan.footprint.reserved_bytes
    assert metrics["remat/predicted_peak_GiB"] * GIB == remat.plan.footprint.allocated_bytes
    assert any("reserved" in record.message for record in caplog.records)
    assert stand_in.text in ("", "expandable_segments:False")


# -- measured ---------------------------------------------------------------------------------------------------------


def small_plan(taken: Footprint | None) -> Plan:
    graph = random_graph(1)
    plan = make_plan(graph, RematConfig(budget=1.0))
    return dataclasses.replace(plan, predicted_peak_bytes=1000 * MIB, budget_bytes=1010 * MIB, footprint=taken)


class TestOverPrediction:
    def test_a_step_as_predicted_says_nothing(self) -> None:
        peak = PeakMemory(torch.device("cpu"), peak_bytes=0)
        assert over_prediction(small_plan(None), peak, 1009 * MIB) == ""

    def test_allocated_bytes_over_what_was_predicted_are_said(self) -> None:
        peak = PeakMemory(torch.device("cpu"), peak_bytes=0)
        said = over_prediction(small_plan(None), peak, 1011 * MIB)
        assert f"{1011 * MIB:,} bytes where {1000 * MIB:,} were predicted" in said
        assert (
            f"so that it may be over its budget of {1010 * MIB:,} bytes. If" in said
            and "report" in said
            and torch.__version__ in said
        )

    def test_far_below_the_budget_nothing_is_said_of_being_over_it(self) -> None:
        plan = dataclasses.replace(small_plan(None), budget_bytes=20_000 * MIB)
        said = over_prediction(plan, PeakMemory(torch.device("cpu"), peak_bytes=0), 1100 * MIB)
        assert f"{1100 * MIB:,} bytes where {1000 * MIB:,} were predicted, which is well within its budget" in said
        assert "over its budget" not in said and "report" in said

    def test_reserved_bytes_near_the_budget_may_be_over_it(self) -> None:
        plan = dataclasses.replace(small_plan(Footprint(1000 * MIB, 1020 * MIB)), budget_bytes=2000 * MIB)
        peak = PeakMemory(torch.device("cuda", 0), 0, 1000 * MIB, 1900 * MIB, reserved_more=True)
        assert "may be over its budget" in over_prediction(plan, peak, 1000 * MIB)

    def test_so_are_reserved_ones_that_the_step_itself_reserved(self) -> None:
        plan = small_plan(Footprint(1000 * MIB, 1020 * MIB))
        more = PeakMemory(torch.device("cuda", 0), 0, 1000 * MIB, 1050 * MIB, reserved_more=True)
        assert f"{1050 * MIB:,} bytes of reserved memory where {1020 * MIB:,}" in over_prediction(
            plan, more, 1000 * MIB
        )
        there = dataclasses.replace(more, reserved_more=False)
        assert over_prediction(plan, there, 1000 * MIB) == ""


def test_a_step_over_its_prediction_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that promises too little, by which the steps that are measured are over."""
    remat = callback(budget=0.5, measure=True, cost_model="profile")
    real = Plan.predicted_allocated_bytes
    assert isinstance(real, property) and real.fget is not None
    told = real.fget
    monkeypatch.setattr(Plan, "predicted_allocated_bytes", property(lambda plan: told(plan) // 2))
    with pytest.warns(RematWarning, match="were predicted") as warned:
        fit(Classifier, remat)
    assert sum("were predicted" in str(one.message) for one in warned) == 1
    assert remat.measured_peak_bytes is not None


@pytest.mark.parametrize(
    ("named", "allocated", "workspaces", "found"),
    [
        (0, 130, 20, (30, 0)),
        (50, 120, 20, (20, 50)),  # an optimizer's state before its first step
        (50, 175, 20, (25, 0)),  # the same afterwards, and a little more
        (50, 140, 20, (20, 30)),
    ],
)
def test_what_was_named_may_come_later(
    named: int, allocated: int, workspaces: int, found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspaces of libraries are not taken for it."""
    monkeypatch.setattr(_planning, "allocated_bytes", lambda _device: allocated)
    monkeypatch.setattr(_planning, "workspace_bytes", lambda _device: workspaces)
    captured: Any = SimpleNamespace(device=torch.device("cuda"), static_bytes=80, batch_bytes=10)
    around = Surroundings(module_bytes=80, held_bytes=90, resident_bytes=named, named_bytes=named)
    assert _planning._found_beside(captured, around) == found
