"""One page of Markdown from the JSON files of the suite.

python -m benchmarks.gpu.table [FOLDER]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.gpu.part import FAULTS, Part, faults
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import read
from lightning_remat._disk import replace_file

RESULTS = results.RESULTS / "gpu"
PAGE = "README.md"


def page(folder: Path) -> str:
    """The page: a section for each part of which there are results.

    Raises:
        ValueError: where a file is something else.
    """
    found = [(part, read(path)) for part in PARTS.values() if (path := folder / f"{part.name}.json").exists()]
    dry = any(data["dry_run"] for _, data in found)
    title = "# Dry run on the CPU" if dry else "# On a GPU"
    lines = [title, ""]
    if dry:
        lines += ["**It shows that the suite runs, on tiny networks, and says nothing about a GPU.**", ""]
    lines += ["Written by `benchmarks/gpu.sh`; what each part does is in `benchmarks/gpu`.", ""]
    everything = [one for _, data in found for one in data["cases"].values()]
    lines += [f"In all: {tally(everything)}.", ""]
    for part, data in found:
        lines += _section(part, data)
    return "\n".join(lines).rstrip() + "\n"


def tally(ones: Iterable[Mapping[str, Any]]) -> str:
    """How many results, and of each fault: "140 results (132 ok, 8 skipped): 0 mismatches, 1 steps over budget, ..."."""
    found = list(ones)
    statuses = Counter(one["status"] for one in found if not faults(dict(one)))
    right = ", ".join(f"{count} {status}" for status, count in statuses.most_common()) or "none ok"
    counts = (f"{sum(fault in faults(dict(one)) for one in found)} {said}" for fault, said in FAULTS.items())
    return f"{len(found)} results ({right}): {', '.join(counts)}"


def _section(part: Part, data: Mapping[str, Any]) -> list[str]:
    cases, environments = data["cases"], data["environments"]
    lines = [f"## {part.title}", "", part.about, "", part.table(cases), ""]
    undetermined = sorted({one["nondeterministic"] for one in cases.values() if one.get("nondeterministic")})
    if undetermined:
        lines += [f"Without a deterministic kernel: {', '.join(undetermined)}.", ""]
    for name, environment in environments.items():
        here = [one["date"] for one in cases.values() if one["environment"] == name]
        lines += [f"{len(here)} results, {min(here)[:10]} to {max(here)[:10]}: {_where(environment)}.", ""]
    return lines


def _where(environment: Mapping[str, Any]) -> str:
    versions = environment["versions"]
    shown = [
        f"{name} {versions[name]}" for name in ("torch", "lightning", "transformers", "python") if name in versions
    ]
    card = [environment[name] for name in ("card",) if environment.get(name)] or [environment["device"]]
    driver = [f"driver {environment['driver']}"] if environment.get("driver") else []
    return ", ".join([*card, *driver, *shown, f"sources {environment['sources']}"])


def write(folder: Path) -> Path:
    """Write the page beside the files; returns where."""
    path = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, page(folder))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS))
