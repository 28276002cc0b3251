"""What is being done while the first batch is planned: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.errors import LiveError
from rich.status import Status

log = logging.getLogger("lightning_remat")


class PlanningProgress:
    """A callable that takes words; ``stop`` clears the live line.

    On a terminal the words stand in a line that is drawn over. Elsewhere, and where another live display has the terminal
    (a rich progress bar), each new kind of work is one log line.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._plain = not self._console.is_terminal
        self._last = ""
        self._started = 0.0

    def __call__(self, words: str) -> None:
        """Say what is being done."""
        if not self._started:
            self._started = time.monotonic()
        if not self._plain and self._status is None:
            status = self._console.status("")
            try:
                status.start()
                self._status = status
            except LiveError:
                self._plain = True
        if self._status is not None:
            self._status.update(f"rematerialization: {words} ({time.monotonic() - self._started:.0f} s)")
            return
        kind = words.rstrip("0123456789 of").strip()
        if kind != self._last:
            log.info("rematerialization: %s", words)
            self._last = kind

    def stop(self) -> None:
        """Clear the line; the next words start anew."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._last, self._started = "", 0.0
