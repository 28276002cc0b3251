"""``python -m lightning_remat.solvers <task.json>``: search for ever cheaper schedules of a graph, and write each one down.

The process that runs beside a training (`lightning_remat.runtime` starts it). It imports neither the training's own
code nor torch. The task is a JSON object: ``graph`` (a file), ``better`` (the file to write), ``budget_bytes``,
``method``, ``options``, ``time_limit`` in seconds, and ``seconds``, the time of a step under the schedule that is known
already. Only cheaper schedules are written, each replacing the file in one step. The process ends when the time is
over, when nothing is left to gain, or when its standard input is closed, as happens when the process that started it
ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_remat._disk import replace_file
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._registry import options_of, run_algorithm, solution_of
from lightning_remat.solvers.heuristics._large_neighbourhood_search import improve

WORTH_WRITING = 1e-3
"""Share of the step's time that a schedule must save over the one before: exchanging schedules takes time too."""

ROUND_SECONDS = 5.0
"""Seconds of one round of improvements; each round has random numbers of its own."""


def main(arguments: Sequence[str]) -> int:
    """Do one task."""
    (file,) = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, which ends this process
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(10)
    task = json.loads(Path(file).read_text(encoding="utf-8"))
    graph = ComputationGraph.load(task["graph"])
    search(
        graph,
        task["budget_bytes"],
        task["method"],
        task["options"],
        task["time_limit"],
        task["seconds"],
        Path(task["better"]),
    )
    return 0


def search(
    graph: ComputationGraph,
    budget_bytes: int,
    method: str,
    options: dict[str, object],
    time_limit: float,
    seconds: float,
    better: Path,
) -> None:
    """Solve, and improve what was found until the time is over or it is as good as the bound; write each better schedule.

    Args:
        graph: the problem.
        budget_bytes: the most that may be held at any moment.
        method: one of `available()`; only what ``"auto"`` finds is improved further.
        options: the method's own options.
        time_limit: seconds in all.
        seconds: time of a step under the schedule that is known already.
        better: the file to write to.
    """
    started = time.monotonic()
    deadline = started + time_limit
    problem = Problem(graph)
    answer = run_algorithm(method, problem, budget_bytes, deadline, **options)
    for seed in itertools.count(1):
        if answer.sequence is None:
            return
        cost = problem.evaluate(answer.sequence).seconds
        if cost < seconds * (1 - WORTH_WRITING):
            found = {**options_of(method), **options}
            solution = solution_of(graph, problem, answer, budget_bytes, method, found, started)
            replace_file(better, json.dumps({"budget_bytes": budget_bytes, "solution": solution.to_dict()}))
            seconds = cost
        if method != "auto" or time.monotonic() > deadline or cost <= answer.lower_bound_seconds * (1 + WORTH_WRITING):
            return
        until = min(deadline, time.monotonic() + ROUND_SECONDS)
        sequence, attempts = improve(problem, answer.sequence, budget_bytes, until, seed=seed)
        if attempts == 0:
            return
        answer = dataclasses.replace(answer, sequence=sequence)


def _end_with_the_parent() -> None:
    os.read(0, 1)  # not `sys.stdin`: a lock of its would be held when this process ends by itself
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
