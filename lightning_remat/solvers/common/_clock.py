"""The clock that solvers stop by: seconds, or a count of their own work, which ends them at the same place on every machine.

A deadline is a reading of `clock`. Where work is counted, each look at the clock stands for `A_LOOK` seconds, and each row and
column of a program that is solved for `A_ROW`: about what they take, so that work has the unit of time, but not its whims.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Iterator

from lightning_remat.errors import BudgetError

A_LOOK = 0.001
A_ROW = 5e-6
NODES = 100.0
"""Nodes of a branch and bound that a second of work stands for."""

MOST_NODES = 1e9

LATE = 1e6
"""By how much the count jumps at each look when the time limit is over: whatever the deadlines are, they have passed."""


@dataclasses.dataclass
class _Count:
    begun: float
    until: float
    done: float = 0.0

    def reading(self, work: float) -> float:
        self.done += work if time.monotonic() <= self.until else LATE
        return self.begun + self.done


_count: contextvars.ContextVar[_Count | None] = contextvars.ContextVar("_count", default=None)


def clock() -> float:
    """A reading of the clock: `time.monotonic`, or what was begun at, and the work since."""
    count = _count.get()
    return time.monotonic() if count is None else count.reading(A_LOOK)


@contextlib.contextmanager
def limited(time_limit: float, work_limit: float | None = None) -> Iterator[float]:
    """While open, what solves in this thread goes by the deadline that is given.

    Args:
        time_limit: seconds.
        work_limit: seconds of counted work; ``None`` to go by time alone. The time limit holds beside it: give one that is not
            come to where each run is to end alike.

    Raises:
        BudgetError: for a limit that is not positive.
    """
    for name, limit in (("time", time_limit), ("work", work_limit)):
        if limit is not None and not limit > 0:
            raise BudgetError(f"a {name} limit of {limit!r}: give a positive number of seconds")
    begun = time.monotonic()
    token = _count.set(None if work_limit is None else _Count(begun, begun + time_limit))
    try:
        yield begun + (time_limit if work_limit is None else work_limit)
    finally:
        _count.reset(token)


def program_limits(seconds: float, size: int = 0) -> tuple[float, int | None]:
    """What a program of so many rows and columns, which may take so long by this clock, may do.

    Returns:
        The seconds that it may take, and where work is counted how many nodes it may open.
    """
    count = _count.get()
    if count is None:
        return seconds, None
    count.reading(A_ROW * size)
    return max(0.0, count.until - time.monotonic()), max(1, round(min(seconds * NODES, MOST_NODES)))


def counts() -> bool:
    """Whether work is counted in this thread."""
    return _count.get() is not None
