"""The page of two plans, side by side."""

from __future__ import annotations

from collections.abc import Callable

from lightning_remat.report import _drawing
from lightning_remat.report._analysis import Analysis
from lightning_remat.report._html import cards, page, points, section, table, text
from lightning_remat.report._modules import ModuleRow
from lightning_remat.report._units import format_bytes


def compared_page(one: Analysis, other: Analysis, names: tuple[str, str] = ("a", "b")) -> str:
    """Two plans as one HTML file, of the same step or of different ones.

    Args:
        one: the one plan.
        other: the other plan.
        names: what they are called.

    Raises:
        RematError: where Bokeh is not installed.
    """
    courses = one.step.after, other.step.after
    scale = _drawing.scale_of((one.step, other.step), courses, one.budget_bytes, other.budget_bytes)
    first = _drawing.timeline(courses[0], scale, _drawing.BEFORE, one.budget_bytes)
    second = _drawing.timeline(courses[1], scale, _drawing.AFTER, other.budget_bytes, first)
    scripts, elements = _drawing.embedded({"one": first, "other": second})
    title = f"{names[0]} and {names[1]}"
    body = [
        f'<h1>{text(title)}</h1><p class="quiet">{text(_same(one, other))}</p>',
        _headline(one, other, names),
        section(
            "Memory over the step",
            f"<h3>{text(names[0])}</h3>{elements['one']}<h3>{text(names[1])}</h3>{elements['other']}",
            about=f"Both on the same axes; each one's budget is dashed. {other.cost_words}",
        ),
        _numbers(one, other, names),
        _modules(one, other, names),
        _peaks(one, other, names),
    ]
    return page(f"{title}: memory plans", "\n".join(body), scripts)


def _same(one: Analysis, other: Analysis) -> str:
    sizes = f"{one.name} ({_size_of(one)}) and {other.name} ({_size_of(other)})"
    alike = one.ops == other.ops and one.peak_before.nbytes == other.peak_before.nbytes
    seen = [(x.budget_bytes, x.seconds, x.peak, x.modules, x.costly) for x in (one, other)]
    if alike and seen[0] == seen[1]:
        return f"The two plans are the same: {sizes}."
    if alike and one.baseline_seconds == other.baseline_seconds:
        return f"Two plans of one step: {sizes}."
    return f"Plans of different steps: {sizes}. Modules are matched by their names."


def _size_of(looked_at: Analysis) -> str:
    of = f", one of {looked_at.step.graphs:,} graphs" if looked_at.step.graphs > 1 else ""
    return f"{looked_at.ops:,} ops{of}"


def _headline(one: Analysis, other: Analysis, names: tuple[str, str]) -> str:
    def change(before: float, after: float) -> str:
        return f"{after / before - 1:+.1%} against {names[0]}" if before > 0 else ""

    a, b = one.step, other.step
    return cards(
        [
            (f"peak of {names[0]}", format_bytes(a.peak_bytes), ""),
            (f"peak of {names[1]}", format_bytes(b.peak_bytes), change(a.peak_bytes, b.peak_bytes)),
            (f"step of {names[0]}", a.cost(a.seconds), f"{a.overhead:+.1%} over none computed again"),
            (f"step of {names[1]}", b.cost(b.seconds), change(a.seconds, b.seconds)),
        ]
    )


def _numbers(one: Analysis, other: Analysis, names: tuple[str, str]) -> str:
    sizes: list[tuple[str, Callable[[Analysis], int]]] = [
        ("budget", lambda a: a.budget_bytes),
        ("peak", lambda a: a.step.peak_bytes),
        ("peak without rematerialization", lambda a: a.step.baseline_bytes),
        ("always held", lambda a: a.step.always_bytes),
        ("kept for the backward", lambda a: a.kept_bytes),
        ("reserved", lambda a: a.reserved_bytes),
        ("on the host", lambda a: a.host_bytes),
    ]
    rows = [
        (name, format_bytes(of(one)), format_bytes(of(other)), _signed(of(other) - of(one)))
        for name, of in sizes
        if of(one) or of(other)
    ]
    times: list[tuple[str, Callable[[Analysis], float]]] = [
        ("predicted step", lambda a: a.step.seconds),
        ("without rematerialization", lambda a: a.step.baseline_seconds),
        ("computed again", lambda a: a.again_seconds),
    ]
    rows += [
        (name, one.step.cost(of(one)), other.step.cost(of(other)), _percent(of(one), of(other))) for name, of in times
    ]
    found = (f"{name}: {at.solver} ({at.status})" for name, at in zip(names, (one, other), strict=True))
    parts = any(looked_at.step.graphs > 1 for looked_at in (one, other))
    about = " What is kept and computed again is of one graph, and so is what follows." if parts else ""
    return section(
        "In numbers", table(["", *names, "difference"], rows), about=f"By solvers: {', '.join(found)}.{about}"
    )


def _modules(one: Analysis, other: Analysis, names: tuple[str, str]) -> str:
    left, right = ({row.name: row for row in looked_at.modules} for looked_at in (one, other))
    rows = []
    for name in sorted(left.keys() | right.keys(), key=lambda key: -_changed(left.get(key), right.get(key))):
        a, b = left.get(name), right.get(name)
        cells = [
            *(_size(row.peak_bytes) if row else ABSENT for row in (a, b)),
            *(_size(row.kept_bytes) if row else ABSENT for row in (a, b)),
            *(_cost(looked_at, row.again_seconds) if row else ABSENT for looked_at, row in ((one, a), (other, b))),
        ]
        if any(cells):
            rows.append((name, *cells))
    headings = [f"{what}, {name}" for what in ("at the peak", "kept", "computed again") for name in names]
    return section("Module by module", table(["module", *headings], rows), about="Where they differ most comes first.")


ABSENT = "-"
"""Where one of the steps has no such module."""


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else ""


def _cost(looked_at: Analysis, seconds: float) -> str:
    return looked_at.cost(seconds) if seconds else ""


def _changed(a: ModuleRow | None, b: ModuleRow | None) -> int:
    def of(row: ModuleRow | None) -> tuple[int, int]:
        return (row.peak_bytes, row.kept_bytes) if row else (0, 0)

    return sum(abs(x - y) for x, y in zip(of(a), of(b), strict=True))


def _peaks(one: Analysis, other: Analysis, names: tuple[str, str]) -> str:
    parts = [
        f"<h3>{text(name)}</h3>{points(looked_at.peak_words)}"
        for name, looked_at in zip(names, (one, other), strict=True)
    ]
    return section("What sets the peaks", *parts)


def _signed(nbytes: int) -> str:
    return ("+" if nbytes > 0 else "") + format_bytes(nbytes) if nbytes else "none"


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before > 0 else ""
