"""Searching for a cheaper schedule in another process, while training runs by the first plan."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from lightning_remat.errors import RematError
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._plan_cache import read_solution
from lightning_remat.solvers import Solution

log = logging.getLogger(__name__)


class Search:
    """A process that looks for cheaper schedules of a plan's graph, at the plan's budget.

    The process knows the graph and nothing of the training; it runs at low priority, and ends by itself after the time
    limit, and when this process ends, in whatever way. Where it cannot be started, or fails, there is one warning, and
    the present plan stays.

    Args:
        plan: the present plan.
        config: solver, its options and its time limit.

    Attributes:
        completed: whether the process has ended by itself without an error.
    """

    def __init__(self, plan: Plan, config: RematConfig) -> None:
        self._plan = plan
        self._seen: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.completed = False
        folder: Path | None = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="lightning_remat-"))
            self._better, self._errors = folder / "better.json", folder / "errors.txt"
            plan.graph.save(folder / "graph.json")
            task = {
                "graph": str(folder / "graph.json"),
                "better": str(self._better),
                "budget_bytes": plan.budget_bytes,
                "method": config.solver,
                "options": config.solver_options,
                "time_limit": config.time_limit,
                "seconds": plan.predicted_seconds,
            }
            (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    # -P: do not import from the working directory, unless the training does (PYTHONPATH below).
                    [sys.executable, "-P", "-m", "lightning_remat.solvers", str(folder / "task.json")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                        "OMP_NUM_THREADS": "1",
                    },
                )
        except (OSError, TypeError, ValueError) as error:
            self._failed(f"it cannot be started: {error}")
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        else:
            self._finalizer = weakref.finalize(self, _end, self._process, folder, os.getpid())

    @property
    def running(self) -> bool:
        """Whether the process may still find something cheaper."""
        return self._process is not None

    def better(self) -> Solution | None:
        """A cheaper schedule, verified, if one was written since the last call; quick enough for every step."""
        if self._process is None:
            return None
        ended = self._process.poll()
        solution = self._read()
        if ended is not None and self._process is not None:
            self.completed = ended == 0
            if ended != 0:
                self._failed(f"its process ended with {_ending(ended)}{self._last_words()}")
            self.close()
        return solution

    def _read(self) -> Solution | None:
        try:
            facts = self._better.stat()
        except OSError:
            return None
        if self._seen == (facts.st_mtime_ns, facts.st_ino):
            return None
        self._seen = (facts.st_mtime_ns, facts.st_ino)
        try:
            return read_solution(self._better, self._plan.graph, self._plan.budget_bytes)
        except (OSError, ValueError, RematError) as error:
            self._failed(f"what it found cannot be used: {error}")
            self.close()
            return None

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors.read_text(errors="replace").strip().splitlines()
            return f": {lines[-1]}" if lines else ""
        return ""

    def _failed(self, reason: str) -> None:
        log.warning(
            "The search for a cheaper schedule beside the training is over (%s): the plan at hand stays.", reason
        )

    def close(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._finalizer()
            self._process = None


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # called at the end of a fork of the process that started it
        return
    process.kill()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
