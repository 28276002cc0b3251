"""A plan as a notebook shows it: a few numbers, and its memory as a small drawing. Needs no library."""

from __future__ import annotations

from lightning_remat.report._analysis import Analysis
from lightning_remat.report._course import Course
from lightning_remat.report._html import text
from lightning_remat.report._units import format_bytes

WIDTH, HEIGHT, POINTS = 560, 120, 200
BEFORE, AFTER, BUDGET = "#6b7280", "#0072b2", "#d55e00"


def notebook_view(looked_at: Analysis) -> str:
    """A plan as a piece of HTML."""
    step = looked_at.step
    of = f", one of {step.graphs:,} graphs" if step.graphs > 1 else ""
    rows = [
        ("peak", format_bytes(step.baseline_bytes), format_bytes(step.peak_bytes)),
        (
            "step, predicted",
            step.cost(step.baseline_seconds),
            f"{step.cost(step.seconds)} ({step.overhead:+.1%})",
        ),
        ("largest at the peak", _largest(looked_at, 0), _largest(looked_at, 1)),
    ]
    cells = "".join(
        f'<tr><td style="text-align:left">{text(name)}</td><td style="text-align:left">{text(one)}</td>'
        f'<td style="text-align:left">{text(other)}</td></tr>'
        for name, one, other in rows
    )
    return (
        f'<div style="max-width:{WIDTH}px"><b>{text(looked_at.name)}</b>: {looked_at.ops:,} ops{of}, budget '
        f"{text(format_bytes(looked_at.budget_bytes))}, {text(looked_at.solver)} ({text(looked_at.status)})"
        "<table><thead><tr><th></th><th>without rematerialization</th><th>as planned</th></tr></thead>"
        f"<tbody>{cells}</tbody></table>"
        f"{_drawing(looked_at)}</div>"
    )


def _largest(looked_at: Analysis, which: int) -> str:
    largest = (looked_at.peak_before, looked_at.peak)[which].largest
    return f"{largest[0].name} of {largest[0].module}, {format_bytes(largest[0].nbytes)}" if largest else "-"


def _drawing(looked_at: Analysis) -> str:
    step = looked_at.step
    courses = (step.before, step.after)
    most = 1.05 * max(step.baseline_bytes, step.peak_bytes, looked_at.budget_bytes, 1)
    end = max(course.end for course in courses) or 1.0
    lines = "".join(
        f'<polyline points="{_points(course, end, most)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for course, colour in zip(courses, (BEFORE, AFTER), strict=True)
    )
    budget = HEIGHT * (1 - looked_at.budget_bytes / most)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;background:#fff" role="img" '
        f'aria-label="memory over the step">{lines}<line x1="0" x2="{WIDTH}" y1="{budget:.1f}" y2="{budget:.1f}" '
        f'stroke="{BUDGET}" stroke-dasharray="5 4"/></svg><div style="font-size:12px">memory over the step: '
        f'<span style="color:{BEFORE}">without rematerialization</span>, <span style="color:{AFTER}">as planned</span>, '
        f'<span style="color:{BUDGET}">budget</span></div>'
    )


def _points(course: Course, end: float, most: float) -> str:
    """A line of at most `POINTS` points, each the highest of its share of the step."""
    highest: dict[int, int] = {}
    for left, right, nbytes in zip(course.left.tolist(), course.right.tolist(), course.nbytes.tolist(), strict=True):
        for at in range(int(left / end * POINTS), int(right / end * POINTS) + 1):
            highest[at] = max(nbytes, highest.get(at, 0))
    return " ".join(f"{at * WIDTH / POINTS:.1f},{HEIGHT * (1 - n / most):.1f}" for at, n in sorted(highest.items()))
