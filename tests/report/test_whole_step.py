"""What is shown of a plan that is one of several: the step as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_remat import Plan, rematerialize
from lightning_remat.callbacks.dashboard import plan_metrics, worth_showing
from lightning_remat.measure import held_bytes
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside, needing, peak_beside
from lightning_remat.planner._plan import FOR_ONCE, trade_off, with_beside
from lightning_remat.report import analyse, compared_page, format_bytes, plan_figure, plan_table
from lightning_remat.schedule import OUTSIDE
from tests.helpers.browser import WIDTHS, opened

LAYERS, WIDTH, BATCH = 3, 64, 256


class InParts(torch.nn.Module):
    """Two parts, with code between them that is not captured, and that holds much for a moment where it is asked to."""

    def __init__(self, between: int) -> None:
        super().__init__()
        layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(2 * LAYERS)]
        self.first, self.second = (
            torch.nn.Sequential(*(module for layer in half for module in layer))
            for half in (layers[:LAYERS], layers[LAYERS:])
        )
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        uncaptured(self.between)
        return self.second(x).square().mean()


@torch.compiler.disable
def uncaptured(nbytes: int) -> None:
    torch.empty(nbytes, dtype=torch.uint8)


def planned(between: int = 0) -> list[Plan]:
    """The plans of its two parts, the last that were made."""
    torch.manual_seed(0)
    module = InParts(between)
    step = rematerialize(module, budget="50%", cost_model="unit", time_limit=1.0)
    for _ in range(3):
        step(torch.randn(BATCH, WIDTH)).backward()
        module.zero_grad(set_to_none=True)
    plans = [plan for plan in step.plans if plan.whole is not None][-2:]
    assert len(plans) == 2 and plans[0].whole is plans[1].whole
    return plans


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return planned()


def test_forwards_run_in_order_and_backwards_in_reverse(plans: list[Plan]) -> None:
    whole = plans[0].whole
    assert whole is not None and OUTSIDE not in whole.before.ops + whole.after.ops
    for stretch, boundary in zip((whole.before, whole.after), whole.boundaries, strict=True):
        forward, backward = stretch.part(0, boundary), stretch.part(boundary, len(stretch))
        for half, order in ((forward, ("first", "second")), (backward, ("second", "first"))):
            parts = [module.partition(".")[0] for module in half.modules if module]
            assert list(dict.fromkeys(parts)) == list(order)
    assert len(whole.after) == sum(sum(plan.schedule.evaluations.values()) - 1 for plan in plans)
    assert whole.after.most_bytes == max(plan.predicted_peak_bytes for plan in plans)
    assert whole.before.most_bytes == max(plan.baseline_peak_bytes for plan in plans)
    held = held_bytes(torch.nn.ModuleList([InParts(0)]))
    assert held <= whole.always_bytes < held + 2 * BATCH * WIDTH * 4 < whole.after.most_bytes


def test_code_that_is_not_captured_is_there_where_it_sets_the_peak() -> None:
    nbytes = 50 * BATCH * WIDTH
    first, second = planned(nbytes)
    whole = first.whole
    assert whole is not None
    for stretch in (whole.before, whole.after):
        at = stretch.ops.index(OUTSIDE)
        assert stretch.timeline().peak_step == at and stretch.most_bytes == stretch.after[at] + nbytes
        assert {module.partition(".")[0] for module in stretch.modules[:at] if module} == {"first"}
    assert first.predicted_peak_bytes == whole.after.most_bytes > second.predicted_peak_bytes


def test_what_is_beside_a_graph_changes_its_own_peak_alone(plans: list[Plan]) -> None:
    """Not what others are known to need meanwhile: with what was found beside them, their peaks are others too."""
    less = Beside(forward_bytes=-1000, backward_bytes=-1000)
    own = [peak_beside(plan, NOTHING_BESIDE, NOTHING_BESIDE) for plan in plans]
    assert max(own) == plans[0].predicted_peak_bytes
    assert [peak_beside(plan, NOTHING_BESIDE, less) for plan in plans] == [nbytes - 1000 for nbytes in own]
    needed = dataclasses.replace(plans[0], graph=needing(plans[0].graph, plans[0].predicted_peak_bytes))
    assert needed.timeline().peak_bytes > plans[0].predicted_peak_bytes
    assert peak_beside(needed, NOTHING_BESIDE, NOTHING_BESIDE) == own[0]


def test_it_is_saved_with_the_plan_and_moves_with_what_is_beside(plans: list[Plan], tmp_path: Path) -> None:
    plans[1].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plans[1]
    whole = plans[1].whole
    assert whole is not None
    more = with_beside(plans[1], 1000).whole
    assert more is not None and more.after.most_bytes == whole.after.most_bytes + 1000
    assert np.array_equal(more.before.after, whole.before.after + 1000) and more.overhead == whole.overhead


def test_words_and_the_picture_are_of_the_whole(plans: list[Plan]) -> None:
    plan, whole = plans[1], plans[1].whole
    assert whole is not None and whole.overhead == pytest.approx(
        sum(p.predicted_seconds for p in plans) / sum(p.baseline_seconds for p in plans) - 1
    )
    assert "one of 2 graphs" in plan.summary() and f"(the whole step {whole.overhead:+.1%})" in plan.summary()
    assert plan_metrics(plan)["remat/predicted_overhead_percent"] == pytest.approx(100 * whole.overhead)
    assert plan_metrics(plan)["remat/predicted_peak_GiB"] == whole.after.most_bytes / 2**30
    cells = [next(iter(column.cells)) for column in plan_table([plan.of_whole()]).columns]
    assert f"{100 * whole.overhead:+.1f}%" in cells and "-" in cells, "the gap of the whole is not known"
    words = plan.explain()
    assert "one of the 2 graphs" in words and f"peak {format_bytes(whole.before.most_bytes)}" in words
    assert "fewer graphs than 2" in words and trade_off(plan, 1.0) == ()
    shown = plan._repr_html_()
    assert ", one of 2 graphs" in shown and format_bytes(whole.before.most_bytes) in shown
    figure = plan_figure(plan)
    upper, lower = figure.axes
    assert max(upper.lines[0].get_ydata()) > max(lower.lines[0].get_ydata())
    assert figure.get_suptitle().endswith(": 2 graphs")


def test_two_of_them_are_compared_as_wholes(plans: list[Plan]) -> None:
    whole = plans[0].whole
    assert whole is not None
    text = compared_page(analyse(plans[0]), analyse(plans[1]))
    assert ", one of 2 graphs" in text and "is of one graph" in text
    assert format_bytes(whole.before.most_bytes) in text and f"{whole.overhead:+.1%} over none computed again" in text


def test_where_another_graph_sets_the_peak_that_is_said(plans: list[Plan]) -> None:
    whole = plans[0].whole
    more = needing(plans[0].graph, plans[0].predicted_peak_bytes)  # whichever of the two sets the peak by itself
    first = analyse(dataclasses.replace(plans[0], graph=more))
    assert whole is not None and first.peak.op == OUTSIDE
    op = whole.after.timeline().peak_op
    assert f"Another graph sets the peak of the step: {format_bytes(whole.after.most_bytes)}" in first.peak_words[0]
    assert f"while {op} runs" in first.peak_words[0] and "Nothing of it is kept" not in " ".join(first.peak_words)
    code = analyse(planned(50 * BATCH * WIDTH)[0]).peak_words
    assert "Code that is not captured sets the peak" in code[0]


def test_of_many_new_plans_those_that_matter_are_shown(plans: list[Plan]) -> None:
    first, second = (dataclasses.replace(plan, predicted_peak_bytes=10**6) for plan in plans)
    alone = [dataclasses.replace(plan, whole=None) for plan in (first, second)]
    once = [dataclasses.replace(plan, notes=(FOR_ONCE,)) for plan in alone]
    assert worth_showing([*alone, first, second]) == [second], "the graph that sets the peak, and nothing of before"
    assert worth_showing([with_beside(first, 10), with_beside(second, 10)])[0].graph.ops == second.graph.ops
    assert worth_showing([*once, *alone]) == alone and worth_showing(once) == []
    largest = with_beside(alone[0], 10)
    assert worth_showing([*alone, largest, *alone]) == [largest]


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_its_page_begins_with_the_whole(plans: list[Plan], chromium: Any, tmp_path: Path, width: int) -> None:
    whole = plans[1].whole
    assert whole is not None
    plans[1].report(tmp_path / "plan.html")
    page = opened(chromium, tmp_path / "plan.html", width)
    headings = page.page.locator("h2").all_inner_texts()
    assert headings[0] == "Memory over the whole step" and "Memory over this graph" in headings
    assert "At other budgets" not in headings
    said = page.point_at(1, 0.5)
    assert any(op in said for op in whole.after.ops) and "largest" not in said
    cards = page.page.locator(".cards").inner_text()
    assert format_bytes(whole.after.most_bytes) in cards and format_bytes(whole.before.most_bytes) in cards
    page.holds()
