"""Living with torch's profiler: only one can run, and it talks to the terminal."""

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


def cpu_allocations(recorder: Any) -> list[tuple[int, int, int]]:
    """What a ``torch.autograd.profiler.profile`` has recorded: the moment, the address and the bytes of each change."""
    return internals.allocations(recorder)


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


class QuietReleases:
    """Keeps off the user's terminal what torch says when a CPU block is released that was allocated before the profile.

    It says so, past Python and at a level that is read when torch is loaded, of the first, the 1001st, the 2001st ... such
    block of the process. Blocks made for it, released while the terminal is turned away until torch has said its line, use
    that one up; the 999 after it are silent.
    """

    SAID_EVERY = 1000
    _LINE = b"allocated before the profiling started"

    def __init__(self, expected: int) -> None:
        """Make this before the profiler starts. ``expected``: how many releases `released` will be told of, at most."""
        self._blocks = [torch.empty(1, device="cpu") for _ in range(self.SAID_EVERY + expected)]
        self._since = 0

    def start(self) -> None:
        """The profiler has started: from here on no block that is older is mentioned."""
        self._since = 0
        if not self._blocks:  # none was mentioned: torch's level of logging is higher, or another thread is asked
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
        if others:  # of other threads, meanwhile
            os.write(2, others)

    def released(self) -> None:
        """An older block was released: begin again in time. Half of the silent ones are for blocks nobody tells of."""
        self._since += 1
        if self._since >= self.SAID_EVERY // 2:
            self.start()
