"""The architectures of `benchmarks.models`, trained on the device: which are captured whole, with the same bits, in budget?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import models
from benchmarks.architectures import ARCHITECTURES
from benchmarks.gpu.part import FAILED, MISMATCH, OK, OVER, SKIPPED, UNREPEATABLE, Case, Part, Result, Settings, result
from benchmarks.models import Row

SHARES = (0.6,)
TIME_LIMIT = 2.0
"""Seconds of the planner, for one plan."""


def cases(settings: Settings) -> Sequence[Case]:
    """One an architecture, each in a process of its own; none where networks were asked for, which these are not."""
    return [
        Case(f"{one.library}/{one.name}", f"{one.library}/{one.name}", {"number": number})
        for number, one in enumerate(ARCHITECTURES)
        if not settings.networks
    ]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train one eagerly and within a budget, and compare."""
    return judged(models.examine(ARCHITECTURES[case["number"]], SHARES, TIME_LIMIT, settings.device))


def judged(row: Row) -> Result:
    """A row as a result: what eager mode cannot do, or does otherwise each time, is no fault."""
    fields = {"row": row.to_dict()}
    if not row.planned:
        return result(status=SKIPPED, why=row.trouble, **fields)
    ended = [one.exception for one in row.planned if one.exception]
    if ended:
        return result(FAILED, error=ended[0], **fields)
    differs = [MISMATCH] if any(one.differs for one in row.planned) and not row.trouble else []
    over = [OVER] if any((one.measured_peak_bytes or 0) > (one.budget_bytes or 0) for one in row.planned) else []
    return result(*differs, *over, status=UNREPEATABLE if row.trouble else OK, **fields)


def table(results: Mapping[str, Result]) -> str:
    """A row an architecture that was built and trained."""
    return models.table([Row.from_dict(one["row"]) for one in results.values() if one.get("row", {}).get("planned")])


PART = Part(
    name="architectures",
    title="Architectures",
    about=f"Ten steps of AdamW of tiny models from their own libraries, in eager mode and at a share of {SHARES[0]} of what "
    "can be saved, where that can be; peaks are all that is allocated.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=180,
    workers=12,
)
