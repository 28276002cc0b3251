"""The pages of errors and warnings speak of all that there are, and of nothing else."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from lightning_remat import errors
from tests.docs.messages import matches, raised, spoken, text, warned
from tests.helpers.places import ROOT

PAGES = ROOT / "docs" / "reference"
MADE_ELSEWHERE = {
    "callbacks/check.py": ("…, checked: …",),
    "callbacks/remat.py": ("nothing can be planned on torch …", "a step of … took …"),
    "lightning_remat/runtime/_plain_step.py": ("nothing can be planned on torch …",),
    "lightning_remat/solvers/portfolio/_auto.py": ("…: what it found breaks a rule, …",),
    "lightning_remat/capture/tracing/_messages.py": (),  # the user's own warnings
}
"""Files whose warnings have no words of their own in the call, and the beginnings of their entries."""


def entries() -> dict[str, str]:
    """Of each warning on the page its message and what is said of it."""
    page = (PAGES / "warnings.md").read_text(encoding="utf-8")
    return {found[1]: found[2] for found in re.finditer(r"^- \*\*`(.+)`\*\*\\?\n((?:  .+\n)+)", page, re.MULTILINE)}


def test_each_error_has_an_entry() -> None:
    page = (PAGES / "errors.md").read_text(encoding="utf-8")
    classes = {name for name, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__}
    assert classes == set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE))


def test_the_messages_of_errors_are_what_is_raised() -> None:
    page = (PAGES / "errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r"\*\*`(.+?)`\*\*", page)
    said = list(raised())
    assert len(quoted) > 15
    assert not [one for one in quoted if not any(matches(f"{one.rstrip('…')}…", words) for words in said)]


def test_the_reasons_of_what_is_not_captured_are_what_is_said() -> None:
    page = (PAGES.parent / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("\n## Could not be captured\n")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    said = list(spoken())
    assert len(quoted) > 10
    assert not [one for one in quoted if not any(matches(f"…{one.strip('…')}…", words) for words in said)]


def test_each_warning_has_an_entry_and_each_entry_a_warning() -> None:
    found = entries()
    said = list(warned())
    assert len(said) > 40 and len(found) > 40
    worded = [(file, words) for file, words in said if re.search(r"\w{3,} \w", words)]
    missing = [(file, words) for file, words in worded if not any(matches(entry, words) for entry in found)]
    assert not missing, f"docs/reference/warnings.md does not speak of {missing}"
    unworded = {file for file, words in said if (file, words) not in worded}
    assert unworded == set(MADE_ELSEWHERE)
    elsewhere = [begin for begins in MADE_ELSEWHERE.values() for begin in begins]
    assert all(any(entry.startswith(begin.rstrip("…")) for entry in found) for begin in elsewhere)
    gone = [
        entry
        for entry in found
        if not any(matches(entry, words) for _, words in worded)
        and not any(entry.startswith(begin.rstrip("…")) for begin in elsewhere)
    ]
    assert not gone, f"nothing in the source says {gone}"


def test_each_entry_says_cause_and_remedy() -> None:
    assert not [message for message, body in entries().items() if "*Cause:*" not in body or "*Remedy:*" not in body]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("'it is %s, and %d'", "it is …, and …"),
        ("f'{name} is {other!r}' ' gone'", "… is … gone"),
        ("words", "…"),
    ],
)
def test_the_words_of_a_call(source: str, said: str) -> None:
    assert text(ast.parse(source, mode="eval").body) == said


def test_an_entry_may_leave_out_words() -> None:
    assert matches("only … left", "only a part of … is left")
    assert not matches("only … left", "nothing is left")
