"""POET (Patil et al. 2022) and OffMate (Zhao et al. 2024): recomputing and copying to slower memory together.

    python -m benchmarks.papers.offload            # all of it: some minutes
    python -m benchmarks.papers.offload --quick    # one chain and one transformer: seconds

Both papers plan a step in which an activation is kept, computed again, or copied to slower memory and back ("paging" in POET,
"offloading" in OffMate), by one integer program or by one for each block of layers. POET minimizes energy on small devices,
OffMate time on one GPU. Their claim is that both ways together are better than either alone. Their programs and machines are
not redone here; what is looked at is the claim's shape, by this project's solver and in its memory model: the overhead of a
step within a quarter and a sixth of its activations with recomputing alone, with copies alone, and with both.

Chain: 24 equal layers, whose backward takes twice the time of the forward and reads a layer's input and output. A copy in
either direction takes so many times as long as a layer's forward.
Transformer: blocks of attention (its scores are not kept) and a feed-forward of four times the width, in bfloat16. Ops take as
long as their FLOPs do at 400 TFLOP/s, or their bytes at 2 TB/s: an H100, about. Copies have 25 or 50 GB/s in each direction,
which is assumed. The wider the blocks, the more FLOPs there are for each byte of an activation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from benchmarks.common.commands import script
from benchmarks.common.pictures import draw, entitle
from benchmarks.common.tables import numbers_table
from lightning_remat.graph import ComputationGraph, Host, Op, Phase, Tensor
from lightning_remat.solvers import Problem, solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = {"1/4": 1 / 4, "1/6": 1 / 6}
"""Of what the activations take; beside them what is held all through the step is nothing here."""

WAYS = {"recompute": "recomputing alone", "copy": "copies alone", "both": "both"}

PLENTY = 10**15
"""Bytes on the host."""

FLOPS, BANDWIDTH = 400e12, 2e12
"""What the transformer's ops do in a second: FLOPs, or bytes read and written."""


class Builder:
    """A graph of ops with one result each, which has memory of its own."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.sizes: list[int] = []

    def op(self, name: str, reads: Sequence[int], nbytes: int, seconds: float, phase: Phase = Phase.FORWARD) -> int:
        made = len(self.ops)
        self.ops.append(Op(f"{name}_{made}", name, tuple(reads), (made,), phase, seconds=seconds))
        self.sizes.append(nbytes)
        return made

    def graph(self, name: str, host: Host, loss: int) -> ComputationGraph:
        tensors = tuple(Tensor(op.name, index) for index, op in enumerate(self.ops))
        sizes = tuple(self.sizes)
        last = len(self.ops) - 1
        return ComputationGraph(
            tuple(self.ops), tensors, sizes, forward_outputs=(loss,), backward_outputs=(last,), name=name, host=host
        )


def chain(layers: int, slowness: float) -> ComputationGraph:
    """Equal layers of a second each; a copy takes ``slowness`` seconds."""
    built, nbytes = Builder(), 1000
    values = [built.op("input", (), nbytes, 0.0)]
    for _ in range(layers):
        values.append(built.op("layer", values[-1:], nbytes, 1.0))
    loss = gradient = built.op("loss", values[-1:], 1, 0.0)
    for layer in range(layers, 0, -1):
        gradient = built.op("backward", (gradient, values[layer], values[layer - 1]), nbytes, 2.0, Phase.BACKWARD)
    speed = nbytes / slowness
    return built.graph(f"chain, copy {slowness:g} x layer", Host(PLENTY, speed, speed), loss)


def transformer(blocks: int, width: int, length: int, batch: int, speed: float) -> ComputationGraph:
    """Blocks of attention and a feed-forward; ``speed`` is that of the copies, in bytes a second."""
    built, tokens = Builder(), batch * length
    unit = 2 * tokens * width

    def op(name: str, reads: Sequence[int], units: float, squares: float, phase: Phase = Phase.FORWARD) -> int:
        """An op whose result has so many units, with so many FLOPs for each token and pair of the width."""
        size = int(units * unit)
        moved = size + sum(built.sizes[t] for t in reads)
        return built.op(name, reads, size, max(squares * tokens * width**2 / FLOPS, moved / BANDWIDTH), phase)

    attention = 4 * length / width
    x = built.op("embedding", (), unit, unit / BANDWIDTH)
    kept = []
    for _ in range(blocks):
        a = op("norm", (x,), 1, 0)
        q = op("qkv", (a,), 3, 6)
        o = op("attention", (q,), 1, attention)
        y = op("add", (x, op("project", (o,), 1, 2)), 1, 0)
        b = op("norm", (y,), 1, 0)
        h = op("up", (b,), 4, 8)
        g = op("gelu", (h,), 4, 0)
        kept.append((x, a, q, o, y, b, h, g))
        x = op("add", (y, op("down", (g,), 1, 8)), 1, 0)
    loss = built.op("loss", (x,), 1, 0.0)
    d = op("loss_backward", (loss, x), 1, 0, Phase.BACKWARD)
    for x, a, q, o, y, b, h, g in reversed(kept):
        dg = op("down_backward", (d, g), 4, 16, Phase.BACKWARD)
        dh = op("gelu_backward", (dg, h), 4, 0, Phase.BACKWARD)
        db = op("up_backward", (dh, b), 1, 16, Phase.BACKWARD)
        dy = op("norm_backward", (db, y, d), 1, 0, Phase.BACKWARD)
        do = op("project_backward", (dy, o), 1, 4, Phase.BACKWARD)
        dq = op("attention_backward", (do, q, o), 3, 2.5 * attention, Phase.BACKWARD)
        da = op("qkv_backward", (dq, a), 1, 12, Phase.BACKWARD)
        d = op("norm_backward", (da, x, dy), 1, 0, Phase.BACKWARD)
    name = f"{blocks} blocks, width {width}, {speed / 1e9:g} GB/s"
    return built.graph(name, Host(PLENTY, speed, speed, 20e-6), loss)


def study(graph: ComputationGraph, limit: float = 10.0) -> dict[str, Any]:
    """Overheads by share and way; ``None`` where nothing fits."""
    problem = Problem(graph)
    plain = problem.evaluate(problem.captured)
    forward = [dataclasses.replace(op, recomputable=op.phase is Phase.BACKWARD) for op in graph.ops]
    once = graph.replace(ops=tuple(forward))
    found: dict[str, dict[str, float | None]] = {}
    for label, share in SHARES.items():
        budget = int(share * plain.peak_bytes)
        recompute = solve(graph, budget, time_limit=limit)
        ways = {
            "recompute": recompute,
            "copy": solve(once, budget, time_limit=limit, offload="host"),
            "both": solve(graph, budget, time_limit=limit, offload="host", known=recompute),
        }
        found[label] = {
            way: one.seconds / plain.seconds - 1 if one.schedule is not None else None for way, one in ways.items()
        }
        found[label]["bound"] = ways["both"].lower_bound_seconds / plain.seconds - 1
    return {"name": graph.name, "ops": len(graph.ops), "overheads": found}


SLOWNESS = (0.5, 1.0, 2.0, 4.0)

WIDTHS = ((1024, 1024, 16), (2048, 2048, 4), (4096, 2048, 4))
"""Widths of the blocks, with tokens of a sequence and sequences of a batch."""


def run(quick: bool, console: Console) -> dict[str, Any]:
    """All graphs; returns what goes into the file."""
    chains = [chain(24, slowness) for slowness in (SLOWNESS[:1] if quick else SLOWNESS)]
    speeds = (25e9,) if quick else (25e9, 50e9)
    sizes = WIDTHS[:1] if quick else WIDTHS
    blocks = 6 if quick else 12
    transformers = [transformer(blocks, *size, speed) for size in sizes for speed in speeds]
    limit = 4.0 if quick else 6.0
    return {
        "chains": [study(one, limit) for one in track(chains, "chains", console=console)],
        "transformers": [study(one, limit) for one in track(transformers, "transformers", console=console)],
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(title: str, studies: Sequence[Mapping[str, Any]]) -> Table:
    """Overheads, in percent."""
    columns = ("network", *(f"{share}: {way}" for share in SHARES for way in (*WAYS, "bound")))
    rows = [
        (one["name"], *(_percent(one["overheads"][share][way]) for share in SHARES for way in (*WAYS, "bound")))
        for one in studies
    ]
    return numbers_table(f"{title}: overhead in percent, by share of the activations", columns, rows)


def present(data: Mapping[str, Any]) -> list[RenderableType]:
    """What is printed."""
    return [table("chains of 24 layers", data["chains"]), table("transformers", data["transformers"])]


COLORS = {"recompute": "#c77800", "copy": "#777777", "both": "#1f6fb4"}


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """A panel for each share; ``False`` without matplotlib."""
    return draw(path, (14, 5), lambda figure: _paint(figure, data))


def _paint(figure: Figure, data: Mapping[str, Any]) -> None:
    studies = [*data["chains"], *data["transformers"]]
    panels = figure.subplots(1, len(SHARES), sharey=True)
    for axes, share in zip(panels, SHARES, strict=True):
        for index, (way, label) in enumerate(WAYS.items()):
            heights = [100 * (one["overheads"][share][way] or 0.0) for one in studies]
            places = [place + 0.27 * (index - 1) for place in range(len(studies))]
            axes.bar(places, heights, 0.25, color=COLORS[way], label=label)
        entitle(axes, f"{share} of the activations: overhead [%], up to 100")
        axes.set_xticks(
            range(len(studies)),
            [one["name"].replace(", ", "\n").replace("copy ", "copy\n") for one in studies],
            fontsize=7,
        )
        axes.set_ylim(0, 100)
    panels[0].legend(fontsize=8, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the graphs, print the tables, write the file and the picture."""
    packages = ("lightning_remat", "mip", "numpy")
    return script("offload", __doc__, "one chain and one transformer", run, present, picture, packages, arguments)


if __name__ == "__main__":
    sys.exit(main())
