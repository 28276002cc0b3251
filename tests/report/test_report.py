"""Sizes and times read well, tables hold what plans say, and pictures show what they should."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lightning_remat.errors import RematError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.report import format_bytes, format_seconds, plan_table, timeline_figure
from lightning_remat.schedule import Schedule, Timeline, simulate
from lightning_remat.solvers import NodeSequence, Problem, Status
from tests.helpers.graphs import random_graph, unit_chain
from tests.helpers.places import ROOT

MIB = 2**20


def transformer(blocks: int = 8) -> ComputationGraph:
    """A step shaped like a small GPT-2's: per block a few large activations, a big loss, gradients at the end."""
    tensors: list[Tensor] = []
    storages: list[int] = []
    ops: list[Op] = []

    def tensor(name: str, nbytes: float, role: TensorRole = TensorRole.INTERMEDIATE) -> int:
        storages.append(int(nbytes))
        tensors.append(Tensor(name, len(storages) - 1, role=role))
        return len(tensors) - 1

    def op(name: str, kind: str, reads: list[int], mib: float, ms: float, phase: Phase, module: str) -> int:
        made = tensor(f"{name}_out", mib * MIB)
        ops.append(Op(name, kind, tuple(reads), (made,), phase, ms / 1e3, int(mib * MIB / 4), module=module))
        return made

    parameters = [tensor(f"w{i}", 3 * MIB, TensorRole.PARAMETER) for i in range(blocks)]
    x = tensor("batch", MIB, TensorRole.BATCH)
    inputs = [*parameters, x]
    saved: list[tuple[int, list[int]]] = []
    for i, weight in enumerate(parameters):
        layers = [("ln_1", 1, 0.3), ("qkv", 3, 4), ("attention", 8, 6), ("projection", 1, 2), ("ln_2", 1, 0.3)]
        kept = [x]
        for name, mib, ms in [*layers, ("fc", 4, 5), ("gelu", 4, 1), ("out", 1, 5)]:
            reads = [kept[-1], weight] if name in ("qkv", "projection", "fc", "out") else [kept[-1]]
            kept.append(op(f"{name}_{i}", name, reads, mib, ms, Phase.FORWARD, f"transformer.h.{i}.{name}"))
        x = kept[-1]
        saved.append((weight, kept))
    logits = op("lm_head", "mm", [x, parameters[0]], 15, 8, Phase.FORWARD, "lm_head")
    loss = op("loss", "cross_entropy", [logits], 0.001, 2, Phase.LOSS, "loss")
    tangent = tensor("tangent", 4, TensorRole.TANGENT)
    gradient = op("loss_backward", "bw", [tangent, logits], 15, 2, Phase.BACKWARD, "loss")
    gradient = op("lm_head_backward", "bw", [gradient, parameters[0]], 1, 16, Phase.BACKWARD, "lm_head")
    gradients = []
    for i, (weight, kept) in reversed(list(enumerate(saved))):
        for j in range(len(kept) - 1, 0, -1):
            size = storages[tensors[kept[j - 1]].storage] / MIB
            module = ops[i * 8 + j - 1].module
            name = f"{ops[i * 8 + j - 1].name}_backward"
            gradient = op(name, "bw", [gradient, kept[j], kept[j - 1]], size, 6, Phase.BACKWARD, module)
        gradients.append(op(f"grad_{i}", "mm", [gradient, weight], 3, 2, Phase.BACKWARD, f"transformer.h.{i}"))
    return ComputationGraph(
        tuple(ops),
        tuple(tensors),
        tuple(storages),
        inputs=(*inputs, tangent),
        forward_outputs=(loss,),
        backward_outputs=tuple(gradients),
        forward_resident_bytes=3 * blocks * MIB,
        name="a small transformer",
    )


def by_blocks(graph: ComputationGraph, problem: Problem) -> Schedule:
    """Keep what crosses the blocks; run each block's forward again before its backward."""
    captured = problem.captured
    nodes = list(captured.nodes[: captured.boundary])
    for node in captured.nodes[captured.boundary :]:
        name = graph.ops[node].name  # no op is a view, so nodes are ops
        if name.startswith("out_") and name.endswith("_backward"):
            block = int(name.split("_")[1])
            nodes.extend(range(block * 8, block * 8 + 8))
        nodes.append(node)
    return problem.expand(NodeSequence(tuple(nodes), captured.boundary))


def both(graph: ComputationGraph) -> tuple[Schedule, Schedule]:
    problem = Problem(graph)
    return problem.expand(problem.captured), by_blocks(graph, problem)


class TestUnits:
    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (37.2 * MIB, "37.2 MiB"),
            (495 * MIB, "495 MiB"),
            (1024 * MIB - 1, "1.00 GiB"),
            (8 * 2**30, "8.00 GiB"),
            (2**60, "1024 PiB"),
            (-3 * MIB, "-3.00 MiB"),
            (float("inf"), "inf B"),
        ],
    )
    def test_bytes(self, nbytes: float, text: str) -> None:
        assert format_bytes(nbytes) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0, "0 s"),
            (3e-9, "3.00 ns"),
            (12e-6, "12.0 µs"),
            (0.372, "372 ms"),
            (0.9996, "1.00 s"),
            (1.5, "1.50 s"),
            (119.4, "119 s"),
            (125, "2 min 5 s"),
            (119.99, "2 min 0 s"),
            (-0.25, "-250 ms"),
            (float("inf"), "inf s"),
        ],
    )
    def test_seconds(self, seconds: float, text: str) -> None:
        assert format_seconds(seconds) == text

    @given(st.integers(0, 2**59))
    def test_bytes_are_right_to_three_digits(self, nbytes: int) -> None:
        number, unit = format_bytes(nbytes).split()
        power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
        assert float(number) < 1024
        assert float(number) * 1024**power == pytest.approx(nbytes, rel=0.0051, abs=0.5)

    @given(st.floats(1e-9, 1e6))
    def test_seconds_are_right_to_three_digits(self, seconds: float) -> None:
        parts = format_seconds(seconds).replace(",", "").split()
        sizes = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
        total = sum(float(number) * sizes[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
        assert total == pytest.approx(seconds, rel=0.0051)


@dataclasses.dataclass(frozen=True)
class FakePlan:
    budget_bytes: int = 600 * MIB
    predicted_peak_bytes: int = 590 * MIB
    predicted_reserved_bytes: int = 0
    host_bytes: int = 0
    baseline_peak_bytes: int = 1000 * MIB
    predicted_seconds: float = 0.5
    overhead: float = 0.0834
    solver: str = "auto:greedy"
    status: object = Status.FEASIBLE
    gap: float = 0.02
    solve_seconds: float = 1.25


def written(table: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestTable:
    def test_what_is_reserved_is_shown_where_there_is_an_allocator(self) -> None:
        assert "reserved" not in written(plan_table([FakePlan()]))
        text = written(plan_table([FakePlan(), FakePlan(predicted_reserved_bytes=612 * MIB)]))
        assert "reserved" in text and "612 MiB" in text

    def test_what_waits_on_the_host_is_shown_where_something_does(self) -> None:
        assert "on the host" not in written(plan_table([FakePlan()]))
        text = written(plan_table([FakePlan(), FakePlan(host_bytes=123 * MIB)]))
        assert "on the host" in text and "123 MiB" in text

    def test_it_holds_what_the_plans_say(self) -> None:
        text = written(plan_table({"GPT-2": FakePlan(), "ResNet": FakePlan(status="optimal")}, title="Plans"))
        for part in ("Plans", "GPT-2", "ResNet", "600 MiB", "590 MiB (59%)", "500 ms", "+8.3%", "auto:greedy", "2.0%"):
            assert part in text
        assert "feasible" in text
        assert "optimal" in text
        assert "1.25 s" in text

    def test_plans_without_labels_and_without_a_bound(self) -> None:
        text = written(plan_table(iter([FakePlan(gap=float("inf"), baseline_peak_bytes=0)])))
        assert "590 MiB (-)" in text
        assert "GPT-2" not in text

    def test_no_plans(self) -> None:
        assert "budget" in written(plan_table([]))


class TestFigure:
    def test_it_shows_both_timelines_the_budget_and_the_peaks(self, tmp_path: Path) -> None:
        graph = transformer()
        schedules = both(graph)
        before, after = (simulate(graph, schedule) for schedule in schedules)
        assert after.peak_bytes < before.peak_bytes
        boundaries = (schedules[0].boundary, schedules[1].boundary)
        figure = timeline_figure(graph, before, after, after.peak_bytes, "A transformer", boundaries)
        upper, lower = figure.axes
        for axes, timeline in ((upper, before), (lower, after)):
            y = axes.lines[0].get_ydata()
            assert np.max(y) * MIB == pytest.approx(timeline.peak_bytes)
            assert np.max(axes.lines[0].get_xdata()) == pytest.approx(timeline.seconds)
            words = " ".join(text.get_text() for text in axes.texts)
            assert f"peak {format_bytes(timeline.peak_bytes)}: {timeline.peak_op}" in words
            assert timeline.peak_module in words
            assert "forward" in words
            assert "backward" in words
        assert f"budget {format_bytes(after.peak_bytes)}" in " ".join(text.get_text() for text in upper.texts)
        path = tmp_path / "timeline.png"
        figure.savefig(path)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_the_backward_begins_at_the_boundary(self) -> None:
        graph = transformer(2)
        schedules = both(graph)
        before, after = (simulate(graph, schedule) for schedule in schedules)
        forward = sum(op.seconds for op in graph.ops if op.phase is not Phase.BACKWARD)
        for boundaries in (None, (schedules[0].boundary, schedules[1].boundary)):
            figure = timeline_figure(graph, before, after, boundaries=boundaries)
            for axes in figure.axes:
                shaded = axes.patches[0]
                assert shaded.get_x() == pytest.approx(forward)
        assert figure.axes[1].patches[0].get_width() == pytest.approx(after.seconds - forward)

    @pytest.mark.parametrize("seed", range(5))
    def test_any_graph_can_be_drawn(self, seed: int) -> None:
        graph = random_graph(seed)
        problem = Problem(graph)
        timeline = simulate(graph, problem.expand(problem.captured))
        figure = timeline_figure(graph, timeline, timeline, 10)
        figure.canvas.draw()

    def test_steps_without_times_and_graphs_without_steps(self) -> None:
        graph = unit_chain(3).with_costs([0.0] * 7)
        timeline = simulate(graph, Problem(graph).expand(Problem(graph).captured))
        figure = timeline_figure(graph, timeline, timeline)
        assert "no times are known" in figure.axes[1].get_xlabel()
        empty = ComputationGraph((), (), ())
        nothing: Timeline = simulate(empty, Schedule((), 0))
        timeline_figure(empty, nothing, nothing, 1).canvas.draw()

    def test_pyplot_stays_out_of_it(self) -> None:
        script = (
            "import sys; from tests.helpers.graphs import unit_chain; from lightning_remat.schedule import simulate; "
            "from lightning_remat.solvers import Problem; from lightning_remat.report import timeline_figure; "
            "assert not {'matplotlib', 'bokeh'} & set(sys.modules); g = unit_chain(2); "
            "t = simulate(g, Problem(g).expand(Problem(g).captured)); timeline_figure(g, t, t); "
            "assert 'matplotlib.pyplot' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr

    def test_without_matplotlib_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        graph = unit_chain(1)
        timeline = simulate(graph, Problem(graph).expand(Problem(graph).captured))
        with pytest.raises(RematError, match=r"pip install 'lightning-remat\[pictures\]'"):
            timeline_figure(graph, timeline, timeline)
