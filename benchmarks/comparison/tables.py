"""What was found, as tables for people: one of a network's rows, and one of what holds on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.comparison.rows import EAGER, Row
from benchmarks.comparison.verdict import Verdict
from lightning_remat.report import format_bytes, format_seconds


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows of one network."""
    eager = next((row.seconds for row in rows if row.family == EAGER and row.seconds), None)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = (
        "peak: bytes above parameters, buffers and inputs, old gradients included; predicted: the error of the predicted "
        "absolute peak; planned in: measuring and solving"
    )
    table.add_column("method", no_wrap=True)
    for name in ("peak", "step", "(least to most)", "of eager", "gradient error", "predicted", "planned in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits")
    table.add_column("note")
    for row in rows:
        table.add_row(
            row.method,
            _maybe(row.peak_bytes, format_bytes),
            _maybe(row.seconds, format_seconds),
            f"{format_seconds(row.seconds_least)} to {format_seconds(row.seconds_most)}"
            if row.seconds_least is not None and row.seconds_most is not None
            else "",
            f"{row.seconds / eager:.2f}" if row.seconds and eager else "",
            _maybe(row.gradient_error, lambda error: "0" if error == 0 else f"{error:.0e}"),
            _maybe(row.prediction_error, lambda error: f"{100 * error:+.2f}%"),
            _maybe(row.planning_seconds, format_seconds),
            _bits(row),
            Text("; ".join(part for part in (_trouble(row), row.note) if part)),
        )
    return table


def verdict_table(title: str, verdict: Verdict) -> Table:
    """What holds on one network: its points, and below them what is said of the network as a whole."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("a peer's point", no_wrap=True)
    for name in ("peak", "ours", "predicted", "time of peer's", "(middle half)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    table.add_column("holds")
    for point in verdict.points:
        dominated = f"need not: dominated by {point.dominated_by}" if point.dominated_by else ""
        table.add_row(
            point.peer,
            format_bytes(point.peak_bytes),
            _maybe(point.ours_peak_bytes, format_bytes),
            _maybe(point.prediction_error, lambda error: f"{100 * error:+.2f}%"),
            _maybe(point.ratio, lambda ratio: f"{ratio:.3f}"),
            f"{point.ratio_low:.3f} to {point.ratio_high:.3f}" if point.ratio_low and point.ratio_high else "",
            _maybe(point.bitwise, lambda same: "equal" if same else "differ"),
            Text(f"NO: {', '.join(point.troubles)}" if point.troubles else dominated or "yes"),
        )
    table.caption = Text("\n".join(_sentences(verdict)))
    return table


def _sentences(verdict: Verdict) -> list[str]:
    """What is said of a network as a whole."""
    said = []
    if verdict.smallest_bytes and verdict.smallest_peer_bytes:
        share = verdict.smallest_bytes / verdict.smallest_peer_bytes
        text = (
            f"smallest peak: {format_bytes(verdict.smallest_bytes)} ({verdict.smallest_op}), {share:.2f} of the peers' "
            f"({format_bytes(verdict.smallest_peer_bytes)}, {verdict.smallest_peer})"
        )
        if verdict.unavoidable_bytes:
            text += (
                f"; {verdict.smallest_bytes / verdict.unavoidable_bytes:.2f} of the largest unavoidable working set "
                f"({format_bytes(verdict.unavoidable_bytes)}, {verdict.unavoidable_op})"
            )
        said.append(text)
    if verdict.unscheduled_bytes and verdict.eager_bytes:
        share = verdict.unscheduled_bytes / verdict.eager_bytes
        said.append(f"unscheduled: {format_bytes(verdict.unscheduled_bytes)}, {share:.2f} of eager's")
    said += [f"DOES NOT HOLD: {trouble}" for trouble in verdict.troubles]
    return [*said, "all of it holds"] if verdict.holds else said


def _maybe(value: Any, form: Any) -> str:
    return "" if value is None else str(form(value))


def _bits(row: Row) -> str:
    if row.bitwise is None:
        return ""
    if row.bitwise:
        return "equal"
    parts = {"loss": row.same_loss, "gradients": row.same_gradients, "buffers": row.same_buffers}
    return " and ".join(name for name, same in parts.items() if not same) + " differ"


def _trouble(row: Row) -> str:
    if row.within_budget is False:
        return "OVER ITS BUDGET"
    if row.other_random_numbers:
        return "draws other random numbers: its gradients cannot be compared"
    return "WRONG GRADIENTS" if row.wrong_gradients else ""
