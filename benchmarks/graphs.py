"""The default planner on a folder of captured graphs: how long it plans, what it costs, and how far from optimal it can be.

    python -m benchmarks.graphs tests/data/h100                     # at shares 0.7 and 0.5, and at the smallest peak
    python -m benchmarks.graphs FOLDER --shares 0.6 --no-min --out benchmarks/results/graphs.json

Graphs are files that `ComputationGraph.save` wrote, `.json`, or `.json.xz`. Those of `tests/data/h100` were captured on an H100
(bfloat16, sizes `"gpu"` of `benchmarks.networks`), with costs measured there. A share is of what activations take without
rematerialization, as a callback's budget such as `"50%"`. Seconds are the wall's and, in brackets, the processor's, which say
more on a busy machine; those at "min" count the search for the smallest peak in. The gap is to the solution's bound.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.results import stamp, write
from benchmarks.common.tables import numbers_table, wide_console
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._make import SMALLEST_SHARE, seconds_left
from lightning_remat.solvers import Problem, Solution, Status, find_smallest, solve

PACKAGES = ("lightning_remat", "mip", "numpy")


def load(path: Path) -> ComputationGraph:
    """A graph's file, compressed or not."""
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return ComputationGraph.from_dict(json.load(file))
    return ComputationGraph.load(path)


def plan_all(name: str, graph: ComputationGraph, shares: Sequence[float], smallest: bool, limit: float) -> list[Any]:
    """A row for each share, and one for the smallest peak."""
    problem = Problem(graph)
    plain = problem.evaluate(problem.captured)
    room = plain.peak_bytes - graph.floor_bytes
    rows = []

    def row(budget: float | str, begun: tuple[float, float], solution: Solution) -> None:
        found = solution.schedule is not None
        rows.append(
            {
                "network": name,
                "nodes": len(problem),
                "budget": budget,
                "status": solution.status.value,
                "overhead": solution.seconds / plain.seconds - 1 if found else None,
                "gap": solution.gap if found else None,
                "peak_bytes": solution.peak_bytes if found else None,
                "peak_share": (solution.peak_bytes - graph.floor_bytes) / room if found else None,
                "wall_seconds": time.monotonic() - begun[0],
                "cpu_seconds": time.process_time() - begun[1],
                "method": solution.method,
                "note": "" if found else solution.notes[0],
            }
        )

    for share in shares:
        begun = (time.monotonic(), time.process_time())
        row(share, begun, solve(graph, graph.floor_bytes + int(share * room), time_limit=limit))
    if smallest:
        begun = (time.monotonic(), time.process_time())
        least = find_smallest(graph, SMALLEST_SHARE * limit)
        row("smallest peak", begun, least)
        left = seconds_left(limit, least.solve_seconds)
        row("min", begun, solve(graph, least.peak_bytes, time_limit=left, known=least))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What is printed."""
    columns = ("network", "nodes", "budget", "status", "overhead %", "gap %", "peak GiB", "share", "seconds", "by")
    shown = numbers_table("planned with default options", columns, text=("network", "budget", "status", "by"))
    for one in rows:
        found = one["status"] in (Status.OPTIMAL.value, Status.FEASIBLE.value)
        numbers = ["-"] * 4
        if found:
            numbers = [f"{100 * one['overhead']:.2f}", f"{100 * one['gap']:.2f}"]
            numbers += [f"{one['peak_bytes'] / 2**30:.3f}", f"{one['peak_share']:.3f}"]
        seconds = f"{one['wall_seconds']:.1f} ({one['cpu_seconds']:.1f})"
        by = one["method"] if found else one["note"]
        shown.add_row(one["network"], f"{one['nodes']:,}", str(one["budget"]), one["status"], *numbers, seconds, by)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the graphs, print the table, write the file."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="of the graphs' files")
    add_networks(parser, default="all files; named without their endings")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.7, 0.5])
    parser.add_argument("--no-min", action="store_true", help="not at the smallest peak")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each search")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    files = {path.name.split(".")[0]: path for path in sorted(options.folder.glob("*.json*"))}
    console = wide_console()
    rows: list[Any] = []
    load_before = os.getloadavg()[0]
    for name in options.networks or files:
        begun = len(rows)
        rows += plan_all(name, load(files[name]), options.shares, not options.no_min, options.time_limit)
        console.print(table(rows[begun:]), highlight=False)
    if options.out:
        facts = {"rows": rows, "time_limit": options.time_limit, "load": [load_before, os.getloadavg()[0]]}
        write(options.out, facts | stamp(PACKAGES))
        console.print(f"written: {options.out}", soft_wrap=True, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
