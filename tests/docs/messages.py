"""What the source warns of: each call's text, with … where a value goes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers.places import ROOT

WARNS = {"warning", "warn", "warn_explicit", "rank_zero_warn"}
SPEAKERS = {"log", "logger", "warnings"}


def warned() -> Iterator[tuple[str, str]]:
    """Of each call that warns: its file, and its text; "…" alone where that is made elsewhere."""
    for name, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _warns(node.func):
                yield name, text(node.args[0])


def raised() -> Iterator[str]:
    """The words of each error that the source makes."""
    for _, tree in _sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id.endswith("Error")
                and node.args
            ):
                yield text(node.args[0])


def spoken() -> Iterator[str]:
    """All strings of the source."""
    for _, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                yield text(node)


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted([*(ROOT / "lightning_remat").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")]):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith("lightning_remat/callbacks/"):  # the link
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def _warns(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in WARNS and isinstance(function.value, ast.Name) and function.value.id in SPEAKERS
    return isinstance(function, ast.Name) and function.id in WARNS


def text(message: ast.expr) -> str:
    """A message's words, with … for what is filled in."""
    if isinstance(message, ast.Constant):
        said = re.sub(r"%[-#0-9.,]*[sdrgf]", "…", str(message.value))
    elif isinstance(message, ast.JoinedStr):
        said = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in message.values)
    else:
        said = "…"
    return re.sub(r"…+", "…", said)


def matches(entry: str, said: str) -> bool:
    """Whether an entry, with … for anything, is of a message."""
    return re.fullmatch(".*".join(map(re.escape, entry.split("…"))), said) is not None
