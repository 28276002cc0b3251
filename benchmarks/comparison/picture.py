"""What was found, as one picture: a panel a network, the time of a step over eager's against its peak.

This project's rows are a curve: those that no other of them beats in peak and time are joined, the others are pale beside it.
Peers are single marks. A mark is hollow where loss, gradients or buffers have other bits than eager's, and crossed out where
the gradients are wrong.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.pictures import GREY, draw, entitle
from benchmarks.comparison.rows import ATEN, CHECKPOINT, EAGER, INDUCTOR, OURS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS, WIDTH, HEIGHT, DOTS = 2, 4.25, 2.55, 180
"""Panels beside each other, inches of one, and dots an inch: two fill a page of 850 pixels, with letters of some ten pixels."""

COLORS_KEPT = 256

MARKS = {EAGER: "*", OURS: "o", CHECKPOINT: "s", ATEN: "^", INDUCTOR: "v"}
COLORS = {EAGER: "#222222", OURS: "#1f6fb4", CHECKPOINT: "#c77800", ATEN: "#5b636d", INDUCTOR: "#8e5ea2"}
SIZES = {EAGER: 13.0, OURS: 6.0, CHECKPOINT: 7.5, ATEN: 8.5, INDUCTOR: 8.5}
PALE, WRONG = "#a9cbe6", "#c62f2d"

LEGEND = {
    EAGER: "eager",
    OURS: "lightning_remat, at several budgets",
    CHECKPOINT: "torch.utils.checkpoint on each block",
    ATEN: "PyTorch's activation_memory_budget, its value beside it",
    INDUCTOR: "the same under Inductor",
}
PALE_SAID, HOLLOW_SAID, WRONG_SAID = (
    "the same, neither smaller nor faster than the curve",
    "hollow: not eager's bits",
    "wrong gradients",
)

SIDES, ENOUGH = ((12, 7), (12, -7), (-12, 7), (-12, -7)), 11.0
"""Where a value may stand beside its mark, in points, and how far from the next one is far enough."""

LINE = 70
"""Letters in a line of small print."""


def picture(networks: Sequence[tuple[str, Sequence[Row]]], path: Path, note: str = "") -> bool:
    """Draw networks, each a description and its rows; ``False`` without matplotlib.

    Args:
        networks: a panel each.
        path: of the file.
        note: below the panels, in small print.
    """
    columns = min(COLUMNS, len(networks))
    lines = -(-len(networks) // columns)
    inches = (WIDTH * COLUMNS, HEIGHT * max(lines, 1.3) + 0.9)
    return draw(path, inches, lambda figure: _paint(figure, networks, lines, columns, note), DOTS, COLORS_KEPT)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Of the rows those that no other beats in both peak and time, smallest peak first."""
    found: list[Row] = []
    for row in sorted(_measured(rows), key=lambda row: (row.peak_bytes or 0, row.seconds or 0.0)):
        if not found or (row.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(row)
    return found


def titles(descriptions: Sequence[str]) -> list[tuple[str, str]]:
    """A short title for each network, and the rest of its description; namesakes have in the title what tells them apart."""
    split = []
    for description in descriptions:
        name, _, details = description.partition(": ")
        name, _, remark = name.partition(" (")
        split.append((name, [part for part in (*remark.rstrip(")").split(", "), *details.split(", ")) if part]))
    found = []
    for name, parts in split:
        namesakes = [others for other, others in split if other == name]
        own = [part for part in parts if not all(part in others for others in namesakes)]
        found.append((", ".join([name, *own]), ", ".join(part for part in parts if part not in own)))
    return found


def _measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.peak_bytes and row.seconds]


def _paint(figure: Figure, networks: Sequence[tuple[str, Sequence[Row]]], lines: int, columns: int, note: str) -> None:
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    named = titles([description for description, _ in networks])
    for axes, (title, details), (_, rows) in zip(panels, named, networks, strict=False):
        entitle(axes, title, "peak [MiB]", "time, over eager's", "\n".join(textwrap.wrap(details, LINE)))
        _paint_network(axes, rows)
    for axes in panels[len(networks) :]:
        axes.set_axis_off()
    handles, said = zip(*_legend(), strict=True)
    figure.legend(handles, said, loc="outside upper center", ncols=COLUMNS, fontsize=8, frameon=False)
    if note:
        figure.supxlabel(note, fontsize=7.5, color=GREY)


def _paint_network(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axhline(1.0, color="#bbbbbb", lw=0.8, zorder=0)
    axes.margins(x=0.1, y=0.12)
    eager = next((row.seconds for row in rows if row.family == EAGER and row.seconds), None)
    if eager:
        joined = frontier([row for row in rows if row.family == OURS])
        axes.plot(*_places(joined, eager), "-", color=COLORS[OURS], lw=1.2, zorder=1)
        for row in _measured(rows):
            _paint_row(axes, row, eager, pale=row.family == OURS and row not in joined)
    axes.set_xlim(left=0)
    if eager:
        _write_values(axes, _measured(rows), eager)
    died = "\n".join(f"{_in_short(row)} raises an error" for row in rows if row.status == "dies")
    axes.annotate(died, (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=7, color=GREY)


def _places(rows: Sequence[Row], eager: float) -> tuple[list[float], list[float]]:
    """Peaks in MiB, and times over eager's."""
    return [(row.peak_bytes or 0) / 2**20 for row in rows], [(row.seconds or 0.0) / eager for row in rows]


def _paint_row(axes: Axes, row: Row, eager: float, pale: bool) -> None:
    (x,), (y,) = _places([row], eager)
    color = PALE if pale else COLORS[row.family]
    order = 2 if pale else 3
    face = "white" if row.bitwise is False else color
    axes.plot(x, y, MARKS[row.family], color=color, mfc=face, ms=SIZES[row.family], zorder=order)
    if row.wrong_gradients:
        axes.plot(x, y, "x", color=WRONG, ms=12, mew=1.2, zorder=4)


def _write_values(axes: Axes, rows: Sequence[Row], eager: float) -> None:
    """Beside each row of PyTorch's budget its value, on the first side where no mark and no other value is near."""
    places = list(zip(*_places(rows, eager), strict=True))
    marks = [axes.transData.transform(place) * 72 / axes.figure.dpi for place in places]
    taken = list(marks)
    for row, place, mark in zip(rows, places, marks, strict=True):
        if row.family not in (ATEN, INDUCTOR):
            continue
        room = {side: min(ENOUGH, *(math.dist(mark + side, other) for other in taken)) for side in SIDES}
        side = max(SIDES, key=room.__getitem__)
        taken.append(mark + side)
        style: dict[str, Any] = {"fontsize": 7, "color": COLORS[row.family], "ha": "center", "va": "center"}
        axes.annotate(_value(row), place, side, textcoords="offset points", **style)


def _value(row: Row) -> str:
    """Of a row of PyTorch's budget."""
    found = re.search(r"[\d.]+", row.method)
    return found[0] if found else ""


def _in_short(row: Row) -> str:
    """A row's method, where little room is left."""
    return {ATEN: f"budget {_value(row)}", INDUCTOR: f"budget {_value(row)} under Inductor"}.get(row.family, row.method)


def _legend() -> Iterator[tuple[Any, str]]:
    """Marks and words."""
    from matplotlib.lines import Line2D

    for family, said in LEGEND.items():
        line = "-" if family == OURS else ""
        yield Line2D([], [], color=COLORS[family], marker=MARKS[family], ls=line, ms=SIZES[family], lw=1.2), said
        if family == OURS:
            yield Line2D([], [], color=PALE, marker=MARKS[OURS], ls="", ms=SIZES[OURS]), PALE_SAID
    yield Line2D([], [], color=GREY, marker="s", mfc="white", ls="", ms=7), HOLLOW_SAID
    yield Line2D([], [], color=WRONG, marker="x", ls="", ms=12, mew=1.2), WRONG_SAID
