"""The site is built without a warning, and each of its pages is opened in a browser."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.helpers.browser import browser
from tests.helpers.places import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

SITE = ROOT / "build" / "docs"
SCREENSHOTS = ROOT / "build" / "docs-screenshots"
LOOKED_AT = ("start", "howto/trainer", "comparison", "reference/errors")
WIDTHS = (1280, 390)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site() -> Path:
    """The site; of processes that share the tests one builds it, and the others find it built."""
    SITE.mkdir(parents=True, exist_ok=True)
    tests, built = os.environ.get("PYTEST_XDIST_TESTRUNUID", ""), SITE.parent / "docs.built"
    with (SITE.parent / "docs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tests or not built.exists() or built.read_text() != tests:
            built.unlink(missing_ok=True)
            _build()
            built.write_text(tests)
    return SITE


def _build() -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(SITE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode:
        shutil.rmtree(SITE)  # or the next build would say nothing of pages that it need not read again
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found.new_page()


def test_every_page_opens_and_every_link_leads_somewhere(site: Path, page: Page) -> None:
    wrong: list[str] = []
    outside: list[str] = []
    page.on("console", lambda said: wrong.append(f"{page.url}: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else outside.append(asked.url))
    links: dict[str, list[str]] = {}
    anchors: dict[Path, set[str]] = {}
    files = sorted(site.rglob("*.html"))
    assert len(files) > 50
    page.set_viewport_size({"width": min(WIDTHS), "height": 900})
    for file in files:
        page.goto(file.as_uri())
        links[file.as_uri()] = page.eval_on_selector_all("a[href]", "all => all.map(one => one.href)")
        anchors[file] = set(page.eval_on_selector_all("[id]", "all => all.map(one => one.id)"))
        if page.evaluate("document.documentElement.scrollWidth") > min(WIDTHS):
            wrong.append(f"{file.name} must be scrolled sideways on a telephone")
        images = page.eval_on_selector_all("img", "all => all.filter(one => !one.naturalWidth).map(one => one.src)")
        wrong += [f"{file.name}: {image} is no picture" for image in images]
    for at, targets in links.items():
        wrong += [f"{at}: {target}: {why}" for target in set(targets) if (why := _broken(target, anchors))]
    assert not outside, "the site asks for nothing that is not in it"
    assert not wrong, "\n".join(wrong)


def test_the_words_of_a_warning_are_found(site: Path, page: Page) -> None:
    page.goto((site / "search.html").as_uri() + "?q=pinned")
    page.wait_for_selector("#search-results a:text-is('Warnings')")


def _broken(target: str, anchors: dict[Path, set[str]]) -> str:
    """What is wrong with a link; "" where it leads somewhere. Links to elsewhere are looked at, and not followed."""
    address, anchor = urldefrag(target)
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        return "" if parts.scheme == "https" and "." in parts.netloc else "no https address"
    if parts.scheme != "file":
        return "neither a page nor an https address"
    file = Path(unquote(parts.path))
    if not file.is_file():
        return "there is no such file"
    known = anchors.get(file)
    return "" if not anchor or known is None or unquote(anchor) in known else "the page has no such anchor"


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_as_wide_as_the_window(width: int, site: Path, page: Page) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({"width": width, "height": 900})
    for name in LOOKED_AT:
        page.goto((site / f"{name}.html").as_uri())
        page.screenshot(path=SCREENSHOTS / f"{name.replace('/', '-')}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} must be scrolled sideways"
