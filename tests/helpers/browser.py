"""A real browser without a window, for pages that people look at."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTHS = (1280, 390)
"""Of a desktop's window, and of a telephone, in pixels."""

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


class Opened:
    """A page in a browser, with what it asked for and complained of."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.asked, self.complaints = page, [], []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self.complaints.extend([said.text] * (said.type in ("error", "warning"))))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        started = time.monotonic()
        page.goto(path.as_uri())
        page.locator(".bk-Figure").first.wait_for()
        self.seconds = time.monotonic() - started
        self.uri = path.as_uri()

    def point_at(self, which: int, share: float) -> str:
        """What is said where a drawing is pointed at, a share of its width from its left."""
        figure = self.page.locator(".bk-Figure").nth(which)
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * 0.5)
        tip = self.page.locator("div.tip").first
        tip.wait_for()
        return str(tip.inner_text())

    def holds(self) -> None:
        """It asked for nothing but itself, complained of nothing, and does not run over to the side."""
        assert self.asked == [self.uri] and self.complaints == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def opened(chromium: Any, path: Path, width: int = WIDTHS[0]) -> Opened:
    """A page of Bokeh's drawings in a browser's new tab, so wide."""
    return Opened(chromium.new_page(viewport={"width": width, "height": 900}), path)
