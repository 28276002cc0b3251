"""Progress of a command, once it has run for two seconds: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as LiveLine

AFTER_SECONDS = 2.0


class Progress:
    """Reports progress: called with a text inside of its ``with`` block, whose end clears the live line.

    Args:
        console: where to write; by default the standard error.
        after_seconds: seconds before anything is written, and at least between two plain lines.
    """

    def __init__(self, console: Console | None = None, after_seconds: float = AFTER_SECONDS) -> None:
        self._console = console or Console(stderr=True)
        self._after = after_seconds
        self._words, self._done, self._total = "", 0, 0
        self._started = self._said = time.monotonic()
        self._line: LiveLine | None = None
        self._lock = threading.RLock()  # the timer speaks from a thread of its own
        self._timer = threading.Timer(after_seconds, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._started = self._said = time.monotonic()
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._line is not None:
                self._line.stop()
                self._line = None

    def __call__(self, words: str, done: int = 0, total: int = 0) -> None:
        """Report the work that begins now, and how much of the whole is done where that is known."""
        with self._lock:
            self._words, self._done, self._total = words, done, total
            if time.monotonic() - self._said >= self._after or self._line is not None:
                self._show()

    def _show(self) -> None:
        with self._lock:
            if not self._words:
                return
            self._said = time.monotonic()
            if not self._console.is_terminal:
                counted = f" ({self._done} of {self._total} done)" if self._total else ""
                line = f"[{self._said - self._started:.0f} s] {self._words}{counted}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                return
            if self._line is None:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    TimeElapsedColumn(),
                )
                self._line = LiveLine(*columns, console=self._console, transient=True)
                self._line.add_task("")
                self._line.start()
            task = self._line.task_ids[0]
            self._line.update(task, description=self._words, completed=self._done, total=self._total or None)
