"""What command lines have in common: options, and the body of a script that prints tables, writes a file and draws."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from benchmarks.common.results import RESULTS, stamp, write
from benchmarks.common.tables import wide_console


def command_line(description: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """Of options, whose help begins with a module's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=description, formatter_class=raw)


def add_networks(parser: argparse.ArgumentParser, choices: Sequence[str] | None = None, default: str = "all") -> None:
    """``--network`` or ``--networks``, one name or several, once or more often; ``None`` unless given.

    Args:
        parser: gets it.
        choices: what may be named; anything, unless given.
        default: what is taken otherwise, in words.
    """
    parser.add_argument(
        "--network",
        "--networks",
        dest="networks",
        metavar="NETWORK",
        nargs="+",
        action="extend",
        choices=choices,
        help=(f"of {', '.join(choices)}; " if choices else "") + f"default: {default}",
    )


def script(
    name: str,
    description: str | None,
    quick: str,
    run: Callable[[bool, Console], dict[str, Any]],
    present: Callable[[dict[str, Any]], Iterable[RenderableType]],
    picture: Callable[[dict[str, Any], Path], bool],
    packages: Iterable[str],
    arguments: Sequence[str] | None,
) -> int:
    """The body of the ``main`` of a script that redoes a paper's tables.

    Args:
        name: of the JSON file and the picture.
        description: the script's docstring.
        quick: what ``--quick`` leaves, in words.
        run: takes whether it is quick and a console for progress; returns what goes into the file.
        present: the tables and lines to print.
        picture: draws to a path; returns whether it could.
        packages: whose versions are noted.
        arguments: those of the command line unless given.

    Returns:
        An exit code.
    """
    parser = command_line(description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the JSON file, by default {name}.json ({name}-quick.json); the picture goes beside it",
    )
    options = parser.parse_args(arguments)
    console = wide_console()
    data = run(options.quick, Console(stderr=True)) | {"quick": options.quick} | stamp(packages)
    for part in present(data):
        console.print(part, highlight=False)
    out: Path = options.out or RESULTS / "papers" / f"{name}{'-quick' if options.quick else ''}.json"
    write(out, data)
    written = [str(out)]
    if picture(data, out.with_suffix(".png")):
        written.append(str(out.with_suffix(".png")))
    console.print("written: " + ", ".join(written), soft_wrap=True, markup=False)
    return 0
