"""The page of one plan: a file that needs nothing else."""

from __future__ import annotations

from typing import Any

from lightning_remat.report import _drawing
from lightning_remat.report._analysis import Analysis
from lightning_remat.report._course import Course
from lightning_remat.report._html import cards, legend, page, points, section, table, text
from lightning_remat.report._units import format_bytes

TITLES = ("without rematerialization", "as planned")


def report_page(looked_at: Analysis) -> str:
    """A plan as one HTML file, for a browser without network.

    Raises:
        RematError: where Bokeh is not installed.
    """
    budget = looked_at.budget_bytes
    scale = _drawing.scale_of((looked_at,), (looked_at.before, looked_at.after), budget)
    before = _drawing.timeline(looked_at.before, scale, _drawing.BEFORE, budget)
    drawings: dict[str, Any] = {
        "before": before,
        "after": _drawing.timeline(looked_at.after, scale, _drawing.AFTER, budget, before),
        "layers": _drawing.layers(looked_at.after, scale, budget, before),
    }
    if looked_at.curve:
        drawings["curve"] = _drawing.trade_off(looked_at)
    if looked_at.step.graphs > 1:
        step = looked_at.step
        scale = _drawing.scale_of((step,), (step.before, step.after), budget)
        before = _drawing.timeline(step.before, scale, _drawing.BEFORE, budget)
        drawings["whole before"] = before
        drawings["whole after"] = _drawing.timeline(step.after, scale, _drawing.AFTER, budget, before)
    scripts, elements = _drawing.embedded(drawings)
    body = [
        _head(looked_at),
        headline(looked_at),
        _whole(looked_at, elements),
        section("What sets the peak", points(looked_at.peak_words)),
        _lower(looked_at),
        _timelines(looked_at, elements),
        _layers(looked_at, elements),
        _modules(looked_at),
        _curve(looked_at, elements),
        _costly(looked_at),
        _found(looked_at),
    ]
    return page(f"{looked_at.name}: memory plan", "\n".join(body), scripts)


def _head(looked_at: Analysis) -> str:
    where = f" on {looked_at.device}" if looked_at.device else ""
    about = f"Plan for one training step of {looked_at.ops:,} ops{where}"
    if looked_at.step.graphs > 1:
        graphs = f"{looked_at.step.graphs:,} graphs"
        about = f"Plan for one of the {graphs} that a training step runs as: {looked_at.ops:,} ops{where}"
    return f'<h1>{text(looked_at.name)}</h1><p class="quiet">{text(about)}</p>'


def headline(looked_at: Analysis) -> str:
    """The numbers that matter first: of the whole step, but for the bound."""
    step, peak, baseline = looked_at.step, looked_at.step.peak_bytes, looked_at.step.baseline_bytes
    saved = f"{1 - peak / baseline:.0%} less" if baseline and peak < baseline else "no less"
    gap = f"{looked_at.gap:.1%}" if looked_at.gap < float("inf") else "unknown"
    items = [
        ("peak", format_bytes(peak), f"{format_bytes(baseline)} without, {saved}"),
        ("budget", format_bytes(looked_at.budget_bytes), "kept" if peak <= looked_at.budget_bytes else "exceeded"),
        ("always held", format_bytes(step.always_bytes), "parameters, gradients, beside"),
        (
            "predicted step",
            step.cost(step.seconds),
            f"{step.cost(step.baseline_seconds)} without, {step.overhead:+.1%}",
        ),
        (
            "at most above the best",
            gap,
            "by the solver's lower bound" if step.graphs == 1 else "this graph, by the lower bound",
        ),
        ("solver", looked_at.solver, looked_at.status),
    ]
    if looked_at.reserved_bytes:
        items.insert(2, ("reserved", format_bytes(looked_at.reserved_bytes), f"allocator: {looked_at.arrangement}"))
    if looked_at.host_bytes:
        items.insert(2, ("on the host", format_bytes(looked_at.host_bytes), "waits for the backward"))
    return cards(items)


def _whole(looked_at: Analysis, elements: dict[str, str]) -> str:
    step = looked_at.step
    if step.graphs == 1:
        return ""
    about = (
        f"All {step.graphs:,} graphs, planned within one budget: their forwards in order, their backwards in reverse. "
    )
    about += "Below is one of them; what the others hold counts there as always held."
    parts = []
    for name, title, course in zip(("before", "after"), TITLES, (step.before, step.after), strict=True):
        parts.append(f"<h3>{title}{_few(course)}</h3>{elements[f'whole {name}']}")
    return section("Memory over the whole step", *parts, about=about)


def _lower(looked_at: Analysis) -> str:
    words = [change.words for change in looked_at.changes]
    if not words:
        words = ["Nothing that these numbers show would help much."]
    note = "" if looked_at.curve else "The trade-off with other budgets was not computed for this page."
    if looked_at.step.graphs > 1:
        note = "There is no trade-off with other budgets: all graphs would change together."
    return section("How to get lower, or faster", points(words, ordered=True), about=note)


def _timelines(looked_at: Analysis, elements: dict[str, str]) -> str:
    about = "Point at the picture for the op, its module and the largest tensors. The budget is dashed, the backward shaded. "
    about += looked_at.cost_words
    parts = []
    for name, title, course in zip(("before", "after"), TITLES, (looked_at.before, looked_at.after), strict=True):
        parts.append(f"<h3>{title}{_few(course)}</h3>{elements[name]}")
    which = "the step" if looked_at.step.graphs == 1 else "this graph"
    return section(f"Memory over {which}", *parts, about=about)


def _few(course: Course) -> str:
    """Said where not each op has an interval of its own."""
    if course.exact:
        return ""
    return f": of {course.steps:,} evaluations, each of {len(course.left):,} intervals shows the highest"


def _layers(looked_at: Analysis, elements: dict[str, str]) -> str:
    names = [name for name, _ in looked_at.after.layers]
    chips = list(zip(_drawing.layer_colours(looked_at.after), names, strict=True))
    return section(
        "What holds it, by module",
        elements["layers"],
        legend(reversed(chips)),
        about="The planned step; modules that differ in a number are one layer.",
    )


def _modules(looked_at: Analysis) -> str:
    rows = [row for row in looked_at.modules if row.seconds or row.peak_bytes or row.kept_bytes]
    columns: list[tuple[str, list[str]]] = [
        ("held at the peak", [format_bytes(row.peak_bytes) if row.peak_bytes else "" for row in rows]),
        ("kept for the backward", [format_bytes(row.kept_bytes) if row.kept_bytes else "" for row in rows]),
        ("computed again", [format_bytes(row.again_bytes) if row.again_bytes else "" for row in rows]),
        ("extra time", [looked_at.cost(row.again_seconds) if row.again_seconds else "" for row in rows]),
        ("in slices", [format_bytes(row.sliced_bytes) if row.sliced_bytes else "" for row in rows]),
        ("on the host", [format_bytes(row.offloaded_bytes) if row.offloaded_bytes else "" for row in rows]),
        ("time of all ops once", [looked_at.cost(row.seconds) if row.seconds else "" for row in rows]),
    ]
    shown = [(heading, cells) for heading, cells in columns if any(cells)]
    names = [f"{row.name} ({row.count})" if row.count > 1 else row.name for row in rows]
    return section(
        "What is kept, computed again, sliced and offloaded",
        table(
            ["module", *(heading for heading, _ in shown)],
            list(zip(names, *(cells for _, cells in shown), strict=True)),
        ),
        about="Parameters, gradients and workspace aside. 'In slices': tensors that never lie in memory as a whole.",
    )


def _curve(looked_at: Analysis, elements: dict[str, str]) -> str:
    if not looked_at.curve:
        return ""
    rows: list[tuple[str, ...]] = []
    chosen: list[int] = []
    for point in looked_at.curve:
        extra = point.seconds / looked_at.baseline_seconds - 1 if looked_at.baseline_seconds > 0 else 0.0
        this = point.peak_bytes == looked_at.peak.nbytes and point.seconds == looked_at.seconds
        if this:
            chosen.append(len(rows))
        peak = f"{format_bytes(point.peak_bytes)}{' (this plan)' if this else ''}"
        rows.append((peak, looked_at.cost(point.seconds), f"{extra:+.1%}"))
    smallest = format_bytes(min(point.peak_bytes for point in looked_at.curve))
    return section(
        "At other budgets",
        elements["curve"],
        table(["peak", "a step", "extra time"], rows, chosen=chosen),
        about=f"Schedules found in a short time; the smallest peak among them is {smallest} (a plan with budget 'min' searches "
        "for longer, and for what to compute in slices). The diamond is this plan.",
    )


def _costly(looked_at: Analysis) -> str:
    tensors = [
        (held.name, held.module, held.shape, held.why, format_bytes(held.nbytes)) for held in looked_at.peak.largest
    ]
    ops = [
        (row.name, row.module, row.target, f"{row.count:,}", looked_at.cost(row.seconds)) for row in looked_at.costly
    ]
    parts = ["<h3>tensors that are held at the peak</h3>"]
    parts.append(table(["tensor", "module", "shape", "why it is there", "size"], tensors, words=4))
    if ops:
        parts.append("<h3>ops that take longest</h3>")
        parts.append(table(["op", "module", "what is called", "runs", "all of its time"], ops, words=3))
    return section("What costs most", *parts)


def _found(looked_at: Analysis) -> str:
    notes = "<details><summary>what happened on the way</summary>" + points(looked_at.notes) + "</details>"
    scope = f" among {looked_at.bound_scope}" if looked_at.bound_scope else ""
    bound = f"The solver's lower bound is {looked_at.cost(looked_at.lower_bound_seconds)} a step{scope}."
    return section("How the plan was found", notes if looked_at.notes else "", about=bound)
