"""Plans kept on disk between runs: the second run of the same training does not solve again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import lightning_remat
from lightning_remat._disk import cache_directory, replace_file
from lightning_remat.errors import RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.schedule import Schedule, verify
from lightning_remat.solvers import Solution, Status

log = logging.getLogger(__name__)

FORMAT = "lightning_remat.solution"
FORMAT_VERSION = 1

MOST = 200
"""Files that are kept, the ones used last."""


class PlanCache:
    """One JSON file for each problem: a graph with its costs, a budget, and how it is solved.

    What is found is verified against the graph before it is used. Nothing that goes wrong with the disk raises: a file that is
    corrupt or does not fit is ignored with a warning and written anew, a directory that cannot be written is warned of once.
    Files are replaced in one step, so that writers may run at the same time.

    Args:
        directory: where the files lie; by default ``plans`` in the project's own directory (see `cache_directory`).
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else cache_directory() / "plans"
        self._warned_of_writing = False

    def path(self, graph: ComputationGraph, budget: int | str, config: RematConfig) -> Path:
        """The file for a problem.

        Args:
            graph: the problem; names in it do not count.
            budget: in bytes, or ``"min"``.
            config: solver, its options and its time limit count.
        """
        data = graph.to_dict()
        for named in (data, *data["tensors"], *data["ops"]):
            for field in ("name", "module", "target", "dtype", "shape", "device"):
                named.pop(field, None)
        facts = [data, budget, config.solver, config.solver_options, config.time_limit, lightning_remat.__version__]
        text = json.dumps(facts, sort_keys=True, default=str)
        return self.directory / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, path: Path, graph: ComputationGraph) -> Solution | None:
        """What is known for a problem, verified; ``None`` if nothing is."""
        started = time.monotonic()
        try:
            solution = _parse(json.loads(path.read_text(encoding="utf-8")), graph, started)
            path.touch()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError, RematError) as error:
            log.warning("The plan in %s cannot be used (%s): it is made again.", path, error)
            return None
        return solution

    def store(self, path: Path, solution: Solution, budget_bytes: int) -> None:
        """Keep the solution of a problem."""
        if solution.schedule is None:
            return
        data = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "budget_bytes": budget_bytes,
            "schedule": solution.schedule.to_dict(),
            "seconds": solution.seconds,
            "status": solution.status.value,
            "lower_bound_seconds": solution.lower_bound_seconds,
            "bound_scope": solution.bound_scope,
            "method": solution.method,
            "notes": list(solution.notes),
        }
        try:
            replace_file(path, json.dumps(data, separators=(",", ":")))
            self._forget_the_oldest()
        except OSError as error:
            if not self._warned_of_writing:
                self._warned_of_writing = True
                log.warning(
                    "Plans cannot be kept in %s (%s), so the next run makes them again. Set LIGHTNING_REMAT_CACHE to a "
                    "directory that can be written.",
                    self.directory,
                    error,
                )

    def _forget_the_oldest(self) -> None:
        files = sorted(self.directory.glob("plan-*.json"), key=_age)
        for file in files[MOST:]:
            with contextlib.suppress(FileNotFoundError):  # another process forgot it first
                file.unlink()


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _parse(data: Any, graph: ComputationGraph, started: float) -> Solution:
    """The solution of ``graph`` that `PlanCache.store` wrote.

    Raises:
        ValueError: for other data.
        RematError: when its schedule is none of ``graph``, or over the budget.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != FORMAT_VERSION:
        raise ValueError(f"not a {FORMAT} file of version {FORMAT_VERSION}")
    try:
        schedule = Schedule.from_dict(data["schedule"])
        peak = verify(graph, schedule, data["budget_bytes"])
        return Solution(
            schedule=schedule,
            status=Status(data["status"]),
            seconds=float(data["seconds"]),
            peak_bytes=peak,
            lower_bound_seconds=float(data["lower_bound_seconds"]),
            bound_scope=str(data["bound_scope"]),
            solve_seconds=time.monotonic() - started,
            method=str(data["method"]),
            notes=("kept from an earlier run", *map(str, data["notes"])),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a missing or malformed field: {error!r}") from error
