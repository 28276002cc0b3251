"""What is said of a plan agrees with what a simulation of it says, and with sums made here."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.planner import Plan
from lightning_remat.planner._plan import trade_off
from lightning_remat.report import Analysis, TradePoint, analyse, format_bytes, report_page
from lightning_remat.report._course import course
from lightning_remat.report._modules import Groups
from lightning_remat.report._replay import Replay
from lightning_remat.schedule import Compute, simulate
from lightning_remat.solvers import Problem
from tests.helpers.graphs import random_graph
from tests.helpers.host_copies import with_copies
from tests.helpers.plans import plan_of, small_transformer

MIB = 2**20


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(small_transformer(), 0.5)


@pytest.fixture(scope="module")
def looked_at(plan: Plan) -> Analysis:
    return analyse(plan)


def test_peaks_are_those_of_a_simulation(plan: Plan, looked_at: Analysis) -> None:
    before, after = plan.baseline_timeline(), plan.timeline()
    for moment, timeline in ((looked_at.peak_before, before), (looked_at.peak, after)):
        assert moment.nbytes == timeline.peak_bytes
        assert (moment.op, moment.module) == (timeline.peak_op, timeline.peak_module)
        assert sum(n for _, n in moment.parts) == timeline.peak_bytes
        assert sum(n for _, n in moment.modules) == timeline.peak_bytes
    assert looked_at.after.nbytes.max() == after.peak_bytes == plan.predicted_peak_bytes
    assert looked_at.before.nbytes.max() == before.peak_bytes == plan.baseline_peak_bytes
    assert looked_at.after.end == pytest.approx(plan.predicted_seconds)


@pytest.mark.parametrize("seed", range(30))
def test_layers_and_parts_add_up_on_any_graph(seed: int) -> None:
    graph = random_graph(seed).replace(resident_bytes=5, forward_resident_bytes=3)
    plan = plan_of(graph, "min")
    looked_at, timeline = analyse(plan), plan.timeline()
    assert sum(n for _, n in looked_at.peak.parts) == timeline.peak_bytes
    ran = [i for i, step in enumerate(plan.schedule.steps) if isinstance(step, Compute)]
    layers = [layer for _, layer in looked_at.after.layers]
    assert np.sum(layers, axis=0).tolist() == timeline.during[ran].tolist()


def test_what_is_kept_is_what_the_forward_leaves(plan: Plan, looked_at: Analysis) -> None:
    assert looked_at.kept_bytes == plan.timeline().saved_bytes
    assert looked_at.again_seconds == pytest.approx(plan.predicted_seconds - plan.baseline_seconds)
    again = {row.name for row in looked_at.modules if row.again_bytes}
    evaluated = plan.schedule.evaluations
    assert again == {
        Groups(op.module for op in plan.graph.ops).name(plan.graph.ops[op].module)
        for op in evaluated
        if evaluated[op] > 1
    }


def test_ops_that_take_longest_count_all_evaluations(plan: Plan, looked_at: Analysis) -> None:
    times = {plan.graph.ops[op].name: n * plan.graph.ops[op].seconds for op, n in plan.schedule.evaluations.items()}
    assert [row.seconds for row in looked_at.costly] == sorted(times.values(), reverse=True)[:10]
    assert all(times[row.name] == row.seconds for row in looked_at.costly)


def test_what_waits_on_the_host() -> None:
    graph = small_transformer(blocks=3).replace(host=Host(2**40, 1e12, 1e12), device="cuda")
    problem = Problem(graph)
    schedule = with_copies(graph, problem.expand(problem.captured))
    timeline = simulate(graph, schedule)
    assert timeline.host_bytes > 0
    plan = dataclasses.replace(
        plan_of(graph.replace(host=None), 1.0),
        graph=graph,
        schedule=schedule,
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_seconds=timeline.seconds,
    )
    looked_at = analyse(plan)
    assert sum(row.offloaded_bytes for row in looked_at.modules) == looked_at.host_bytes == timeline.host_bytes
    assert sum(n for _, n in looked_at.peak.parts) == timeline.peak_bytes == looked_at.after.nbytes.max()
    page = report_page(looked_at)
    assert "on the host" in page and format_bytes(timeline.host_bytes) in page


def test_what_is_in_slices_is_what_is_not_there_as_a_whole() -> None:
    whole = small_transformer(blocks=2)
    scores = whole.ops[whole.producer[next(i for i, t in enumerate(whole.tensors) if t.name == "scores_out")]]
    tensor = scores.outputs[0]
    renamed = dataclasses.replace(whole.tensors[tensor], name="slice_of_scores")
    sliced = dataclasses.replace(
        whole, tensors=tuple(renamed if i == tensor else t for i, t in enumerate(whole.tensors))
    )
    looked_at = analyse(dataclasses.replace(plan_of(sliced, 1.0), untiled=whole))
    assert {row.name: row.sliced_bytes for row in looked_at.modules if row.sliced_bytes} == {
        "outside of submodules": whole.storages[whole.tensors[tensor].storage]
    }
    assert "in slices" in report_page(looked_at)


def test_the_trade_off_of_a_plan_in_slices_knows_the_whole_step_too() -> None:
    whole = small_transformer(blocks=3)
    dearer = whole.replace(ops=[dataclasses.replace(op, seconds=2 * op.seconds) for op in whole.ops])
    sliced = dataclasses.replace(plan_of(dearer, 1.0), untiled=whole)
    points, of_whole = trade_off(sliced, 2.0), trade_off(plan_of(whole, 1.0), 2.0)
    assert min(point.seconds for point in points) == min(point.seconds for point in of_whole)
    assert any(point.seconds >= sum(op.seconds for op in dearer.ops) for point in points)
    assert min(point.peak_bytes for point in points) <= min(point.peak_bytes for point in of_whole)


def test_many_ops_are_drawn_in_intervals_that_keep_the_peak() -> None:
    graph = small_transformer(blocks=12)
    plan = plan_of(graph, 0.4)
    replay = Replay(graph, plan.schedule)
    drawn = course(replay, str, [], format_bytes, most=50)
    assert len(drawn.nbytes) == 50 < drawn.steps and not drawn.exact
    assert drawn.nbytes.max() == replay.timeline.peak_bytes
    assert replay.timeline.peak_op == drawn.ops[int(drawn.nbytes.argmax())]
    assert (drawn.left[1:] == drawn.right[:-1]).all() and drawn.right[-1] == pytest.approx(plan.predicted_seconds)
    # Each interval has the most of what runs within it, by the simulation.
    timeline = replay.timeline
    starts = np.concatenate([[0.0], timeline.seconds_after[:-1]])
    ran = np.array([isinstance(step, Compute) for step in plan.schedule.steps])
    for left, right, held in zip(drawn.left, drawn.right, drawn.nbytes, strict=True):
        within = ran & (starts < right * (1 - 1e-9)) & (timeline.seconds_after > left * (1 + 1e-9))
        assert held >= timeline.during[within].max()


def test_modules_that_differ_in_a_number_are_one_group() -> None:
    groups = Groups(
        [f"h.{i}.{part}" for i in range(12) for part in ("attn.c_attn", "attn.c_proj", "mlp")] + ["", "head"], 6
    )
    assert groups.name("h.3.attn.c_attn") == "h.*.attn.c_attn"
    assert groups.count == {
        "h.*.attn.c_attn": 12,
        "h.*.attn.c_proj": 12,
        "h.*.mlp": 12,
        "head": 1,
        "outside of submodules": 1,
    }
    assert Groups(["a.b.c", "a.b.d", "a.e"], 2).name("a.b.d") == "a.b"


def test_costs_that_are_counted_are_no_seconds() -> None:
    graph = small_transformer()
    counted = graph.with_costs([1.0 for _ in graph.ops])
    looked_at = analyse(plan_of(counted, 0.5))
    assert looked_at.cost(1234.0) == "1,234"
    assert "no seconds" in looked_at.cost_words
    free = graph.with_costs([0.0 for _ in graph.ops])
    looked_at = analyse(plan_of(free, 0.5))
    assert "No times are known" in looked_at.cost_words
    assert looked_at.after.end == looked_at.after.steps


class TestChanges:
    def test_more_memory_is_worth_what_the_curve_says(self, plan: Plan) -> None:
        point = TradePoint(plan.budget_bytes + 10 * MIB, plan.budget_bytes + 10 * MIB, plan.predicted_seconds * 0.9)
        words = [one.words for one in analyse(plan, [point]).changes]
        more = format_bytes(point.peak_bytes)
        assert f"Allow 10.0 MiB more (budget {more}): 10.0% less time a step." in words

    def test_less_memory_is_offered_where_it_is_cheap(self, plan: Plan) -> None:
        cheap = TradePoint(0, plan.predicted_peak_bytes * 3 // 4, plan.predicted_seconds * 1.005)
        dear = TradePoint(0, plan.predicted_peak_bytes // 2, plan.predicted_seconds * 1.5)
        words = " ".join(one.words for one in analyse(plan, [cheap, dear]).changes)
        assert f"A budget of {format_bytes(cheap.peak_bytes)} does too" in words and "0.5% more time" in words
        assert f"A budget of {format_bytes(dear.peak_bytes)}" not in words

    def test_a_better_schedule_within_the_budget_is_told(self, plan: Plan) -> None:
        better = TradePoint(0, plan.budget_bytes, plan.predicted_seconds * 0.95)
        assert any(
            "5.0% less time" in one.words and "more time" in one.words for one in analyse(plan, [better]).changes
        )

    def test_a_smaller_batch_that_would_fit(self) -> None:
        graph = small_transformer(batch=16)
        plan = plan_of(graph, 0.5)
        peak = analyse(plan).peak_before
        fixed = sum(n for name, n in peak.parts if name in ("parameters", "gradients", "old gradients", "held beside"))
        fits = math.floor(16 * (plan.budget_bytes - fixed) / (plan.baseline_peak_bytes - fixed))
        assert 1 <= fits < 16
        assert any(f"A batch of about {fits} instead of 16" in one.words for one in analyse(plan).changes)

    def test_nothing_is_said_of_a_batch_where_shapes_do_not_tell_it(self, looked_at: Analysis) -> None:
        assert not any("batch" in one.words for one in looked_at.changes)

    def test_losses_in_slices_where_they_make_the_peak(self) -> None:
        graph = small_transformer(blocks=1, loss="aten._log_softmax.default")
        words = [one.words for one in analyse(plan_of(graph, "min")).changes]
        assert any('tiling="exact"' in one for one in words)
        assert not any("tiling" in one.words for one in analyse(plan_of(small_transformer(blocks=1), "min")).changes)

    def test_copies_to_the_host_on_cuda_only(self, plan: Plan) -> None:
        on_cuda = dataclasses.replace(plan, graph=plan.graph.replace(device="cuda:0"))
        assert any('offload="host"' in one.words for one in analyse(on_cuda).changes)
        assert not any("offload" in one.words for one in analyse(plan).changes)

    def test_a_plan_without_overhead_needs_none_of_it(self) -> None:
        plan = plan_of(small_transformer(batch=16), 1.0)
        assert plan.overhead == 0 and analyse(plan).changes == ()


def test_the_curve_has_only_what_nothing_is_better_than(plan: Plan) -> None:
    this = (plan.predicted_peak_bytes, plan.predicted_seconds)
    worse = TradePoint(0, this[0] + 1, this[1] + 1)
    fewer = TradePoint(0, this[0] // 2, this[1] * 2)
    twice = TradePoint(1, this[0] // 2, this[1] * 2)
    assert [point[1:] for point in analyse(plan, [worse, fewer, twice]).curve] == [fewer[1:], this]


def test_an_explanation_says_what_the_plan_says(plan: Plan) -> None:
    words = plan.explain(curve_seconds=1.0)
    timeline = plan.timeline()
    assert f"peak {format_bytes(plan.predicted_peak_bytes)}" in words
    assert f"peak {format_bytes(plan.baseline_peak_bytes)}" in words
    assert f"{timeline.peak_op} (" in words and "transformer.h.*" in words
    assert "No step was timed" in words
    assert words.count("\n  1. ") == 1 and words.count("\n  4. ") == 0


def test_an_explanation_has_no_colours(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in plan.explain(curve_seconds=0)


def test_a_step_without_ops_is_explained() -> None:
    graph = ComputationGraph((), (), (), name="nothing")
    assert "No op runs" in plan_of(graph, "min").explain(curve_seconds=0)
