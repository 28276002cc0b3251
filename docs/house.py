"""Draws the rooms of the package and what each stands on: ``python docs/house.py`` writes ``docs/house.svg``.

The rows are the layers that the import contracts of ``pyproject.toml`` allow, from the top down; an arrow is an import that is
there. What follows from other arrows is left out, and so is what every room may use (errors, files, the version).
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_remat"
OUT = Path(__file__).with_suffix(".svg")

WIDTH, TOP, GAP, BOX_WIDTH, BOX_HEIGHT, ROW = 1210, 16, 14, 158, 80, 114
LETTERS, LINES = 23, 4
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;fill:#1f2328}.name{font-size:15px;font-weight:bold}.what{font-size:11px}"
    "rect{fill:#eef4fb;stroke:#3b6ea5;rx:6}path{fill:none;stroke:#8a94a0}.paper{fill:#fff;stroke:none}"
)
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" style="fill:#8a94a0"/></marker></defs>'
)


def layers() -> list[list[str]]:
    """The rooms in rows, top first: all that have a docstring for people, and not a name for the package itself."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (house,) = [one["layers"] for one in contracts if one.get("containers") == [PACKAGE]]
    rows = [[name.strip() for name in row.split("|")] for row in house]
    shown = [[name for name in row if not name.startswith("_") or name == "_rematerialize"] for row in rows]
    return [row for row in shown if row and row != ["errors"]]


def about(room: str) -> list[str]:
    """As much of the first sentence of a room's docstring as has room, in lines."""
    path = ROOT / PACKAGE / room
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    parts = re.split(r"(?<=[.?])\s|(?<=:)\s", docstring.replace("`", "").removeprefix(f"{room.strip('_')}: "))
    found = parts[0]
    for part in parts[1:]:
        if found[-1] in ".?" or len(textwrap.wrap(f"{found} {part}", LETTERS)) > LINES:
            break
        found = f"{found} {part}"
    found = found.rstrip(".:,")
    return textwrap.wrap(found[0].upper() + found[1:], LETTERS)


def arrows(rooms: set[str]) -> list[tuple[str, str]]:
    """Who imports whom, less what follows from the others."""
    found = grimp.build_graph(PACKAGE, exclude_type_checking_imports=False)
    imports: nx.DiGraph = nx.DiGraph()
    for one in rooms:
        for other in rooms - {one}:
            importer, imported = f"{PACKAGE}.{one}", f"{PACKAGE}.{other}"
            if found.direct_import_exists(importer=importer, imported=imported, as_packages=True):
                imports.add_edge(one, other)
    return sorted(nx.transitive_reduction(imports).edges)


def picture() -> str:
    """The house as SVG."""
    rows = layers()
    places: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (WIDTH - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        places.update({name: (left + i * (BOX_WIDTH + GAP), TOP + level * ROW) for i, name in enumerate(row)})
    height = TOP + (len(rows) - 1) * ROW + BOX_HEIGHT + TOP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f"<style>{STYLE}</style>",
        TIP,
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
    ]
    middle = BOX_WIDTH / 2
    for one, other in arrows(set(places)):
        (x, y), (x_end, y_end) = places[one], places[other]
        start, end, bend = y + BOX_HEIGHT, y_end, (ROW - BOX_HEIGHT) * 0.8
        lines.append(
            f'<path d="M{x + middle:g} {start:g}C{x + middle:g} {start + bend:g} {x_end + middle:g} {end - bend:g} '
            f'{x_end + middle:g} {end:g}" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in places.items():
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        lines.append(f'<text class="name" x="{x + 9:g}" y="{y + 19:g}">{name.strip("_")}</text>')
        for i, text in enumerate(about(name)):
            lines.append(f'<text class="what" x="{x + 9:g}" y="{y + 34 + 13 * i:g}">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
