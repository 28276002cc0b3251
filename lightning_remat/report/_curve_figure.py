"""A figure of what memory costs in time: overhead against budget, one line per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_remat.report._timeline_figure import BEFORE, _new_figure
from lightning_remat.report._units import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*Xd<>ph"


def curve_figure(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    baseline_peak_bytes: int,
    title: str = "",
) -> Figure:
    """Draw what each method's schedules cost at each budget.

    Args:
        curves: by method, pairs of a budget in bytes and the overhead at it (0.1 for 10 %), for the budgets that the method
            has a schedule for.
        baseline_peak_bytes: peak without rematerialization, in bytes, drawn as a vertical line.
        title: written above.

    Returns:
        A figure with an Agg canvas of its own: ``figure.savefig(path)`` writes it. pyplot and its backend are not touched.

    Raises:
        RematError: when matplotlib is not installed.
    """
    figure = _new_figure()
    axes = figure.subplots()
    unit, size = byte_unit(max(baseline_peak_bytes, 1))
    for index, (method, points) in enumerate(curves.items()):
        ordered = sorted(points)
        budgets, overheads = [b / size for b, _ in ordered], [100 * overhead for _, overhead in ordered]
        dashes = "-" if index < len(_MARKERS) else "--"
        axes.plot(budgets, overheads, dashes, marker=_MARKERS[index % len(_MARKERS)], ms=4, lw=1.2, label=method)
    axes.axvline(baseline_peak_bytes / size, color=BEFORE, lw=1.0, ls=(0, (5, 3)))
    axes.annotate(
        f"no rematerialization: {format_bytes(baseline_peak_bytes)}",
        xy=(baseline_peak_bytes / size, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color=BEFORE,
    )
    axes.set_xlabel(f"budget [{unit}]")
    axes.set_ylabel("overhead [% of the step's time]")
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure
