"""What was found, as one picture: a panel a network, seconds of a step against its peak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.rows import ATEN, CHECKPOINT, EAGER, INDUCTOR, OURS, Row

_MARKS = {
    EAGER: ("*", "#222222", "eager"),
    CHECKPOINT: ("s", "#c77800", "per-block torch.utils.checkpoint"),
    ATEN: ("^", "#7a7f87", "activation_memory_budget, ATen kernels"),
    INDUCTOR: ("v", "#8e5ea2", "activation_memory_budget, Inductor"),
    OURS: ("o", "#1f6fb4", "lightning_remat"),
}


def picture(networks: Sequence[tuple[str, Sequence[Row]]], path: Path) -> bool:
    """Draw one panel a network, seconds against peak memory, and one mark a method; ``False`` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    columns = min(3, len(networks))
    lines = -(-len(networks) // columns)
    figure = Figure(figsize=(5.0 * columns, 3.8 * lines + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    labelled: dict[str, Any] = {}
    for axes, (name, rows) in zip(panels, networks, strict=False):
        for family, (mark, color, label) in _MARKS.items():
            points = [row for row in rows if row.family == family and row.peak_bytes and row.seconds]
            if not points:
                continue
            x, y = [(row.peak_bytes or 0) / 2**20 for row in points], [1e3 * (row.seconds or 0) for row in points]
            (line,) = axes.plot(x, y, mark, color=color, ls=":", lw=0.8, ms=11 if family == EAGER else 6, label=label)
            labelled.setdefault(label, line)
            wrong = [index for index, row in enumerate(points) if row.wrong_gradients]
            if wrong:
                (crosses,) = axes.plot(
                    [x[i] for i in wrong], [y[i] for i in wrong], "x", color="#c62f2d", ms=11, label="wrong gradients"
                )
                labelled.setdefault("wrong gradients", crosses)
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlabel("peak above parameters, buffers and inputs [MiB]", fontsize=8)
        axes.set_ylabel("step [ms]", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(networks) :]:
        axes.set_axis_off()
    figure.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside lower center",
        ncols=min(2, columns) + columns // 3,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
    return True
