"""Living with torch's profiler: only one can run, and it talks to the terminal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_remat.capture import _torch as internals

_giving_way: list[tuple[int, Callable[[], None]]] = []
"""What ends the measurements under way that may end early, and the thread of each: no other can stop its profiler."""


@contextmanager
def giving_way(end: Callable[[], None] | None) -> Iterator[None]:
    """While this is entered, `make_way` calls ``end``, which stops a profiler of ours that runs; ``None``: nothing can."""
    if end is None:
        yield
        return
    entry = threading.get_ident(), end
    _giving_way.append(entry)
    try:
        yield
    finally:
        _giving_way.remove(entry)


def make_way() -> None:
    """Before a profiler is started: end what is measured meanwhile on this thread, where that may end early."""
    for thread, end in list(_giving_way):
        if thread == threading.get_ident():
            end()


def profiler_running() -> bool:
    """Whether a torch profiler records on this thread."""
    return internals.profiling()


def profiler_in_use() -> bool:
    """Whether a torch profiler records now, or is set up to record later (`torch.profiler.profile` with a schedule).

    The second kind matters: to start another profiler while one warms up crashes the process. There is no public way to
    ask; but a profiler that has been set up and not yet left is among those that count steps.
    """
    return profiler_running() or internals.profiling_anywhere() or "ProfilerStep" in internals.profilers_counting()


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own lines ("USDT: ... profiler_start") off the user's terminal, unless the user set a level.

    The level is read once, when the first profiler of the process starts.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        del os.environ[name]
