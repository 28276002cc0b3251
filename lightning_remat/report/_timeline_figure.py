"""A figure of the memory over one training step, without and with rematerialization."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_remat.errors import RematError
from lightning_remat.graph import ComputationGraph, Phase
from lightning_remat.report._subject import Planned
from lightning_remat.report._units import byte_unit, format_bytes, format_seconds
from lightning_remat.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER, BUDGET, RESIDENT, BACKWARD = "#7a7f87", "#1f6fb4", "#c62f2d", "#b4bac2", "#f4efe4"


def plan_figure(plan: Planned, title: str = "") -> Figure:
    """Draw the memory of the step of a plan: of all of its graphs where it runs as several (see `timeline_figure`).

    Args:
        plan: the plan.
        title: written above both panels (by default the graph's name).

    Raises:
        RematError: when matplotlib is not installed.
    """
    title = title or plan.graph.name or "training step"
    if plan.whole is None:
        boundaries = plan.baseline_schedule().boundary, plan.schedule.boundary
        return timeline_figure(
            plan.graph, plan.baseline_timeline(), plan.timeline(), plan.budget_bytes, title, boundaries
        )
    whole = plan.whole
    return timeline_figure(
        plan.graph,
        whole.before.timeline(),
        whole.after.timeline(),
        plan.budget_bytes,
        f"{title}: {whole.graphs:,} graphs",
        whole.boundaries,
        whole.always_bytes,
    )


def timeline_figure(
    graph: ComputationGraph,
    before: Timeline,
    after: Timeline,
    budget_bytes: int | None = None,
    title: str = "",
    boundaries: tuple[int, int] | None = None,
    always_bytes: int | None = None,
) -> Figure:
    """Draw the memory that one training step holds over its time, without and with rematerialization.

    Two panels, one above the other, on the same axes. Each has the memory held, what is resident under every schedule
    (grey), the part of the step after the loss (shaded), the budget (a dashed line), and its peak with the op and the module
    that it occurs in.

    Args:
        graph: the graph of both timelines, or of ``after`` where there are ``boundaries``.
        before: timeline of the step without rematerialization.
        after: timeline of the schedule.
        budget_bytes: the budget to draw, in bytes; ``None`` for none.
        title: written above both panels (by default the graph's name).
        boundaries: ``Schedule.boundary`` of both: the number of steps before the backward. Without it the backward is taken
            to begin when the time of every forward op has passed once, which is too early for a schedule that recomputes in
            the forward.
        always_bytes: what is resident, in bytes; by default the graph's.

    Returns:
        A figure with an Agg canvas of its own: ``figure.savefig(path)`` writes it. pyplot and its backend are not touched.

    Raises:
        RematError: when matplotlib is not installed.
    """
    figure = _new_figure()
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    unit, size = byte_unit(max(before.peak_bytes, after.peak_bytes, budget_bytes or 0, 1))
    timed = before.seconds > 0 and after.seconds > 0
    forward_seconds = sum(op.seconds for op in graph.ops if op.phase is not Phase.BACKWARD)
    for axes, timeline, which in ((upper, before, 0), (lower, after, 1)):
        curve = _curve(timeline, timed)
        steps = boundaries[which] if boundaries is not None else _steps_until(timeline, forward_seconds)
        loss_at = curve.starts[steps] if steps < len(curve.starts) else curve.end
        axes.axvspan(loss_at, curve.end, color=BACKWARD, lw=0, zorder=0)
        axes.fill_between(curve.x, curve.y / size, color=(BEFORE, AFTER)[which], alpha=0.25, lw=0)
        axes.plot(curve.x, curve.y / size, color=(BEFORE, AFTER)[which], lw=1.1)
        resident = graph.input_bytes + graph.resident_bytes if always_bytes is None else always_bytes
        axes.fill_between([0, curve.end], resident / size, color=RESIDENT, lw=0, zorder=1.5)
        if resident > 0.08 * max(before.peak_bytes, after.peak_bytes):  # else there is no room for the words
            axes.annotate(
                f"parameters, batch and all that is always held: {format_bytes(resident)}",
                xy=(0, resident / size / 2),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color="#3d434b",
            )
        if budget_bytes is not None:
            axes.axhline(budget_bytes / size, color=BUDGET, lw=1.2, ls=(0, (5, 3)))
        _annotate_peak(axes, timeline, curve, size, (BEFORE, AFTER)[which])
        axes.set_title(_headline(which, timeline, before, timed), loc="left", fontsize=10, color=(BEFORE, AFTER)[which])
        axes.set_ylabel(f"memory held [{unit}]")
        axes.spines[["top", "right"]].set_visible(False)
        _name_phases(axes, loss_at, curve.end)
    highest = max(before.peak_bytes, after.peak_bytes, budget_bytes or 0) / size
    upper.set_ylim(0, 1.35 * highest)
    upper.set_xlim(0, None)
    if budget_bytes is not None:
        upper.annotate(
            f"budget {format_bytes(budget_bytes)}",
            xy=(1, budget_bytes / size),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=BUDGET,
        )
    if timed:
        lower.xaxis.set_major_formatter(lambda value, _: format_seconds(value) if value >= 0 else "")
        lower.set_xlabel("time into the training step, as predicted")
    else:
        lower.set_xlabel("steps of the schedule (no times are known)")
    if title or graph.name:
        figure.suptitle(title or graph.name, x=0.01, ha="left", fontsize=12)
    return figure


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A timeline as a line: ``x`` in seconds (or steps), ``y`` in bytes, two points a step.

    ``starts`` is where each step begins, and ``end`` where the last one ends.
    """

    x: npt.NDArray[np.float64]
    y: npt.NDArray[np.float64]
    starts: npt.NDArray[np.float64]
    end: float


def _curve(timeline: Timeline, timed: bool) -> _Curve:
    count = len(timeline.during)
    if not count:
        level = np.full(2, float(timeline.peak_bytes))
        return _Curve(np.array([0.0, 1.0]), level, np.array([0.0]), 1.0)
    ends = timeline.seconds_after if timed else np.arange(1, count + 1, dtype=np.float64)
    starts = np.concatenate([[0.0], ends[:-1]])
    # Each step is level while it runs, and drops to what is left when it is done.
    x = np.stack([starts, ends, ends], axis=1).ravel()
    y = np.stack([timeline.during, timeline.during, timeline.after], axis=1).ravel().astype(np.float64)
    return _Curve(x, y, starts, float(ends[-1]))


def _steps_until(timeline: Timeline, seconds: float) -> int:
    """Number of steps that are done when ``seconds`` have passed (a little less: the times are sums of floats)."""
    return int(np.searchsorted(timeline.seconds_after, seconds * (1 - 1e-9), side="left")) + 1


def _annotate_peak(axes: Axes, timeline: Timeline, curve: _Curve, size: int, color: str) -> None:
    at = 0.0
    if timeline.peak_step >= 0:
        at = float(curve.x[3 * timeline.peak_step : 3 * timeline.peak_step + 2].mean())
    label = f"peak {format_bytes(timeline.peak_bytes)}"
    if timeline.peak_op:
        label += f": {timeline.peak_op}"
    if timeline.peak_module:
        label += f"\nin {timeline.peak_module}"
    right = at > 0.55 * axes.get_xlim()[1]
    axes.annotate(
        label,
        xy=(at, timeline.peak_bytes / size),
        xytext=(-12 if right else 12, 8),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8,
        color=color,
        arrowprops={"arrowstyle": "-", "color": color, "lw": 0.8},
    )
    axes.plot([at], [timeline.peak_bytes / size], "o", ms=4, color=color)


def _headline(which: int, timeline: Timeline, before: Timeline, timed: bool) -> str:
    if which == 0:
        return "without rematerialization" + (f": {format_seconds(timeline.seconds)}" if timed else "")
    if not timed:
        return "with rematerialization"
    overhead = timeline.seconds / before.seconds - 1
    return f"with rematerialization: {format_seconds(timeline.seconds)} ({100 * overhead:+.1f}%)"


def _name_phases(axes: Axes, loss_at: float, end: float) -> None:
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "fontsize": 8}
    for name, middle in (("forward", loss_at / 2), ("backward", (loss_at + end) / 2)):
        axes.annotate(name, xy=(middle, 0.99), color="#8a8374", **place)


def _new_figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RematError(
            "figures need matplotlib, which is not installed: install it with `pip install 'lightning-remat[pictures]'`"
        ) from error
    figure = Figure(figsize=(9, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
