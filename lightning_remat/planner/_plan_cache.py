"""A cache of plans on disk: the second run of the same training does not solve again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from lightning_remat._disk import cache_directory, forget_the_oldest, replace_file
from lightning_remat._version import __version__
from lightning_remat.errors import RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.schedule import Copy, simulate, verify
from lightning_remat.solvers import Solution

log = logging.getLogger(__name__)

MOST = 200
"""Plans that are kept, at most: the files that were used last."""

MOST_REFUSED = 10
"""Graphs for bug reports that are kept, at most."""


def fingerprint(graph: ComputationGraph, *facts: Any) -> str:
    """A hash that tells scheduling problems apart: of the graph's structure, bytes and costs, and of other ``facts``.

    Names, modules, targets, dtypes, shapes and the device do not count: a schedule is valid whatever they are.
    """
    text = json.dumps([graph.structure(), *facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class PlanCache:
    """One JSON file for each problem: a graph with its costs, a budget, and how it is solved.

    What is found is verified against the graph before it is used. Nothing that goes wrong with the disk raises: a file that is
    corrupt or does not fit is ignored with a warning and written anew, a directory that cannot be written is warned of once.
    Files are replaced atomically, so that several processes may write at the same time.

    Args:
        directory: where the files lie; by default ``plans`` in the project's own directory (see `cache_directory`).
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else cache_directory() / "plans"
        self._warned_of_writing = False

    def path(self, graph: ComputationGraph, budget: int | str, config: RematConfig) -> Path:
        """The file for a problem.

        Args:
            graph: the problem; see `fingerprint` for what of it counts.
            budget: in bytes, or ``"min"``.
            config: solver, its options and its time limit count.
        """
        facts = [budget, config.solver, config.solver_options, config.time_limit, __version__]
        return self.directory / f"plan-{fingerprint(graph, *facts)}.json"

    @staticmethod
    def path_below(path: Path, below_seconds: float) -> Path:
        """The file for what is known where only a step of less than so many seconds is of use, beside a problem's own."""
        return path.with_stem(f"{path.stem}-below-{below_seconds!r}")

    def load(self, path: Path, graph: ComputationGraph) -> Solution | None:
        """The solution that is kept for a problem, verified; ``None`` if there is none that can be used."""
        started = time.monotonic()
        try:
            solution = read_solution(path, graph)
            path.touch()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError, RematError) as error:
            log.warning("The plan in %s cannot be used (%s): it is made again.", path, error)
            return None
        return dataclasses.replace(
            solution,
            solve_seconds=time.monotonic() - started,
            notes=("kept from an earlier run", *solution.notes),
        )

    def store(self, path: Path, solution: Solution, budget_bytes: int) -> None:
        """Keep the solution of a problem, unless it has no schedule."""
        if solution.schedule is None:
            return
        data = {"budget_bytes": budget_bytes, "solution": solution.to_dict()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(data, separators=(",", ":")))
            forget_the_oldest(self.directory.glob("plan-*.json"), MOST)
        except OSError as error:
            if not self._warned_of_writing:
                self._warned_of_writing = True
                log.warning(
                    "Plans cannot be kept in %s (%s), so the next run makes them again. Set LIGHTNING_REMAT_CACHE to a "
                    "directory that can be written.",
                    self.directory,
                    error,
                )

    def keep_refused(self, graph: ComputationGraph) -> str:
        """Write a graph whose schedules the verifier refuses; returns where it lies, in words for a bug report."""
        path = self.directory / f"refused-{fingerprint(graph)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(graph.to_dict(), separators=(",", ":")))
            forget_the_oldest(self.directory.glob("refused-*.json"), MOST_REFUSED)
        except OSError as error:
            return f"its captured graph, which could not be written to {path} ({error})"
        return f"its captured graph, which lies in {path}"


def read_solution(path: Path, graph: ComputationGraph, budget_bytes: int | None = None) -> Solution:
    """The solution in a file that `PlanCache.store` or ``python -m lightning_remat.solvers`` has written, verified.

    Args:
        path: the file.
        graph: the graph that it is a solution of.
        budget_bytes: what its peak must stay within; by default the budget that the file names.

    Raises:
        OSError: when the file cannot be read.
        ValueError, RematError: when it holds no schedule of ``graph`` within that budget.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(data.get("budget_bytes"), int):
        raise ValueError("no JSON object with a budget")
    return verified(data.get("solution"), graph, data["budget_bytes"] if budget_bytes is None else budget_bytes)


def verified(data: Any, graph: ComputationGraph, budget_bytes: int) -> Solution:
    """A solution from plain data, verified.

    Args:
        data: see `Solution.to_dict`.
        graph: the graph that it is a solution of.
        budget_bytes: what its peak must stay within.

    Raises:
        ValueError, RematError: when it holds no schedule of ``graph`` within that budget.
    """
    solution = Solution.from_dict(data)
    if solution.schedule is None:
        raise ValueError("a solution without a schedule")
    peak = verify(graph, solution.schedule, budget_bytes)
    if any(isinstance(step, Copy) for step in solution.schedule.steps):
        return dataclasses.replace(solution, peak_bytes=peak, seconds=simulate(graph, solution.schedule).seconds)
    seconds = sum(graph.ops[op].seconds * count for op, count in solution.schedule.evaluations.items())
    return dataclasses.replace(solution, peak_bytes=peak, seconds=seconds)
