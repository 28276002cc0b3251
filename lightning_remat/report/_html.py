"""Pieces of a page: its frame, cards of numbers, tables, lists. Texts are escaped here, and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { color-scheme: light; --ink: #1d232b; --quiet: #5c6570; --line: #e3e6ea; --blue: #0072b2; --red: #b94a00; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 56px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 14px 0 0; font-weight: 600; }
p { margin: 4px 0 10px; }
.quiet { color: var(--quiet); font-size: 13.5px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 18px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 20px; line-height: 1.3; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.card span { color: var(--quiet); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; vertical-align: bottom; line-height: 1.25; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: break-word; min-width: 120px; max-width: 340px; }
th { white-space: normal; min-width: 66px; }
tr:last-child td { border-bottom: 0; }
tr.chosen td { font-weight: 600; color: var(--red); }
ol, ul { margin: 6px 0; padding-left: 22px; }
li { margin: 5px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 2px; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
.legend span { overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--quiet); font-size: 13.5px; }
@media (max-width: 640px) {
  main { padding: 18px 12px 40px; }
  section { padding: 14px 12px; }
  h1 { font-size: 21px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  .card { padding: 10px; }
  .card b { font-size: 17px; }
}
"""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; font-src data:"
"""What the page may load, which is nothing: all of it is in the file."""


def text(value: object) -> str:
    """A text as it stands, whatever characters are in it."""
    return html.escape(str(value))


def page(title: str, body: str, scripts: Iterable[str] = ()) -> str:
    """A whole page of a title, its body, and scripts that are in it."""
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n{code}</body>\n</html>\n"
    )


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Numbers: what each is, the number, and a word beneath it."""
    made = []
    for name, number, beneath in items:
        broken = text(number).replace(":", ":<wbr>")
        made.append(f'<div class="card"><span>{text(name)}</span><b>{broken}</b><span>{text(beneath)}</span></div>')
    return f'<div class="cards">{"".join(made)}</div>'


def section(title: str, *parts: str, about: str = "") -> str:
    """A part of the page, with a sentence about it."""
    words = f'<p class="quiet">{text(about)}</p>' if about else ""
    return f"<section><h2>{text(title)}</h2>{words}{''.join(parts)}</section>"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1, chosen: Sequence[int] = ()) -> str:
    """A table.

    Args:
        headings: of the columns.
        rows: cells.
        words: how many columns, from the left, hold words; the others hold numbers.
        chosen: the rows to be marked.
    """

    def cell(tag: str, column: int, value: object) -> str:
        if column >= words:
            return f"<{tag}>{text(value)}</{tag}>"
        broken = (
            text(value).replace(".", ".<wbr>").replace("_", "_<wbr>")
        )  # where a long name may go on in the next line
        return f'<{tag} class="words">{broken}</{tag}>'

    head = "".join(cell("th", i, heading) for i, heading in enumerate(headings))
    marks = [' class="chosen"' if number in chosen else "" for number in range(len(rows))]
    lines = ["".join(cell("td", i, value) for i, value in enumerate(row)) for row in rows]
    body = "".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines, strict=True))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def points(items: Iterable[str], ordered: bool = False) -> str:
    """A list of sentences."""
    tag = "ol" if ordered else "ul"
    return f"<{tag}>{''.join(f'<li>{text(item)}</li>' for item in items)}</{tag}>"


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Colours, and what they stand for."""
    made = (f'<span><i style="background:{colour}"></i>{text(name)}</span>' for colour, name in items)
    return f'<div class="legend">{"".join(made)}</div>'
