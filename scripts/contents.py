"""What a wheel and an sdist hold, against what they should: every file of the package, once, and nothing else."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "lightning_remat"

TOP = "callbacks"
"""A folder at the top that the package has a link to; a wheel has its files in the link's place."""

BESIDE = {"LICENSE", "README.md", "pyproject.toml", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
"""What an sdist has beside the package."""

METADATA = {"METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}
"""What a wheel has beside the package, in its ``dist-info``."""


def sources(root: Path) -> set[str]:
    """The files of the package in a source tree, as an sdist names them: modules, and ``py.typed``."""
    return {
        (Path(folder) / name).relative_to(root).as_posix()
        for top in (PACKAGE, TOP)
        for folder, _, names in os.walk(root / top)  # which follows no link
        for name in names
        if name.endswith(".py") or name == "py.typed"
    }


def in_wheel(name: str) -> str:
    """How a wheel names a file of the source tree."""
    return f"{PACKAGE}/{name}" if name.startswith(f"{TOP}/") else name


def wrong_with_wheel(names: Iterable[str], expected: set[str]) -> list[str]:
    """What is amiss with the files of a wheel, a line each.

    Args:
        names: the files in it.
        expected: of the source tree (:func:`sources`).
    """
    inside = {in_wheel(name) for name in expected}
    names = list(names)
    beside = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    found = [name for name in names if name not in beside]
    return _wrong([*found, *(name.partition("/")[2] for name in beside)], inside | METADATA)


def wrong_with_sdist(names: Iterable[str], expected: set[str]) -> list[str]:
    """Likewise of an sdist, whose files are named without the folder that they all lie in."""
    found = [name for name in names if not name.startswith(f"{PACKAGE}.egg-info/")]
    return _wrong(found, expected | BESIDE)


def _wrong(found: list[str], expected: set[str]) -> list[str]:
    return [
        *(f"lacks {name}" for name in sorted(expected - set(found))),
        *(f"has {name}, which does not belong there" for name in sorted(set(found) - expected)),
        *(f"has {name} {times} times" for name, times in sorted(Counter(found).items()) if times > 1),
    ]


def wheel_names(wheel: Path) -> list[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def sdist_names(sdist: Path) -> list[str]:
    """The files and links in an sdist, less the folder that they all lie in."""
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive if not member.isdir()]


def different(wheel: Path, root: Path) -> list[str]:
    """The files of the source tree that a wheel does not have, or has otherwise."""
    held = set(wheel_names(wheel))
    with zipfile.ZipFile(wheel) as archive:
        return sorted(
            name
            for name in sources(root)
            if in_wheel(name) not in held or archive.read(in_wheel(name)) != (root / name).read_bytes()
        )
