"""A real browser without a window, for pages that people look at."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Chromium as it is installed on the machine; the test is skipped where there is none, but for continuous integration."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None and "CI" not in os.environ:
        pytest.skip(f"needs a browser ({', '.join(NAMES)})")
    assert program is not None, f"continuous integration installs a browser, and none of {', '.join(NAMES)} is there"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=list(QUIET))
        try:
            yield started
        finally:
            started.close()
