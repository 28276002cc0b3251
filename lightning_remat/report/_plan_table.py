"""A table that compares plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

from rich.table import Table

from lightning_remat.report._units import format_bytes, format_seconds


class PlanLike(Protocol):
    """What the table reads of a plan: a `Plan` has it, and so has anything else with these attributes."""

    @property
    def budget_bytes(self) -> int:
        """The budget, in bytes."""

    @property
    def predicted_peak_bytes(self) -> int:
        """Peak of the schedule, in bytes."""

    @property
    def predicted_reserved_bytes(self) -> int:
        """What the device's caching allocator reserves for it, in bytes; 0 where there is none."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the tensors that wait in the host's memory for the backward."""

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak without rematerialization, in bytes."""

    @property
    def predicted_seconds(self) -> float:
        """Time of a step under the schedule, in seconds."""

    @property
    def overhead(self) -> float:
        """Extra time over the step without rematerialization, as a share of it."""

    @property
    def solver(self) -> str:
        """The method that found the schedule."""

    @property
    def status(self) -> object:
        """How the solve ended: text, or an enum of text."""

    @property
    def gap(self) -> float:
        """How far the schedule can be from the lower bound, as a share of it."""

    @property
    def solve_seconds(self) -> float:
        """Wall time of solving, in seconds: the column "planned in"."""


def plan_table(rows: Mapping[str, PlanLike] | Iterable[PlanLike], title: str | None = None) -> Table:
    """A table that compares plans, one per row.

    Args:
        rows: plans; given as a mapping, its keys (networks, budgets, methods) become the first column.
        title: written above the table; ``None`` for none.

    Returns:
        A table for `rich.console.Console.print`. Times and sizes are in units that fit them; the percentage after a
        peak is its share of the peak without rematerialization. There is a column of reserved bytes if a plan has any, and
        one of bytes on the host.
    """
    labels: list[str] | None = None
    if isinstance(rows, Mapping):
        labels, rows = list(rows), list(rows.values())
    rows = list(rows)
    reserves = any(plan.predicted_reserved_bytes for plan in rows)
    waits = any(plan.host_bytes for plan in rows)
    table = Table(title=title)
    if labels is not None:
        table.add_column("")
    beside = [*(["reserved"] if reserves else []), *(["on the host"] if waits else [])]
    for name in ("budget", "predicted peak", *beside, "step", "overhead"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("solver")
    table.add_column("status")
    for name in ("gap", "planned in"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, plan in enumerate(rows):
        cells = [
            format_bytes(plan.budget_bytes),
            f"{format_bytes(plan.predicted_peak_bytes)} ({_share(plan.predicted_peak_bytes, plan.baseline_peak_bytes)})",
            *([format_bytes(plan.predicted_reserved_bytes)] if reserves else []),
            *([format_bytes(plan.host_bytes)] if waits else []),
            format_seconds(plan.predicted_seconds),
            _percent(plan.overhead, signed=True),
            plan.solver,
            str(plan.status.value if isinstance(plan.status, Enum) else plan.status),
            _percent(plan.gap),
            format_seconds(plan.solve_seconds),
        ]
        table.add_row(*([labels[index]] if labels is not None else []), *cells)
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _percent(share: float, *, signed: bool = False) -> str:
    if not math.isfinite(share):
        return "-"
    return f"{100 * share:+.1f}%" if signed else f"{100 * share:.1f}%"
