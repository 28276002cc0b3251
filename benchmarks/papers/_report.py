"""What the scripts of this folder have in common: options, where and when they ran, what they print and write."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

RESULTS = Path(__file__).resolve().parents[1] / "results" / "papers"


def stamp(packages: Iterable[str]) -> dict[str, Any]:
    """Machine, date, and versions of Python and of those ``packages`` that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": {"system": platform.system(), "processor": platform.processor() or platform.machine()},
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def script(
    name: str,
    description: str | None,
    quick: str,
    run: Callable[[bool, Console], dict[str, Any]],
    present: Callable[[dict[str, Any]], Iterable[RenderableType]],
    picture: Callable[[dict[str, Any], Path], bool],
    packages: Iterable[str],
    argv: Sequence[str] | None,
) -> int:
    """The body of a script's ``main``.

    Args:
        name: of the JSON file and the picture.
        description: the script's docstring.
        quick: what ``--quick`` leaves, in words.
        run: takes whether it is quick and a console for progress; returns what goes into the file.
        present: the tables and lines to print.
        picture: draws to a path; returns whether it could.
        packages: whose versions are noted.
        argv: arguments; those of the command line unless given.

    Returns:
        An exit code.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the JSON file, by default {name}.json ({name}-quick.json); the picture goes beside it",
    )
    options = parser.parse_args(argv)
    console = Console()
    console.width = max(console.width, 150)
    data = run(options.quick, Console(stderr=True)) | {"quick": options.quick} | stamp(packages)
    for part in present(data):
        console.print(part, highlight=False)
    out: Path = options.out or RESULTS / f"{name}{'-quick' if options.quick else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    written = [str(out)]
    if picture(data, out.with_suffix(".png")):
        written.append(str(out.with_suffix(".png")))
    console.print("written: " + ", ".join(written), soft_wrap=True, markup=False)
    return 0
