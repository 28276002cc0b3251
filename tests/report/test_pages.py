"""Pages about plans, in a real browser: they answer when they are pointed at, ask for nothing, and nothing in a name runs."""

from __future__ import annotations

import builtins
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_remat.errors import RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import Plan
from lightning_remat.report import TradePoint, analyse, compared_page, format_bytes, report_page
from tests.helpers.browser import WIDTHS, opened
from tests.helpers.graphs import unit_chain
from tests.helpers.plans import plan_by_blocks, plan_of, small_transformer

HOSTILE = "<!--<script></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_by_blocks(small_transformer())


def with_names(graph: ComputationGraph, suffix: str) -> ComputationGraph:
    """The graph with something behind the names of its ops, tensors, modules, and its own."""
    return dataclasses.replace(
        graph,
        ops=tuple(
            dataclasses.replace(op, name=op.name + suffix, target=op.target + suffix, module=op.module + suffix)
            for op in graph.ops
        ),
        tensors=tuple(dataclasses.replace(tensor, name=tensor.name + suffix) for tensor in graph.tensors),
        name=graph.name + suffix,
    )


def curve(plan: Plan) -> list[TradePoint]:
    peak, seconds = plan.predicted_peak_bytes, plan.predicted_seconds
    return [TradePoint(n, n, seconds * peak / n) for n in (peak * 3 // 4, peak * 9 // 8)]


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_answers_when_it_is_pointed_at(plan: Plan, chromium: Any, tmp_path: Path, width: int) -> None:
    path = tmp_path / "plan.html"
    path.write_text(report_page(analyse(plan, curve(plan))), encoding="utf-8")
    page = opened(chromium, path, width)
    assert page.page.locator(".bk-Figure").count() == 4
    ops = {op.name for op in plan.graph.ops}
    for which in (0, 1, 2):
        told = page.point_at(which, 0.4)
        assert any(re.search(rf"\b{re.escape(name)}\b", told) for name in ops), told
    assert "transformer.h." in page.point_at(1, 0.3)
    page.holds()


@pytest.mark.long
def test_a_page_of_five_thousand_ops(chromium: Any, tmp_path: Path) -> None:
    graph = small_transformer(blocks=300)
    plan = plan_by_blocks(graph)
    assert len(graph.ops) > 5000
    path = tmp_path / "plan.html"
    plan.report(path, curve_seconds=0)
    assert path.stat().st_size < MOST_BYTES
    page = opened(chromium, path)
    assert "op" in page.point_at(1, 0.5)
    page.holds()
    assert format_bytes(plan.timeline().peak_bytes) in page.page.locator(".cards").inner_text()


@pytest.mark.long
def test_names_are_shown_and_never_run(plan: Plan, chromium: Any, tmp_path: Path) -> None:
    graph = with_names(plan.graph, HOSTILE)
    hostile = dataclasses.replace(plan, graph=graph, solver=HOSTILE, notes=(HOSTILE,), bound_scope=HOSTILE)
    looked_at = analyse(hostile, curve(hostile))
    for number, text in enumerate((report_page(looked_at), compared_page(looked_at, looked_at, (HOSTILE, "b")))):
        assert HOSTILE not in text
        path = tmp_path / f"{number}.html"
        path.write_text(text, encoding="utf-8")
        page = opened(chromium, path)
        for which in range(2):
            assert HOSTILE in page.point_at(which, 0.4).replace("\n", "")
        assert page.page.title() != "owned" and page.page.locator("img").count() == 0
        page.holds()


@pytest.mark.long
@pytest.mark.parametrize("graph", [ComputationGraph((), (), ()), unit_chain(3).with_costs([0.0] * 7)])
def test_steps_without_times_and_without_ops(graph: ComputationGraph, chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    plan_of(graph, "min").report(path, curve_seconds=1.0)
    page = opened(chromium, path)
    assert page.page.locator(".bk-Figure").count() == 3
    assert "No times are known" in page.page.locator("main").inner_text()
    page.holds()


def test_the_numbers_on_a_page_are_the_plan_s(plan: Plan) -> None:
    text = report_page(analyse(plan, curve(plan)))
    for number in (plan.predicted_peak_bytes, plan.baseline_peak_bytes, plan.graph.floor_bytes):
        assert f"{format_bytes(number)}" in text
    assert f"{plan.overhead:+.1%}" in text and "(this plan)" in text
    assert "No step was timed" in text
    assert text.count("<tr") > 20 and len(text) < MOST_BYTES
    assert "https://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_a_page_without_the_curve_says_so(plan: Plan, tmp_path: Path) -> None:
    plan.report(tmp_path / "plan.html", curve_seconds=0)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "At other budgets" not in text and "was not computed for this page" in text


def test_two_plans_of_one_step_and_of_two(plan: Plan) -> None:
    one, other = analyse(dataclasses.replace(plan, budget_bytes=plan.budget_bytes * 2)), analyse(plan)
    text = compared_page(one, other, ("wide", "narrow"))
    assert "Two plans of one step" in text
    assert f"-{format_bytes(plan.budget_bytes)}" in text
    longer = analyse(plan_by_blocks(small_transformer(blocks=3, prefix="encoder")))
    text = compared_page(other, longer)
    assert "Plans of different steps" in text
    assert "encoder" in text and "transformer.<wbr>h" in text


def test_without_bokeh_an_error_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "bokeh":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(RematError, match=r"pip install 'lightning_remat\[report\]'"):
        plan.report(tmp_path / "plan.html", curve_seconds=0)
    assert not (tmp_path / "plan.html").exists()
    assert "sets the peak" in plan.explain(curve_seconds=0)  # which needs none
    assert "<svg" in plan._repr_html_()


class TestNotebook:
    def test_a_plan_shows_itself(self, plan: Plan) -> None:
        shown = plan._repr_html_()
        assert len(shown) < 20_000 and "<script" not in shown
        for nbytes in (plan.predicted_peak_bytes, plan.baseline_peak_bytes, plan.budget_bytes):
            assert format_bytes(nbytes) in shown
        lines = re.findall(r'points="([^"]*)"', shown)
        highest = [min(float(point.split(",")[1]) for point in line.split()) for line in lines]
        most = 1.05 * plan.baseline_peak_bytes
        expected = [120 * (1 - peak / most) for peak in (plan.baseline_peak_bytes, plan.predicted_peak_bytes)]
        assert highest == pytest.approx(expected, abs=0.06)

    def test_names_are_escaped(self, plan: Plan) -> None:
        hostile = dataclasses.replace(plan, graph=with_names(plan.graph, HOSTILE), solver=HOSTILE)
        shown = hostile._repr_html_()
        assert "<img" not in shown and "<script" not in shown and "&lt;script" in shown
