"""Code blocks of Markdown pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.helpers.places import ROOT

NOT_RUN = "*Not run by the tests:"
"""Begins the paragraph before a block that cannot run here."""


class Block(NamedTuple):
    """A code block: its language, its text, the line that it begins on, and whether the tests run it."""

    language: str
    text: str
    line: int
    runs: bool


def pages() -> list[str]:
    """All pages with code, from the repository's folder; generated ones have their own tests."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found if "generated" not in page.parts]


def blocks(page: str) -> Iterator[Block]:
    """The fenced code blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: fence.start()]
        paragraph = before.rstrip("\n").rpartition("\n\n")[2]
        yield Block(fence[1], fence[2], before.count("\n") + 2, NOT_RUN not in paragraph)


def commands(page: str) -> Iterator[list[str]]:
    """Arguments of each line of the page's blocks for a shell that calls ``lightning-remat``, and that the tests look at."""
    for block in blocks(page):
        if block.language in ("bash", "console", "sh") and block.runs:
            lines = block.text.replace("\\\n", " ").splitlines()
            yield from (shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lightning-remat "))
