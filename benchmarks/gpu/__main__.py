"""Show on a GPU what can be shown there only: the tests marked so, bits, peaks, training, the compiler.

    benchmarks/gpu.sh                          # everything; a run that was stopped goes on where it was
    benchmarks/gpu.sh --only bits --networks gpt2 resnet18
    benchmarks/gpu.sh --only bits --matching "float16 autocast, 0.6"
    benchmarks/gpu.sh --minutes 9              # stop in time, and go on with the same command
    benchmarks/gpu.sh --device cpu             # a dry run on tiny networks: shows that the suite runs

Results go to benchmarks/results/gpu: a JSON file a part, and README.md with the tables. Exit status: 0 if all of it was run and
nothing is wrong; 1 for a mismatch, a step over its budget, a crash, a time-out or a failure, in this run or kept from one
before; 2 where it cannot run; 3 if there was no time for all.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.part import Case, Part, Result, Settings, faults
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Results
from benchmarks.gpu.table import RESULTS, tally, write
from benchmarks.gpu.workers import Runs

DRY_RESULTS = ROOT / "build" / "gpu-dry-run"
"""Where a dry run writes unless told otherwise: git ignores it."""

WRONG, CANNOT, UNFINISHED = 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write the page, and say what is wrong; returns an exit status."""
    options = _options(arguments)
    settings = Settings(options.device, tuple(options.networks or ()), tuple(options.test_files or ()))
    deadline = time.monotonic() + 60 * options.minutes
    try:
        environment = environment_of(options.device)
    except RuntimeError as error:
        print(f"gpu.sh: {error}", file=sys.stderr)
        return CANNOT
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{environment.get('card', 'dry run on the CPU')}: results go to {options.out}", markup=False)
    seen: list[Result] = []
    missing = 0
    try:
        for name in options.only or PARTS:
            found, left = _run(PARTS[name], settings, options, environment, deadline, console)
            seen += found
            missing += left
    finally:
        if any(options.out.glob("*.json")):
            console.print(f"written: {write(options.out)}", markup=False)
    console.print(f"{tally(seen)}; {missing} not run", style="red" if any(map(faults, seen)) else None)
    return WRONG if any(map(faults, seen)) else UNFINISHED if missing else 0


def environment_of(device: str) -> dict[str, Any]:
    """What `benchmarks.gpu.environment` says, of a process of its own.

    Raises:
        RuntimeError: where it says nothing; with its last line.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.environment", device]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(told.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def _run(
    part: Part,
    settings: Settings,
    options: argparse.Namespace,
    environment: dict[str, Any],
    deadline: float,
    console: Console,
) -> tuple[list[Result], int]:
    """Run the cases of a part that have no result yet; returns all results, and how many cases have none."""
    results = Results(options.out / f"{part.name}.json", part.name, environment)
    everything = part.cases(settings)
    cases = [case for case in everything if options.matching in case.key]
    if options.again:
        results.forget([case.key for case in cases])
    waiting = [case for case in cases if results.get(case) is None]
    console.print(f"{part.name}: {len(cases)} cases, {len(waiting)} to run", markup=False)

    def record(case: Case, one: Result) -> None:
        results.put(case.key, {"case": dict(case.options), **one})
        said = f": {one['error']}" if one.get("error") else ""
        style = "red" if faults(one) else None
        console.print(f"  {case.key}: {one['status']}{said} ({one['wall_seconds']} s)", style=style, markup=False)

    known = {case.key: one for case in everything if (one := results.get(case)) is not None}
    Runs(part, settings, deadline, record, options.workers, known).run(waiting)
    found = [one for case in cases if (one := results.get(case)) is not None]
    return found, len(cases) - len(found)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, program="benchmarks/gpu.sh")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part; may be repeated; default: all")
    add_networks(parser, networks.networks(), "each part's own")
    parser.add_argument("--matching", default="", metavar="TEXT", help="only cases whose name has this in it")
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after so many; default: 25")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--workers", type=int, help="processes at a time, at most; default: each part's own")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run")
    parser.add_argument("--out", type=Path, help=f"folder of results; default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--test-files", nargs="+", help="of the tests; default: all that have tests marked gpu")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error("--minutes: give more than 0")
    options.out = (options.out or (DRY_RESULTS if options.device == "cpu" else RESULTS)).resolve()
    if options.device == "cpu" and options.out == RESULTS:
        parser.error(f"--out: {RESULTS.relative_to(ROOT)} is for what was run on a GPU, and this is a dry run")
    return options


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that it ends what it started
    sys.exit(main())
