"""Pieces of a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.part import OK, Result


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def grid(results: Mapping[str, Result], row: str, column: str, corner: str, cell: Any) -> str:
    """A table of two of the cases' options; ``cell`` takes the results that meet in one, and returns its text."""
    found = list(results.values())
    columns = list(dict.fromkeys(one["case"][column] for one in found))
    rows = []
    for name in dict.fromkeys(one["case"][row] for one in found):
        meeting = [[one for one in found if (one["case"][row], one["case"][column]) == (name, at)] for at in columns]
        rows.append([name, *(cell(ones) if ones else "" for ones in meeting)])
    return table([corner, *columns], rows)


def said(one: Result) -> str:
    """The status of a result that is not simply right, and why; "" for one that is."""
    return "" if one["status"] == OK else f"**{one['status']}**" + (f": {one['error']}" if one.get("error") else "")


def mib(nbytes: float | None) -> str:
    """Bytes in MiB; "" for none."""
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def difference(predicted: int | None, measured: int | None) -> str:
    """Measured less predicted in bytes, and as a share of the predicted."""
    if predicted is None or measured is None or predicted == 0:
        return ""
    return f"{measured - predicted:+,} ({measured / predicted - 1:+.3%})"


def milliseconds(seconds: float | None) -> str:
    """Seconds in ms; "" for none."""
    return "" if seconds is None else f"{1e3 * seconds:,.1f}"


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
