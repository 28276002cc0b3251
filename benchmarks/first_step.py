"""The first step of deep networks: where the time goes between the call and the gradients.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --cases gpt2-12

Each network makes its first step under `rematerialize` in a process of its own, at half of what can be saved, and once more
in another process, which finds plans and costs on disk. A phase's seconds are its own, without those of the phases inside of
it, and add up to the step's; those of the garbage collector are in them, and told beside. What else runs on the machine is in
the seconds, and not in the processor's seconds, which are those of the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

from benchmarks.common.commands import command_line
from benchmarks.common.processes import add_worker, died, found_by
from benchmarks.common.results import RESULTS, stamp, write
from benchmarks.common.tables import numbers_table, wide_console
from benchmarks.networks import build
from lightning_remat import rematerialize
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture._torch import Exchange, Frame
from lightning_remat.runtime import _backend
from lightning_remat.runtime._planning import Planning

PACKAGES = ("lightning_remat", "torch", "transformers", "mip")
SMALL = {"width": 256, "heads": 4, "length": 64, "batch": 2}
CASES: dict[str, tuple[str, dict[str, int]]] = {
    **{f"gpt2-{layers}": ("gpt2", {**SMALL, "layers": layers, "vocabulary": 1000}) for layers in (12, 24, 96)},
    "transformer-36+36": ("transformer", {**SMALL, "layers": 36, "feed_forward": 512}),
}

DYNAMO = "Dynamo"
PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    DYNAMO: (),  # what is left
    "AOTAutograd": ((Frame, "compiled"),),
    "reading": ((_backend._Reading, "read"), (CapturedGraph, "tiled")),
    "measuring": ((Planning, "measured"),),
    "planning": ((_backend._Handed, "_partition"), (Planning, "fits"), (Planning, "made")),
    "lowering": ((_backend, "lower"), (Exchange, "add")),
    "forward": ((Exchange, "forward"),),
    "backward": (),
}
"""The phases, and the functions that each is spent in."""


class Clock:
    """Seconds and the processor's seconds by phase, each without those of the phases inside of it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.processor = dict.fromkeys(PHASES, 0.0)
        self.collecting = 0.0
        self._phases: list[str] = []
        self._since = time.perf_counter(), time.thread_time()

    def _note(self) -> None:
        now = time.perf_counter(), time.thread_time()
        if self._phases:
            self.seconds[self._phases[-1]] += now[0] - self._since[0]
            self.processor[self._phases[-1]] += now[1] - self._since[1]
        self._since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, this phase's time is measured."""
        self._note()
        self._phases.append(name)
        try:
            yield
        finally:
            self._note()
            self._phases.pop()

    def collected(self, when: str, _: Any) -> None:
        """For ``gc.callbacks``."""
        self.collecting += time.thread_time() * (1 if when == "stop" else -1)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the functions of `PHASES` are measured."""
        with contextlib.ExitStack() as stack:
            for name, places in PHASES.items():
                for owner, attribute in places:
                    own: Callable[..., Any] = getattr(owner, attribute)
                    stack.callback(setattr, owner, attribute, own)
                    setattr(owner, attribute, self._measured(name, own))
            gc.callbacks.append(self.collected)
            stack.callback(gc.callbacks.remove, self.collected)
            yield

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call


def first_step(case: str, budget: str) -> dict[str, Any]:
    """A network's first step in this process."""
    network, sizes = CASES[case]
    workload = build(network, **sizes)
    step, clock = rematerialize(workload.module, budget), Clock()
    with clock.watching():
        with clock.phase(DYNAMO):
            loss = step(*workload.batch)
        with clock.phase("backward"):
            loss.backward()
    assert step.plan is not None
    return {
        "ops": len(step.plan.graph.ops),
        "solver": step.plan.solver,
        "overhead": step.plan.overhead,
        "gap": step.plan.gap,
        "seconds": sum(clock.seconds.values()),
        "phases": clock.seconds,
        "processor": clock.processor,
        "collecting": clock.collecting,
    }


def both(case: str, budget: str) -> dict[str, Any]:
    """A first run in this process, and a second in another, which finds on disk what this has left there."""
    found = {"case": case, "first": first_step(case, budget)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "again.json"
        command = [sys.executable, __file__, "--cases", case, "--budget", budget, "--again", "--worker", str(file)]
        subprocess.run(command, check=True)
        return found | {"second": json.loads(file.read_text(encoding="utf-8"))}


def rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Of the table: two a network."""
    for one in found:
        for run in ("first", "second"):
            step = one[run]
            phases = (f"{step['phases'][name]:.1f}" for name in PHASES)
            yield [
                *(one["case"], run, f"{step['ops']:,}", f"{step['seconds']:.1f}"),
                *(f"{sum(step['processor'].values()):.1f}", *phases, f"{step['collecting']:.1f}"),
            ]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "first-step-cpu.json")
    add_worker(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Run all cases, print a table, and write JSON; returns 1 where one has failed."""
    options = options_of()
    if options.worker is not None:
        write(options.worker, (first_step if options.again else both)(options.cases[0], options.budget))
        return 0
    found, failed = [], 0
    for case in options.cases:
        one, exit_code = found_by([__file__, "--cases", case, "--budget", options.budget])
        if one is None:
            print(f"{case}: {died(exit_code)}", file=sys.stderr)
            failed = 1
        else:
            found.append(one)
    columns = ("network", "run", "ops", "seconds", "processor", *PHASES, "collecting")
    table = numbers_table("The first step, in seconds", columns, rows(found), text=("network", "run"))
    wide_console().print(table)
    data = {"format": "lightning_remat.first_step", "version": 1, **stamp(PACKAGES, "cpu"), "budget": options.budget}
    write(options.out, {**data, "cases": found})
    return failed


if __name__ == "__main__":
    sys.exit(main())
