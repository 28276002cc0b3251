"""Pages that are generated: options and commands from the code, results and examples from their folders.

``write_pages`` writes them as Markdown; ``rewritten`` has links that leave `docs/` lead to them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from rich.table import Table

from lightning_remat.callbacks import RematBatchSizeFinder, RematCallbackConfig
from lightning_remat.cli._main import _parser
from lightning_remat.planner import RematConfig

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
"""The target of a Markdown link, and its anchor."""

RESULTS = {
    "gpu": "On a GPU",
    "ddp-cpu": "DDP on two processes",
    "devices-h100": "Many devices, simulated",
    "fused-cpu": "Ops in one kernel",
    "launches-cpu": "What a step costs in Python",
    "offload-h100": "Tensors on the host",
}
"""Titles of tables that benchmarks have written, where these have none; others go by their file's name."""

PAPERS = ("checkmate", "kumar", "kusumoto", "hiremate", "offload")
"""Scripts of `benchmarks/papers`, each with its results beside the paper's."""


def site_pages() -> dict[Path, str]:
    """Files of the repository outside of `docs/` that have a page, and its name."""
    results = sorted((ROOT / "benchmarks" / "results").rglob("*.md"))
    pages = {file: f"generated/results/{_name(file)}" for file in results}
    for page in sorted((ROOT / "examples").glob("*/README.md")):
        pages[page] = f"generated/examples/{page.parent.name}"
    if (gallery := ROOT / "examples" / "README.md").exists():
        pages[gallery] = "generated/examples/all"  # the first by name
    pages[ROOT / "CONTRIBUTING.md"] = "generated/contributing"
    pages[ROOT / "CHANGELOG.md"] = "generated/changelog"
    pages[ROOT / "README.md"] = "index"
    return pages


def _name(file: Path) -> str:
    return (file.parent.name if file.stem == "README" else file.stem).lower()


def rewritten(text: str, page: str, source: Path | None = None) -> str:
    """The Markdown of ``page`` with links that lead out of `docs/` led to pages of the site, where there are any.

    Args:
        text: the Markdown.
        page: its name, as Sphinx has it.
        source: the file that it is of, where that is not the page's own.
    """
    origin, place = (source or DOCS / f"{page}.md").parent, (DOCS / page).parent
    pages = site_pages()

    def led(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if target.startswith("/"):
            return link[0]
        aim = Path(os.path.normpath(origin / target))
        aim = aim / "README.md" if (aim / "README.md") in pages else aim
        aim = DOCS / f"{pages[aim]}.md" if aim in pages else aim
        return os.path.relpath(aim, place) + anchor

    with_links = LINK.sub(led, text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#]+)\)", lambda link: _without_dead_end(link, place), with_links)


def _without_dead_end(link: re.Match[str], place: Path) -> str:
    """A link as it is, or its text alone where it leads to a folder, or to Markdown that has no page."""
    aim = Path(os.path.normpath(place / link[2]))
    return link[1] if aim.is_dir() or (aim.suffix == ".md" and aim.exists() and DOCS not in aim.parents) else link[0]


def write_pages(folder: Path) -> None:
    """Write all generated pages below ``folder``; those that are as they were are left alone."""
    for name, text in _pages():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _pages() -> Iterator[tuple[str, str]]:
    yield "options", "\n".join(_options())
    yield "commands", "\n".join(_commands())
    for paper in PAPERS:
        yield f"papers/{paper}", "\n\n".join(_papers_tables(paper)) + "\n"
    for source, page in site_pages().items():
        name = page.removeprefix("generated/")
        if name == page:
            continue
        text = rewritten(source.read_text(encoding="utf-8"), page, source)
        if name.startswith("results/") and not text.startswith("# "):
            text = f"# {RESULTS.get(_name(source), _name(source))}\n\n{text}"
        elif (source.parent / "train.py").exists():
            text += _code(source.parent)
        yield name, text


def _code(folder: Path) -> str:
    """The program of an example, at the end of its page."""
    program = (folder / "train.py").read_text(encoding="utf-8")
    return f"\n## The program\n\n`{folder.relative_to(ROOT)}/train.py`\n\n```python\n{program}```\n"


def _papers_tables(paper: str) -> Iterator[str]:
    """What a paper's script prints, of the results that lie here."""
    data = json.loads((ROOT / "benchmarks" / "results" / "papers" / f"{paper}.json").read_text(encoding="utf-8"))
    for part in importlib.import_module(f"benchmarks.papers.{paper}").present(data):
        yield from _markdown(part) if isinstance(part, Table) else [f"- {str(part).strip()}"]


def _markdown(table: Table) -> Iterator[str]:
    """A table of the terminal as one of Markdown."""
    columns = [[_cell(str(cell)) for cell in (column.header, *column.cells)] for column in table.columns]
    heading, *rows = (f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))
    if table.title:
        yield f"**{' '.join(str(table.title).split())}**"
    yield "\n".join((heading, "|" + "---|" * len(columns), *rows))
    if table.caption:
        yield str(table.caption).strip().replace("yellow:", "bold:")


def _cell(text: str) -> str:
    """A cell without its line breaks; what is coloured in the terminal is bold."""
    return re.sub(r"\[yellow\](.*?)\[/\]", r"**\1**", " ".join(text.split())).replace("|", "\\|")


# -- options --------------------------------------------------------------------------------------------------------------


def described(thing: Callable[..., object], heading: str) -> dict[str, str]:
    """Names and descriptions below a heading (``Args``, ``Attributes``) of a docstring, as Markdown."""
    text = inspect.getdoc(thing) or ""
    found = re.search(rf"^{heading}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    entries = re.split(r"^(?=\w[\w, ]*: )", textwrap.dedent(found[1]) if found else "", flags=re.MULTILINE)
    split = (" ".join(entry.split()).partition(": ") for entry in entries if entry.strip())
    return {name: words.replace("``", "`") for names, _, words in split for name in names.split(", ")}


def _options() -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(RematCallbackConfig)}
    of_planning = {field.name for field in dataclasses.fields(RematConfig)}
    words = described(RematConfig, "Attributes") | described(RematCallbackConfig, "Attributes")
    for title, names in (
        ("Of planning: `RematCallback`, `rematerialize`", [name for name in fields if name in of_planning]),
        ("Of `RematCallback` alone", [name for name in fields if name not in of_planning]),
    ):
        rows = ((name, str(fields[name].type), _default(fields[name]), words[name]) for name in names)
        yield from _table(title, rows)
    finder = inspect.signature(RematBatchSizeFinder).parameters
    words = described(RematBatchSizeFinder, "Args")
    rows = ((name, str(one.annotation), repr(one.default), words[name]) for name, one in finder.items())
    yield from _table("Of `RematBatchSizeFinder`", rows)


def _default(field: dataclasses.Field[object]) -> str:
    return repr(field.default if field.default is not dataclasses.MISSING else field.default_factory())  # type: ignore[misc]


def _table(title: str, rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    yield f"\n## {title}\n\n| option | type | default | meaning |\n|---|---|---|---|"
    for name, kind, default, words in rows:
        yield f"| `{name}` | `{kind}` | `{default}` | {words} |".replace(" | None`", " or None`")


# -- commands -------------------------------------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """The commands of ``lightning-remat``, each with its own parser."""
    actions = _parser()._actions
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))


def _commands() -> Iterator[str]:
    with mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
        for name, parser in commands().items():
            yield f"\n## {name}\n\n```text\n{parser.format_help()}```"
