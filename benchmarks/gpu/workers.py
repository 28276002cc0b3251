"""Cases run in processes of their own: one that dies or hangs is a result, and the next goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.determinism import CUBLAS
from benchmarks.gpu import alone
from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.part import CRASHED, HUNG, Case, Part, Result, Settings, result

COMPILING = 4
"""Processes in which each of several workers compiles kernels, at least: they are idle for most of the time."""

LOG_LINES = 40
"""Of what a process said last, kept with a case that it did not survive."""


class Worker:
    """A process that runs cases of a part; it ends with its ``with`` block.

    Args:
        part: whose.
        settings: of the cases.
        folder: for its log, and for measured costs, which start from nothing.
        threads: of torch's on the CPU; ``None`` for its own choice.
    """

    def __init__(self, part: Part, settings: Settings, folder: Path, threads: int | None = None) -> None:
        self._log = folder / "log.txt"
        variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
        variables |= {"LIGHTNING_REMAT_CACHE": str(folder / "costs")}
        if threads is not None:
            variables |= {
                "OMP_NUM_THREADS": str(threads),
                "TORCHINDUCTOR_COMPILE_THREADS": str(max(COMPILING, threads)),
            }
        command = [sys.executable, "-m", "benchmarks.gpu.worker", part.module, json.dumps(dataclasses.asdict(settings))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={CUBLAS[0]: CUBLAS[1], **os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # so that it ends with all that it started
            )

    def ask(self, options: Mapping[str, Any], seconds: float) -> Result:
        """Run a case with these options.

        Raises:
            TimeoutError: where there is no answer within these seconds.
            EOFError: where the process ends first; its words are `last_words`.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended: seen below
            _stream(self._process.stdin).write(json.dumps(dict(options)).encode() + b"\n")
            _stream(self._process.stdin).flush()
        answers, line, until = _stream(self._process.stdout).fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            more = os.read(answers, 1 << 20)
            if not more:
                raise EOFError
            line += more
        found: Result = json.loads(line)
        return found

    def last_words(self) -> tuple[str, list[str]]:
        """How the process ended, and the last lines of its log."""
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return how, self.log()

    def log(self) -> list[str]:
        """The last lines that it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]

    def end(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _stream(stream).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


class Runs:
    """Runs the cases of a part, a group at a time in a process, several of those beside each other.

    Args:
        part: whose.
        settings: of the cases.
        deadline: in the seconds of `time.monotonic`: what runs then is ended, without a result.
        record: told of each result.
        most: processes at a time, at most; the part has its own limit.
        known: results that there are already, by key.
    """

    def __init__(
        self,
        part: Part,
        settings: Settings,
        deadline: float,
        record: Callable[[Case, Result], None],
        most: int | None = None,
        known: Mapping[str, Result] | None = None,
    ) -> None:
        self.part, self.settings, self.deadline, self.record = part, settings, deadline, record
        cores = os.cpu_count() or 1
        self.workers = max(1, min(part.workers, most or part.workers, cores))
        self._threads = max(1, cores // self.workers) if self.workers > 1 else None
        self._stopped = threading.Event()
        self._running: set[Worker] = set()
        self._lock = threading.Lock()
        self._found = dict(known or {})
        self._to_come: set[str] = set()

    def run(self, cases: Sequence[Case]) -> None:
        """Run them; those for which there is no time are left out."""
        groups: dict[str, list[Case]] = {}
        for case in cases:
            groups.setdefault(case.group, []).append(case)
        self._to_come = {case.key for case in cases}
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = [pool.submit(self._group, group) for group in groups.values()]
            try:
                for one in as_completed(waiting):
                    one.result()
            finally:
                self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for worker in self._running:
                worker.end()

    def _group(self, cases: Sequence[Case]) -> None:
        try:
            self._in_processes(cases)
        finally:
            self._to_come -= {case.key for case in cases}

    def _in_processes(self, cases: Sequence[Case]) -> None:
        """Cases one after the other, in as many processes as it takes."""
        left = list(cases)
        while left and self._seconds_left() >= self.part.least_seconds:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                worker, died = Worker(self.part, self.settings, Path(folder), self._threads), False
                with self._lock:
                    if self._stopped.is_set():
                        worker.end()
                    self._running.add(worker)
                with worker:
                    while left and self._seconds_left() >= self.part.least_seconds:
                        case = left.pop(0)
                        if died := not self._one(worker, case):
                            break
                if died:
                    alone.go_on()  # the others may have been stopped for it
                with self._lock:
                    self._running.remove(worker)

    def _one(self, worker: Worker, case: Case) -> bool:
        """Run a case and record it; returns whether the process can go on."""
        options = self._options(case)
        seconds = min(self.part.limit_seconds, self._seconds_left())
        started = time.monotonic()
        try:
            found = worker.ask(options, seconds)
        except EOFError:
            how, log = worker.last_words()
            wall_seconds = round(time.monotonic() - started, 2)
            found = result(CRASHED, error=f"its process ended with {how}", log=log, wall_seconds=wall_seconds)
        except TimeoutError:
            if seconds < self.part.limit_seconds:  # the whole run's time is up, not the case's
                return False
            found = result(HUNG, error=f"no result after {seconds:.0f} s", log=worker.log(), wall_seconds=seconds)
            self._keep(case, found)
            return False
        self._keep(case, found)
        return CRASHED not in found.get("faults", ())

    def _options(self, case: Case) -> dict[str, Any]:
        """What a case gets, once those that it waits for have been run."""
        while self._to_come.intersection(case.after) and self._seconds_left() > 0:
            self._stopped.wait(0.1)
        found = {key: self._found[key] for key in case.after if key in self._found}
        return {**case.options, **({"found": found} if case.after else {})}

    def _keep(self, case: Case, found: Result) -> None:
        if not self._stopped.is_set():
            self.record(case, found)
        self._found[case.key] = found
        self._to_come.discard(case.key)

    def _seconds_left(self) -> float:
        return -1.0 if self._stopped.is_set() else self.deadline - time.monotonic()
