"""Bokeh's drawings of a page: memory over a step, its layers, and the trade-off; they answer when they are pointed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_remat.errors import RematError
from lightning_remat.report._analysis import Analysis, Step
from lightning_remat.report._course import Course
from lightning_remat.report._html import text
from lightning_remat.report._units import byte_unit, format_bytes, time_unit

BEFORE, AFTER, BUDGET, BACKWARD = "#6b7280", "#0072b2", "#d55e00", "#f6f0e2"

LAYERS = ("#c9ced6", "#8d99ae", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#9a8c78", "#3f4650")
"""Colours that colour-blind people can tell apart (Okabe and Ito), after two greys for what is no module's."""


def _bokeh() -> Any:
    try:
        import bokeh.embed
        import bokeh.models
        import bokeh.plotting
        import bokeh.resources
    except ImportError as error:
        raise RematError("a report needs Bokeh: pip install 'lightning_remat[report]'") from error
    return bokeh


def embedded(drawings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Scripts that a page needs for drawings, Bokeh's own first, and the element of each."""
    bokeh = _bokeh()
    resources = bokeh.resources.Resources(mode="inline", components=["bokeh"])
    script, elements = bokeh.embed.components(dict(drawings), wrap_script=False)
    return [*resources.js_raw, script], dict(elements)


class Scale:
    """The units that drawings share: of memory, and of time.

    Args:
        nbytes: the most that is drawn.
        seconds: the end of the longest step, or the number of its ops where no times are known.
        costs: what is counted where that is no time; "" for seconds.
    """

    def __init__(self, nbytes: int, seconds: float, costs: str = "") -> None:
        self.memory, self.byte_size = byte_unit(max(nbytes, 1))
        self.most = nbytes / self.byte_size
        self.time, self.second_size = (costs, 1.0) if costs else time_unit(seconds)


def scale_of(steps: Sequence[Analysis | Step], courses: Sequence[Course], *budgets: int) -> Scale:
    """The units for drawings of courses of these steps or graphs, and of budgets in bytes, side by side."""
    most = max(*(int(course.nbytes.max(initial=0)) for course in courses), *budgets)
    costs = ""
    if any(one.baseline_seconds <= 0 for one in steps):
        costs = "ops"
    elif any(one.counted for one in steps):
        costs = "cost"
    return Scale(most, max(course.end for course in courses), costs)


def timeline(course: Course, scale: Scale, colour: str, budget_bytes: int | None = None, beside: Any = None) -> Any:
    """Memory over a step.

    Args:
        course: what is drawn.
        scale: its units.
        colour: of the line.
        budget_bytes: drawn as a line of dashes.
        beside: another drawing whose ranges it shares.
    """
    bokeh = _bokeh()
    models = bokeh.models
    figure = _figure(scale, 230, beside)
    left, right = course.left / scale.second_size, course.right / scale.second_size
    top = course.nbytes / scale.byte_size
    figure.add_layout(
        models.BoxAnnotation(left=course.boundary / scale.second_size, fill_color=BACKWARD, level="image")
    )
    source = models.ColumnDataSource(
        {
            "left": left,
            "right": right,
            "top": top,
            "held": [format_bytes(int(n)) for n in course.nbytes],
            "op": list(course.ops),
            "module": list(course.modules),
            "alive": list(course.alive) or [""] * len(course.ops),
        }
    )
    pointed_at = figure.quad(left="left", right="right", bottom=0, top="top", source=source, alpha=0, line_alpha=0)
    along, up = _both(left, right), np.repeat(top, 2)
    figure.varea(along, np.zeros(len(along)), up, color=colour, alpha=0.22)
    figure.line(along, up, color=colour, line_width=1.4)
    if len(top):
        peak = int(np.argmax(top))
        at = float(left[peak] + right[peak]) / 2
        figure.scatter([at], [float(top[peak])], size=7, color=colour)
        beyond_half = at > course.end / scale.second_size / 2
        figure.add_layout(
            models.Label(
                x=at,
                y=float(top[peak]),
                text=f"peak {format_bytes(int(course.nbytes[peak]))}",
                text_color=colour,
                text_font_size="12px",
                text_align="right" if beyond_half else "left",
                x_offset=-8 if beyond_half else 8,
                y_offset=3,
            )
        )
    if budget_bytes is not None:
        height = budget_bytes / scale.byte_size
        figure.add_layout(
            models.Span(location=height, dimension="width", line_color=BUDGET, line_dash="dashed", line_width=1.5)
        )
    tips = [("", "op", "@op"), ("", "module", "@module"), ("", "held", "@held"), ("", "largest", "@alive")]
    tips = tips if course.alive else tips[:-1]
    figure.add_tools(_hover(pointed_at, tips))
    return figure


def layers(course: Course, scale: Scale, budget_bytes: int, beside: Any = None) -> Any:
    """Memory over a step, by module, one upon another."""
    bokeh = _bokeh()
    models = bokeh.models
    figure = _figure(scale, 300, beside, max(int(course.nbytes.max(initial=0)), budget_bytes))
    left, right = course.left / scale.second_size, course.right / scale.second_size
    names = [f"layer{i}" for i in range(len(course.layers))]
    heights = {
        name: (layer / scale.byte_size).astype(np.float32)
        for name, (_, layer) in zip(names, course.layers, strict=True)
    }
    drawn = {"x": _both(left, right), **{name: np.repeat(height, 2) for name, height in heights.items()}}
    if names:
        figure.varea_stack(names, x="x", source=models.ColumnDataSource(drawn), color=layer_colours(course))
    pointed_at = {
        "left": left,
        "right": right,
        "top": course.nbytes / scale.byte_size,
        "op": list(course.ops),
        **heights,
    }
    source = models.ColumnDataSource(pointed_at)
    area = figure.quad(left="left", right="right", bottom=0, top="top", source=source, alpha=0, line_alpha=0)
    height = budget_bytes / scale.byte_size
    figure.add_layout(
        models.Span(location=height, dimension="width", line_color=BUDGET, line_dash="dashed", line_width=1.5)
    )
    labels = [
        (colour, name, f"@{key}{{0.00}} {scale.memory}")
        for key, (name, _), colour in zip(names, course.layers, layer_colours(course), strict=True)
    ]
    tips = [("", "op", "@op"), ("", "all", f"@top{{0.00}} {scale.memory}"), *reversed(labels)]
    figure.add_tools(_hover(area, tips))
    return figure


def layer_colours(course: Course) -> Sequence[str]:
    """The colour of each layer."""
    return LAYERS[: len(course.layers)]


def trade_off(looked_at: Analysis) -> Any:
    """Time against memory: the curve, the plan, and the step without rematerialization."""
    bokeh = _bokeh()
    models = bokeh.models
    most = max(max(point.peak_bytes for point in looked_at.curve), looked_at.peak.nbytes)
    unit, size = byte_unit(most)
    baseline = looked_at.baseline_seconds

    def share(seconds: float) -> float:
        return 100 * (seconds / baseline - 1) if baseline > 0 else 0.0

    figure = bokeh.plotting.figure(
        height=280,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        x_axis_label=f"peak, {unit}",
        y_axis_label="extra time a step, %",
        y_range=models.DataRange1d(start=0, range_padding=0.12, bounds=None),
    )
    source = models.ColumnDataSource(
        {
            "x": [point.peak_bytes / size for point in looked_at.curve],
            "y": [share(point.seconds) for point in looked_at.curve],
            "peak": [format_bytes(point.peak_bytes) for point in looked_at.curve],
            "time": [f"{looked_at.cost(point.seconds)} ({share(point.seconds):+.1f}%)" for point in looked_at.curve],
        }
    )
    figure.line("x", "y", source=source, color=AFTER, line_width=1.5)
    dots = figure.scatter("x", "y", source=source, color=AFTER, size=7)
    figure.scatter([looked_at.peak.nbytes / size], [share(looked_at.seconds)], marker="diamond", size=16, color=BUDGET)
    budget = models.Span(
        location=looked_at.budget_bytes / size, dimension="height", line_color=BUDGET, line_dash="dashed"
    )
    figure.add_layout(budget)
    figure.add_tools(models.HoverTool(renderers=[dots], tooltips=[("peak", "@peak"), ("a step", "@time")]))
    _plain(figure)
    return figure


def _figure(scale: Scale, height: int, beside: Any, most: int | None = None) -> Any:
    """An empty drawing, of the same step as another, and as high as that unless ``most`` bytes are given."""
    bokeh = _bokeh()
    ranges = {"x_range": beside.x_range, "y_range": beside.y_range} if beside is not None else {}
    if beside is None or most is not None:
        top = scale.most if most is None else most / scale.byte_size
        ranges["y_range"] = bokeh.models.Range1d(0, 1.15 * top)
    figure = bokeh.plotting.figure(
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,xbox_zoom,reset",
        active_drag=None,  # a finger scrolls the page
        toolbar_location="right",
        y_axis_label=f"held, {scale.memory}",
        x_axis_label=f"into the step, {scale.time}",
        **ranges,
    )
    if beside is None:
        figure.x_range.range_padding = 0.01
    _plain(figure)
    return figure


def _plain(figure: Any) -> None:
    figure.outline_line_color = None
    figure.grid.grid_line_color = "#eceef1"
    figure.axis.axis_line_color = "#aab0b8"
    figure.axis.major_tick_line_color = "#aab0b8"
    figure.axis.minor_tick_line_color = None
    figure.axis.axis_label_text_font_style = "normal"
    figure.axis.axis_label_text_font_size = "12px"
    figure.axis.axis_label_text_color = "#5c6570"
    figure.toolbar.logo = None


def _hover(drawn: Any, tips: Sequence[tuple[str, str, str]]) -> Any:
    """What is said where the pointer is: a colour or "", a name, and what Bokeh puts there, a line each."""
    lines = "".join(
        f'<div style="border-left:7px solid {colour or "transparent"};padding-left:5px">'
        f'<span style="color:#5c6570">{_plain_text(name)}</span> {value}</div>'
        for colour, name, value in tips
    )
    html = (
        f'<div class="tip" style="width:165px;font:12px/1.35 system-ui,sans-serif;overflow-wrap:anywhere">{lines}</div>'
    )
    return _bokeh().models.HoverTool(renderers=[drawn], tooltips=html, mode="vline", point_policy="follow_mouse")


def _plain_text(name: str) -> str:
    """A name in Bokeh's template: escaped, and without what stands for a column there."""
    return text(name).replace("@", "&#64;").replace("$", "&#36;")


def _both(left: Any, right: Any) -> Any:
    """Both ends of each interval, one after the other."""
    return np.stack([left, right], axis=1).ravel()
