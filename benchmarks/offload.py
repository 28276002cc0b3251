"""What host memory saves: the recorded graphs within small budgets, without copies to the host and with them.

    python -m benchmarks.offload                                   # the graphs of tests/data/h100: most of an hour
    python -m benchmarks.offload --networks gpt2 --speeds 25 --budgets min

Ops' times are those measured on an H100. The speed of copies is assumed: 25 and 50 GB/s in each direction at once, about what
PCIe 4 and 5 give, and 20 microseconds for any. Nothing runs: seconds are those that three clocks pass, of the ops and of the
copies in either direction (`lightning_remat.schedule.simulate`). Budgets are the smallest peak that was found without copies
("min"); 1.1 and 1.25 times that, and a quarter and a sixth of what activations take, all above the floor (parameters,
gradients and what else no schedule changes). Overhead is the step's time over that without rematerialization, less one. Both
plans start from the same schedule, that of the smallest peak, and the one with copies begins at the other.

Beside what is found stands what the linear program says that could be at best where ops run in about the captured order and
what the forward makes is copied (`OffloadProgram.expect_order`). It knows the speed of copies and a few moments at which the
budget binds, evaluates parts of ops, and is told nothing of the other moments: no schedule can be far below it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.results import RESULTS, stamp, write
from benchmarks.common.tables import numbers_table, wide_console
from benchmarks.graphs import load
from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.schedule import simulate
from lightning_remat.solvers import Problem, find_smallest, offloaded, solve
from lightning_remat.solvers.bounds._binding_moments import choose
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.offload._program import OffloadProgram

PACKAGES = ("lightning_remat", "mip", "numpy")

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "h100"

BUDGETS = ("min", "1.1 x min", "1.25 x min", "1/4", "1/6")

HOST_BYTES, LATENCY = 256 * 2**30, 20e-6
"""What else is assumed of the host: bytes for the step, and seconds of any copy."""


def rows_of(
    name: str, graph: ComputationGraph, budgets: Sequence[str], speeds: Sequence[float], limit: float
) -> list[dict[str, Any]]:
    """A row for each budget that is not below the smallest peak, and each speed in GB/s."""
    problem = Problem(graph)
    plain = problem.evaluate(problem.captured)
    smallest = find_smallest(graph, limit)
    floor, room = graph.floor_bytes, plain.peak_bytes - graph.floor_bytes
    least = smallest.peak_bytes - floor
    sizes = {
        "min": least,
        "1.1 x min": int(1.1 * least),
        "1.25 x min": int(1.25 * least),
        "1/4": room // 4,
        "1/6": room // 6,
    }
    rows = []
    for label in budgets:
        if sizes[label] < least:
            continue
        budget = floor + sizes[label]
        without = solve(graph, budget, time_limit=limit, known=smallest)
        for speed in speeds:
            host = Host(HOST_BYTES, speed * 1e9, speed * 1e9, LATENCY)
            copying = graph.replace(host=host)
            found = solve(copying, budget, time_limit=limit, known=without, offload="host")
            assert found.schedule is not None
            timeline = simulate(copying, found.schedule)
            ran = sum(graph.ops[op].seconds * count for op, count in found.schedule.evaluations.items())
            rows.append(
                {
                    "network": name,
                    "nodes": len(problem),
                    "budget": label,
                    "budget_bytes": budget,
                    "gigabytes_a_second": speed,
                    "without": without.seconds / plain.seconds - 1,
                    "with": found.seconds / plain.seconds - 1,
                    "waits": (found.seconds - ran) / plain.seconds,
                    "bound_without": without.lower_bound_seconds / plain.seconds - 1,
                    "bound_with": found.lower_bound_seconds / plain.seconds - 1,
                    "at_best": in_order(copying, budget) / plain.seconds - 1,
                    "host_bytes": timeline.host_bytes,
                    "tensors": len(offloaded(found.schedule)),
                    "seconds_without": without.solve_seconds,
                    "seconds_with": found.solve_seconds,
                }
            )
    return rows


def in_order(graph: ComputationGraph, budget_bytes: int, limit: float = 60.0) -> float:
    """Seconds of the step by the linear program for schedules in about the captured order."""
    problem = Problem(graph)
    moments, _ = choose(problem, budget_bytes, clock() + limit)
    with contextlib.closing(OffloadProgram(graph, problem, moments[-1])) as program:
        program.expect_order()
        seconds = program.bound(budget_bytes, limit)
    assert seconds is not None
    return seconds


def ratio(row: dict[str, Any], key: str = "with") -> float:
    """What is left of the overhead."""
    return max(0.0, float(row[key] / row["without"])) if row["without"] > 0 else 1.0


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What is printed."""
    columns = (
        "network",
        "budget",
        "GiB",
        "GB/s",
        "overhead %",
        "with copies %",
        "left",
        "waits %",
        "at best %",
        "bound %",
        "on host GiB",
    )
    shown = numbers_table("overhead of the step without copies to the host and with them", columns, text=columns[:2])
    for one in rows:
        shares = [f"{100 * one[key]:.1f}" for key in ("without", "with")]
        rest = [f"{ratio(one):.2f}", *(f"{100 * one[key]:.1f}" for key in ("waits", "at_best", "bound_with"))]
        sizes = f"{one['budget_bytes'] / 2**30:.2f}", f"{one['gigabytes_a_second']:g}"
        shown.add_row(one["network"], one["budget"], *sizes, *shares, *rest, f"{one['host_bytes'] / 2**30:.2f}")
    return shown


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same, for a page: both speeds in one row."""
    speeds = sorted({one["gigabytes_a_second"] for one in rows})
    heads = ["network", "budget", "GiB", "without"]
    heads += [head for speed in speeds for head in (f"with, {speed:g} GB/s", "at best")]
    lines = [
        "Overhead of the step in percent, without copies to the host and with them; in brackets, what is left of it.",
        "The copies' speed is assumed, the ops' times were measured on an H100 (`benchmarks/offload.py`). At best: what a",
        "linear program says that no schedule in about the captured order can be far below.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * 2}{'---:|' * (len(heads) - 2)}",
    ]
    for key in dict.fromkeys((one["network"], one["budget"]) for one in rows):
        mine = [one for one in rows if (one["network"], one["budget"]) == key]
        cells = [f"{100 * one[key]:.1f} ({ratio(one, key):.2f})" for one in mine for key in ("with", "at_best")]
        size, overhead = f"{mine[0]['budget_bytes'] / 2**30:.2f}", f"{100 * mine[0]['without']:.1f}"
        lines.append(f"| {' | '.join([*key, size, overhead, *cells])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the graphs, print the table, write the files."""
    parser = command_line(__doc__)
    add_networks(parser, default="all files of tests/data/h100")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the graphs' files")
    parser.add_argument("--budgets", nargs="*", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--speeds", nargs="*", type=float, default=[25.0, 50.0], help="GB/s in each direction")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each search")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "offload-h100.json", help="a page of the table goes beside it"
    )
    options = parser.parse_args(arguments)
    files = {path.name.split(".")[0]: path for path in sorted(options.folder.glob("*.json*"))}
    console = wide_console()
    rows: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    for name in options.networks or files:
        begun = len(rows)
        rows += rows_of(name, load(files[name]), options.budgets, options.speeds, options.time_limit)
        console.print(table(rows[begun:]), highlight=False)
        facts = {"rows": rows, "time_limit": options.time_limit, "load": [load_before, os.getloadavg()[0]]}
        write(options.out, facts | stamp(PACKAGES))
        options.out.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    console.print(f"written: {options.out}", soft_wrap=True, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
