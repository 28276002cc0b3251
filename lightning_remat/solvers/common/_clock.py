"""The clock that solvers stop by: seconds, or a count of their own work, which ends them at the same place on every machine.

A deadline is a reading of `clock`. Where work is counted, each reading stands for `A_LOOK` seconds, and each row and
column of a program that is solved for `A_ROW` seconds: about what they take, so that counted work is measured in
seconds and does not depend on the machine.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Iterator

from lightning_remat.errors import BudgetError

A_LOOK = 0.001
"""Seconds of counted work that one reading of the clock stands for."""

A_ROW = 5e-6
"""Seconds of counted work that one row or column of a solved program stands for."""

NODES = 100.0
"""Nodes of a branch and bound that a second of counted work stands for."""

MOST_NODES = 1e9
"""The most nodes that a branch and bound is ever allowed."""

LATE = 1e6
"""Seconds by which the count jumps at each reading once the time limit is over: every deadline has passed then."""


@dataclasses.dataclass
class _Count:
    """Work ``done`` since ``begun``, in seconds, and the `time.monotonic` ``until`` which it may go on."""

    begun: float
    until: float
    done: float = 0.0

    def reading(self, work: float) -> float:
        self.done += work if time.monotonic() <= self.until else LATE
        return self.begun + self.done


_count: contextvars.ContextVar[_Count | None] = contextvars.ContextVar("_count", default=None)


def clock() -> float:
    """Seconds by the clock: `time.monotonic`, or, where work is counted, its reading at the start plus that work."""
    count = _count.get()
    return time.monotonic() if count is None else count.reading(A_LOOK)


@contextlib.contextmanager
def limited(time_limit: float, work_limit: float | None = None) -> Iterator[float]:
    """A context in which solvers of this thread go by the deadline that it yields, a reading of `clock`.

    Args:
        time_limit: seconds.
        work_limit: seconds of counted work; ``None`` to go by time alone. The time limit holds beside it: where every
            run is to end at the same place, give a time limit that is never reached.

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
    """The limits of one run of a linear or integer program. Where work is counted, its rows and columns are.

    Args:
        seconds: what it may take by this clock.
        size: its rows and columns.

    Returns:
        The seconds of real time that it may take, and, where work is counted, the nodes that its branch and bound may
        open.
    """
    count = _count.get()
    if count is None:
        return seconds, None
    count.reading(A_ROW * size)
    return max(0.0, count.until - time.monotonic()), max(1, round(min(seconds * NODES, MOST_NODES)))


def count(seconds: float) -> None:
    """Count so many seconds of work, where work is counted: for what takes long between two readings."""
    if (counted := _count.get()) is not None:
        counted.reading(seconds)


def counts() -> bool:
    """Whether work is counted in this thread."""
    return _count.get() is not None
