"""Sharing torch's profiler with the user: only one can run at a time, and it writes to the terminal."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_remat.capture import _torch as internals

_giving_way: list[tuple[int, Callable[[], None]]] = []
"""The running measurements that may be cut short: the thread, which alone can stop its profiler, and what ends it."""


@contextmanager
def giving_way(end: Callable[[], None] | None) -> Iterator[None]:
    """While open, `make_way` may call ``end`` to stop this block's profiler; ``None``: it cannot be cut short."""
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
    """Call before a profiler is started: ends the measurements on this thread that may be cut short."""
    for thread, end in list(_giving_way):
        if thread == threading.get_ident():
            end()


def profiler_running() -> bool:
    """Whether a torch profiler records on this thread."""
    return internals.profiling()


def profiler_in_use() -> bool:
    """Whether a torch profiler records now, or is set up to record later (`torch.profiler.profile` with a schedule).

    The second kind matters: to start another profiler while one warms up crashes the process. There is no public way to
    ask; but a profiler that was entered and not yet exited is registered with torch's step counter.
    """
    return profiler_running() or internals.profiling_anywhere() or "ProfilerStep" in internals.profilers_counting()


def cpu_allocations(recorder: Any) -> list[tuple[int, int, int]]:
    """The allocations and releases that a ``torch.autograd.profiler.profile`` has recorded, in no order.

    Each is the moment in nanoseconds, the address, and the bytes (negative if released).
    """
    return internals.allocations(recorder)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own lines ("USDT: ... profiler_start") off the terminal, unless ``KINETO_LOG_LEVEL`` is set.

    That level is read once, when the first profiler of the process starts.
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


class QuietReleases:
    """Keeps off the terminal what torch writes when CPU blocks are released that are older than the profile.

    Torch's C++ code writes it (at a log level that is read when torch is loaded) for the first, the 1001st, the 2001st
    ... such block of the process. So blocks are allocated before the profile, and released with the standard error
    redirected, until torch has written its line; the next 999 releases are silent.
    """

    SAID_EVERY = 1000
    _LINE = b"allocated before the profiling started"

    def __init__(self, expected: int) -> None:
        """Make this before the profiler starts. ``expected``: how often `released` will be called, at most."""
        self._blocks = [torch.empty(1, device="cpu") for _ in range(self.SAID_EVERY + expected)]
        self._since = 0

    def start(self) -> None:
        """Call when the profiler has started: from here on torch is silent about the release of older blocks."""
        self._since = 0
        if not self._blocks:  # torch wrote nothing: its log level is higher, or the profiler is another thread's
            return
        try:
            terminal = os.dup(2)
        except OSError:  # a process without a terminal
            return
        with tempfile.TemporaryFile("a+b", buffering=0) as said:
            os.dup2(said.fileno(), 2)
            text = b""
            try:
                while self._blocks and self._LINE not in text:
                    self._blocks.pop()
                    said.seek(0)
                    text = said.read()
            finally:
                os.dup2(terminal, 2)
                os.close(terminal)
            said.seek(0)
            others = b"".join(line for line in said.read().splitlines(keepends=True) if self._LINE not in line)
        if others:  # written by other threads meanwhile
            os.write(2, others)

    def released(self) -> None:
        """Call when an older block was released: uses up torch's next line in time.

        Half of the silent releases are left for blocks whose release is not reported here.
        """
        self._since += 1
        if self._since >= self.SAID_EVERY // 2:
            self.start()
