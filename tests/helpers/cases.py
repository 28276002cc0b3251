"""Combinations of parameters, of which continuous integration runs as many as it takes to have each value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` as parameters of a test, all of which but those in ``kept`` are marked `slow`."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if case in kept else pytest.mark.slow))
    return found


def diagonal(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs as parameters of a test; `slow`, but for one of each value of the longer sequence, with the others by turns."""
    n, m = len(first), len(second)
    kept = [(first[i % n], second[i % m]) for i in range(max(n, m))]
    return slow_but(kept, [(one, other) for one in first for other in second])
