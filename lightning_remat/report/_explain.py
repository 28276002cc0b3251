"""A plan in words, for a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from lightning_remat.report._analysis import Analysis
from lightning_remat.report._units import format_bytes

WIDTH, ROWS, CHANGES = 110, 10, 3


def explanation(looked_at: Analysis) -> str:
    """Why the step needs what it needs, module by module, and the changes that would help most."""
    peak, baseline = looked_at.peak.nbytes, looked_at.peak_before.nbytes
    lines = [
        f"{looked_at.name}: {looked_at.ops:,} ops",
        *_of_whole(looked_at),
        f"  without rematerialization: peak {format_bytes(baseline)}, {looked_at.cost(looked_at.baseline_seconds)} a step",
        f"  as planned: peak {format_bytes(peak)}, {looked_at.cost(looked_at.seconds)} a step ({looked_at.overhead:+.1%})",
        f"  budget {format_bytes(looked_at.budget_bytes)}; always held {format_bytes(looked_at.floor_bytes)}",
        f"  {looked_at.cost_words}",
        "",
        "What sets the peak",
        *(f"  {words}" for words in looked_at.peak_words),
        "",
        "Module by module",
        _modules(looked_at),
        "How to get lower, or faster",
    ]
    changes = [f"  {number}. {one.words}" for number, one in enumerate(looked_at.changes[:CHANGES], start=1)]
    return "\n".join([*lines, *(changes or ["  Nothing that these numbers show would help much."])])


def _of_whole(looked_at: Analysis) -> list[str]:
    step = looked_at.step
    if step.graphs == 1:
        return []
    times = step.cost(step.baseline_seconds), f"{step.cost(step.seconds)} ({step.overhead:+.1%})"
    return [
        f"  one of the {step.graphs:,} graphs of a step, which as a whole has",
        f"    without rematerialization: peak {format_bytes(step.baseline_bytes)}, {times[0]}",
        f"    as planned: peak {format_bytes(step.peak_bytes)}, {times[1]}",
        "  this graph has, beside the others",
    ]


def _modules(looked_at: Analysis) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("  module", overflow="fold")
    columns = ("at the peak", "kept", "computed again", "extra time", "all ops once")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [row for row in looked_at.modules if row.peak_bytes or row.kept_bytes or row.again_bytes or row.seconds]
    others = [(name, nbytes) for name, nbytes in looked_at.peak.modules if name not in {row.name for row in rows}]
    for name, nbytes in others:
        table.add_row(f"  ({name})", format_bytes(nbytes), *[""] * 4)
    for row in rows[:ROWS]:
        table.add_row(
            f"  {row.name}{f' ({row.count})' if row.count > 1 else ''}".replace("[", "\\["),
            *(format_bytes(n) if n else "" for n in (row.peak_bytes, row.kept_bytes, row.again_bytes)),
            *(looked_at.cost(cost) if cost else "" for cost in (row.again_seconds, row.seconds)),
        )
    if len(rows) > ROWS:
        table.add_row(f"  and {len(rows) - ROWS} more", *[""] * 5)
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
