"""How tables of numbers are laid out in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table


def numbers_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    text: Collection[str] | None = None,
    caption: str | None = None,
) -> Table:
    """A table whose columns are numbers, to the right, but for those named in ``text``: the first, unless given."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        left = column in (columns[:1] if text is None else text)
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def wide_console(least: int = 150) -> Console:
    """A console of at least so many columns: a table's row is one line in a file, and in a narrow terminal too."""
    console = Console()
    console.width = max(console.width, least)
    return console
