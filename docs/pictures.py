"""Draws the pictures of ideas in `docs/pictures`: schedules as their methods find them, on a chain of 12 equal layers.

    python docs/pictures.py

A column is a moment, a row a layer's output: where it is computed, computed again, held, or waits on the host; below, the bytes
held. ``timeline.svg`` is of a GPT-2 that was recorded on an H100 (`tests/data/h100`), ``budget.svg`` is what a budget counts.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from html import escape
from pathlib import Path

from lightning_remat.graph import ComputationGraph, Host, Op, Phase, Tensor
from lightning_remat.schedule import Compute, Copy, Free, Schedule, simulate
from lightning_remat.solvers import Problem, find_smallest, solve

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "pictures"
LAYERS = 12
CELL, LEFT, TOP, MEMORY = 15, 118, 30, 46
HELD, FIRST, AGAIN, BACKWARD, WAITS = "#cfe1f5", "#1f5fa8", "#e07b00", "#6b7480", "#cdebd3"
STYLE = "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2328}.s{font-size:11px;fill:#57606a}"

SCHEDULES = {
    "no_remat": ("no_remat", 99, "Every layer once: all outputs wait for the backward"),
    "auto": ("auto", 8, "auto, 8 outputs at most: what is dropped is computed again, once"),
    "chen": ("chen_sqrt", 8, "chen_sqrt: what crosses the ends of segments is kept, the rest computed again"),
    "griewank": ("griewank_logn", 6, "griewank_logn, 6 outputs at most: snapshots by binomial splits"),
    "checkmate": ("milp", 7, "milp, 7 outputs at most: an optimum of the integer program"),
    "kumar": ("treewidth", 7, "treewidth, 7 outputs at most: separators first, then the parts between"),
    "kusumoto": ("approx_dp", 8, "approx_dp, 8 outputs at most: segments of the best sizes"),
    "moccasin": ("moccasin", 7, "moccasin, 7 outputs at most: few intervals for each output"),
    "rockmate": ("rotor", 7, "rotor, 7 outputs at most: the best chain of blocks with options"),
    "hiremate": ("hiremate", 7, "hiremate, 7 outputs at most: blocks of blocks"),
}
"""Pictures of one schedule: method, budget in outputs, and title."""


def chain(layers: int = LAYERS, host: Host | None = None) -> ComputationGraph:
    """f1 to fn, the loss, and bn to b1: each a second, each output a byte. A backward reads its layer's input and output."""
    names = [*(f"f{i}" for i in range(1, layers + 1)), "loss", *(f"b{i}" for i in range(layers, 0, -1))]
    ops = []
    for index, name in enumerate(names):
        reads = {index - 1} if index else set()
        if name.startswith("b"):
            reads |= {layer - 1 for layer in (int(name[1:]), int(name[1:]) - 1) if layer}
        phase = Phase.BACKWARD if name.startswith("b") else Phase.LOSS if name == "loss" else Phase.FORWARD
        ops.append(Op(name, name, tuple(sorted(reads)), (index,), phase, seconds=1.0))
    tensors = tuple(Tensor(name, index) for index, name in enumerate(names))
    sizes = (1,) * len(names)
    return ComputationGraph(tuple(ops), tensors, sizes, backward_outputs=(len(names) - 1,), host=host)


def picture(graph: ComputationGraph, schedule: Schedule, title: str) -> str:
    """A schedule of `chain` as SVG."""
    columns = list(_columns(schedule))
    timeline = simulate(graph, schedule)
    rows = sum(op.phase is Phase.FORWARD for op in graph.ops)
    width, depth = LEFT + CELL * len(columns) + 12, TOP + CELL * (rows + 2)
    drawn = [_text(4, 16, title)]
    drawn += [_text(LEFT - 8, TOP + CELL * row + 11, f"layer {row + 1}", "end") for row in range(rows)]
    drawn.append(_text(LEFT - 8, TOP + CELL * (rows + 1) - 2, "loss, backward", "end"))
    drawn.append(_text(LEFT - 8, depth + MEMORY - 2, "outputs held", "end"))
    seen: set[int] = set()
    for column, (index, op, held, waits) in enumerate(columns):
        x = LEFT + CELL * column
        drawn += [_cell(x, TOP + CELL * tensor, WAITS) for tensor in sorted(waits) if tensor < rows]
        drawn += [_cell(x, TOP + CELL * tensor, HELD) for tensor in sorted(held) if tensor < rows]
        colour = AGAIN if op in seen else FIRST
        drawn.append(_cell(x, TOP + CELL * min(op, rows), colour if op < rows else BACKWARD))
        seen.add(op)
        height = int(timeline.during[index]) * (MEMORY - 12) / (rows + 2)
        shape = f'x="{x}" y="{depth + MEMORY - height:.1f}" width="{CELL - 2}" height="{height:.1f}"'
        drawn.append(f'<rect {shape} fill="#8fb4dc"/>')
    at = LEFT - 1 + CELL * sum(index < schedule.boundary for index, *_ in columns)
    drawn.append(f'<path d="M{at} {TOP - 6}V{depth + MEMORY}" stroke="#57606a" stroke-dasharray="3 3"/>')
    again = len(columns) - len(graph.ops)
    says = f"peak {timeline.peak_bytes} outputs, {again} computed again"
    says += f"; {timeline.host_bytes} wait on the host" if timeline.host_bytes else ""
    legend = [(FIRST, "computed"), (HELD, "held"), (BACKWARD, "loss, backward")]
    legend += [(AGAIN, "computed again")] * bool(again) + [(WAITS, "on the host")] * bool(timeline.host_bytes)
    bottom, x = depth + MEMORY + 12, LEFT
    for colour, words in legend:
        drawn += [_cell(x, bottom, colour), _text(x + CELL + 2, bottom + 11, words)]
        x += CELL + 20 + 7 * len(words)
    drawn.append(_text(LEFT, bottom + 34, says, kind="s"))
    return _svg(max(width, x), bottom + 44, drawn)


def _columns(schedule: Schedule) -> Iterator[tuple[int, int, set[int], set[int]]]:
    """Each evaluation: its step, its op, the tensors held, and those that wait on the host."""
    held: set[int] = set()
    waits: set[int] = set()
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            held.add(step.op)  # an op of the chain has the number of its output
            yield index, step.op, set(held), waits - held
        elif isinstance(step, Free):
            held.discard(step.tensor)
        elif isinstance(step, Copy):
            (held if step.to_device else waits).add(step.tensor)


def _cell(x: float, y: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def _svg(width: float, height: float, drawn: list[str]) -> str:
    paper = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join((f"<style>{STYLE}</style>", paper, *drawn))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def timeline_picture() -> str:
    """Bytes held over the step of a GPT-2 recorded on an H100: as it is, and at 60 % of what can be saved."""
    with lzma.open(ROOT / "tests" / "data" / "h100" / "gpt2.json.xz", "rt", encoding="utf-8") as file:
        graph = ComputationGraph.from_dict(json.load(file))
    problem = Problem(graph)
    plain = problem.expand(problem.captured)
    before = simulate(graph, plain)
    budget = graph.floor_bytes + (before.peak_bytes - graph.floor_bytes) * 6 // 10
    schedule = solve(graph, budget).schedule
    assert schedule is not None
    width, height, top = 700, 230, 44
    longest = max(before.seconds, simulate(graph, schedule).seconds)

    def y(nbytes: float) -> float:
        return round(top + height * (1 - nbytes / before.peak_bytes), 1)

    drawn = [_text(70, 18, "Bytes held over one training step: GPT-2, times and sizes recorded on an H100")]
    for steps, colour, words, x in ((plain, "#8a94a0", "as it is", 70), (schedule, FIRST, "at 60 %", 150)):
        timeline = simulate(graph, steps)
        line = "".join(
            f"L{70 + width * timeline.seconds_after[index] / longest:.1f} {y(float(timeline.during[index]))}"
            for index, step in enumerate(steps.steps)
            if isinstance(step, Compute) and not graph.is_view[step.op]
        )
        drawn.append(f'<path d="M70 {y(graph.floor_bytes)}{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        drawn += [f'<rect x="{x}" y="27" width="18" height="4" fill="{colour}"/>', _text(x + 24, 34, words)]
    drawn.append(f'<path d="M70 {y(budget)}h{width}" stroke="#c62828" stroke-dasharray="5 4"/>')
    drawn.append(_text(70 + width, y(budget) - 5, "budget", "end"))
    for gib in range(0, int(before.peak_bytes / 2**30) + 1, 5):
        drawn.append(_text(62, y(gib * 2**30) + 4, f"{gib} GiB", "end"))
    drawn.append(_text(70 + width, top + height + 18, "time", "end"))
    return _svg(width + 90, height + top + 28, drawn)


def budget_picture() -> str:
    """What lies below the floor, and what a share is of."""
    drawn = [_text(10, 20, "What a budget counts")]
    x = 10
    for words, width, colour in (
        ("parameters, buffers, batch", 170, "#6b7480"),
        ("gradients", 75, "#87909b"),
        ("optimizer state", 105, "#a5adb6"),
        ("activations, workspaces", 330, HELD),
    ):
        drawn.append(f'<rect x="{x}" y="34" width="{width}" height="40" fill="{colour}"/>')
        dark = "" if colour == HELD else ' style="fill:#fff"'
        drawn.append(_text(x + width / 2, 58, words, "middle").replace("<text", f"<text{dark}"))
        x += width
    for at, words, anchor in (
        (360, "floor: 0 %", "middle"),
        (525, "50 %", "middle"),
        (690, "baseline peak: 100 %", "end"),
    ):
        drawn += [f'<path d="M{at} 28V84" stroke="#c62828"/>', _text(at, 99, words, anchor)]
    return _svg(702, 110, drawn)


def pictures() -> Iterator[tuple[str, str]]:
    """Names and SVG of all of them."""
    graph = chain()
    for name, (method, outputs, title) in SCHEDULES.items():
        solution = solve(graph, outputs, method, time_limit=10.0)
        assert solution.schedule is not None, (name, solution.notes)
        yield name, picture(graph, solution.schedule, title)
    short = chain(8)
    smallest = find_smallest(short).schedule
    assert smallest is not None
    yield (
        "smallest",
        picture(short, smallest, "The smallest peak: what one layer's backward reads and writes, and little more"),
    )
    fast = chain(host=Host(99, 0.5, 0.5))
    copied = solve(fast, 7, offload="host", time_limit=10.0).schedule
    assert copied is not None
    yield "host", picture(fast, copied, "7 outputs at most, a copy takes twice as long as a layer")
    yield "timeline", timeline_picture()
    yield "budget", budget_picture()


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name, svg in pictures():
        (OUT / f"{name}.svg").write_text(svg, encoding="utf-8")
