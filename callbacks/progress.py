"""Progress while the first batch is planned: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import re
import time

from rich.console import Console
from rich.errors import LiveError
from rich.status import Status
from rich.text import Text

log = logging.getLogger("lightning_remat")

EVERY = 5.0
"""Seconds after which work that goes on is logged again."""


class PlanningProgress:
    """Reports progress: called with a text about the work that begins; ``stop`` clears the live line.

    On a terminal the text is shown in one line that is redrawn, with the seconds since this kind of work began, which run on
    between calls. Elsewhere, and where another live display has the terminal (a rich progress bar), each new kind of
    work is one log line, and one more every few seconds that it goes on.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._plain = not self._console.is_terminal
        self._words, self._kind = "", ""
        self._started, self._logged = 0.0, 0.0

    def __call__(self, words: str) -> None:
        """Report the work that begins now."""
        now = time.monotonic()
        kind = re.sub(r"(, about)?[0-9 ]+(s left)?", "", words)
        new = kind != self._kind
        if new:
            self._kind, self._started = kind, now
        self._words = words
        if not self._plain and self._status is None:
            status = self._console.status(self)
            try:
                status.start()
                self._status = status
            except LiveError:
                self._plain = True
        if self._status is not None:
            self._status.update(self)
            return
        if new or now - self._logged >= EVERY:
            log.info("rematerialization: %s", words)
            self._logged = now

    def __rich__(self) -> Text:
        return Text(f"rematerialization: {self._words} ({time.monotonic() - self._started:.0f} s)")

    def stop(self) -> None:
        """Clear the line; the seconds of the next text count from zero."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._kind, self._started = "", 0.0
