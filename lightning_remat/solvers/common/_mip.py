"""Linear and integer programs for python-mip's solvers, built here and solved in another process (`_mip_process`).

CBC crashes now and then (with an access violation in its feasibility pump, for example), and would take the training
with it. It may search on long after its time limit. And it sets the number of OpenMP threads of its whole process to
one: torch would compute on one core from then on, and its reductions would round differently. If the process ends, the
program has no answer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import mip

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import program_limits
from lightning_remat.solvers.common._mip_process import BEGINNING

logger = logging.getLogger(__name__)

DEFAULT = "CBC"

UNPROVEN = 1e50
"""A bound of this size is none: CBC has the largest float until it has solved its first relaxation."""

GRACE_SECONDS = 10.0
"""A solver is waited for twice its time limit, and these seconds; then it is killed, and what it has found is lost."""


class Model:
    """A program that is built here, of python-mip's variables and expressions, and solved in another process.

    That process is told at each `optimize` what has changed since the last, so that the solver goes on from there.
    `close` the model in the end: the process is kept for the next one.

    Args:
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".

    Attributes:
        threads, preprocess, max_mip_gap, max_mip_gap_abs: as those of ``mip.Model``.
        vars: the variables so far.
        status: how the last solve ended.
        objective_value, objective_bound, num_solutions: of the last solve; NaN, NaN and 0 where it found nothing.

    Raises:
        SolverError: when python-mip has no such solver here; perhaps not before the first `optimize`.
    """

    def __init__(self, solver: str = DEFAULT) -> None:
        self._process = _Process.idle_or_new(solver)
        if self._process is not None:  # for a model that nobody closes: with its variables it makes reference cycles
            self._unclosed = weakref.finalize(self, self._process.end)
            self._unclosed.atexit = False  # it ends with this process anyway
        self.threads, self.preprocess = 0, -1
        self.max_mip_gap, self.max_mip_gap_abs = 1e-4, 1e-10
        self.vars: list[mip.Var] = []
        self._row_count = 0
        self._constant = 0.0
        self.status = mip.OptimizationStatus.LOADED
        self._answer: dict[str, Any] = {}
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._columns = array("d")  # lower and upper bound and cost of each
        self._column_kinds: list[str] = []
        self._row_ends = array("l")
        self._row_columns, self._row_factors = array("l"), array("d")
        self._row_constants = array("d")
        self._row_senses: list[str] = []
        self._upper: dict[int, float] = {}
        self._right: dict[int, float] = {}
        self._kinds: dict[int, str] = {}
        self._costs: dict[int, float] | None = None
        self._start: list[tuple[int, float]] | None = None

    # -- building -----------------------------------------------------------------------------------------------------------

    def add_var(
        self, lb: float = 0.0, ub: float = mip.INF, obj: float = 0.0, var_type: str = mip.CONTINUOUS
    ) -> mip.Var:
        """A new variable between two bounds, which are 0 and 1 for a binary one."""
        self._columns.extend((lb, 1.0 if var_type == mip.BINARY else ub, obj))
        self._column_kinds.append(var_type)
        self.vars.append(mip.Var(self, len(self.vars)))
        return self.vars[-1]

    def add_constr(self, expression: mip.LinExpr, sense: str = "") -> mip.Constr:
        """A new row, of an expression with a relation, as in ``x + y <= 1``; or of one without, and its relation to 0."""
        terms = expression.expr
        self.add_row([variable.idx for variable in terms], terms.values(), expression.const, sense or expression.sense)
        return mip.Constr(self, self._row_count - 1)

    def add_row(self, columns: Iterable[int], factors: Iterable[float], constant: float, sense: str) -> None:
        """A new row without expressions, which take most of the time of a large program: for each column its factor."""
        self._row_columns.extend(columns)
        self._row_factors.extend(factors)
        self._row_ends.append(len(self._row_columns))
        self._row_constants.append(constant)
        self._row_senses.append(sense)
        self._row_count += 1

    def minimize(self, expression: mip.LinExpr) -> None:
        """The objective; without this, it is what the variables' ``obj`` say."""
        self._costs = {variable.idx: factor for variable, factor in expression.expr.items()}
        self._constant = expression.const

    def begin_at(self, values: Iterable[tuple[mip.Var, float]]) -> None:
        """A solution to start from: its integer variables that are not 0 suffice."""
        self._start = [(variable.idx, value) for variable, value in values]

    # What python-mip's variables and rows ask of their model's solver, by these names.

    @property
    def solver(self) -> Model:
        return self

    def var_set_ub(self, var: mip.Var, value: float) -> None:
        self._upper[var.idx] = value

    def var_set_var_type(self, var: mip.Var, value: str) -> None:
        self._kinds[var.idx] = value

    def constr_set_rhs(self, index: int, value: float) -> None:
        self._right[index] = value

    def var_get_x(self, var: mip.Var) -> float | None:
        values: array[float] | None = self._answer.get("values")
        return None if values is None else values[var.idx]

    # -- solving ------------------------------------------------------------------------------------------------------------

    def optimize(self, seconds: float, *, relax: bool = False) -> mip.OptimizationStatus:
        """Solve what was built so far.

        Args:
            seconds: the most that it may take, by `clock`; see `program_limits`.
            relax: whether integrality is left out.

        Returns:
            The status; ``ERROR`` where the solver fails or crashes, with a warning, and at each call after that.

        Raises:
            SolverError: when python-mip has no such solver here.
        """
        self._answer = {}
        if self._process is None:
            self.status = mip.OptimizationStatus.ERROR
            return self.status
        seconds, nodes = program_limits(seconds, len(self.vars) + self._row_count)
        rows = self._row_ends, self._row_columns, self._row_factors
        request = {
            "columns": (self._columns, "".join(self._column_kinds)),
            "rows": (*rows, self._row_constants, "".join(self._row_senses)),
            "upper": self._upper,
            "right": self._right,
            "kinds": self._kinds,
            "costs": self._costs,
            "start": self._start,
            "settings": {
                name: getattr(self, name) for name in ("threads", "preprocess", "max_mip_gap", "max_mip_gap_abs")
            },
            "seconds": seconds,
            "nodes": nodes,
            "relax": relax,
        }
        process, self._process = self._process, None
        try:
            self._answer = process.ask(request, 2 * seconds + GRACE_SECONDS)
        except _Ended as error:
            size = f"with a program of {len(self.vars)} columns and {self._row_count} rows"
            logger.warning("%s, %s: planning goes on without an answer to it", error, size)
            self.status = mip.OptimizationStatus.ERROR
            return self.status
        except BaseException:  # an interrupt: the process would search on
            process.end()
            raise
        self._process = process
        self._forget_changes()
        self.status = mip.OptimizationStatus[self._answer["status"]]
        return self.status

    @property
    def objective_value(self) -> float:
        return self._plus_constant("value")

    @property
    def objective_bound(self) -> float:
        bound = self._plus_constant("bound")
        return bound if abs(bound) < UNPROVEN else math.nan

    def _plus_constant(self, name: str) -> float:
        value = self._answer.get(name)
        return math.nan if value is None else float(value) + self._constant

    @property
    def num_solutions(self) -> int:
        return int(self._answer.get("solutions", 0))

    def close(self) -> None:
        """Free the program's memory, and keep the process for the next model."""
        if self._process is not None:
            self._unclosed.detach()
            self._process.rest()
            self._process = None


class _Ended(Exception):
    """The process has ended, or its solver has failed; the message is meant for a warning."""


class _Process:
    """A process that has one program at a time, and is kept for the next."""

    _idle: ClassVar[defaultdict[int, list[_Process]]] = defaultdict(list)
    """Idle processes by the id of the process that started them, since one that is forked must start its own."""

    @classmethod
    def idle_or_new(cls, solver: str) -> _Process | None:
        """A process with an empty program; ``None``, with a warning, where none can be started."""
        idle = cls._idle[os.getpid()]
        with contextlib.suppress(IndexError):
            while True:
                process = idle.pop()
                with contextlib.suppress(_Ended):  # it was idle for too long
                    process._begin(solver)
                    with process._at_most(GRACE_SECONDS):
                        process._settle()
                    return process
        try:
            process = cls()
            process._begin(solver)
        except (OSError, _Ended) as error:
            logger.warning("planning goes on without %s, for which no process could be started: %s", solver, error)
            return None
        return process

    @classmethod
    def end_idle(cls) -> None:
        for process in cls._idle.pop(os.getpid(), []):
            process.end()

    def __init__(self) -> None:
        if getattr(sys, "frozen", False) or not sys.executable:
            raise OSError("this Python is a part of another program, and has no command")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("_mip_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )
        self._owner = os.getpid()
        self._solver, self._stopped, self._begun = "", False, False
        self._owed = 0  # answers still to come that only confirm that an empty program was made
        self._send({"path": _absolute_path()})

    def _begin(self, solver: str) -> None:
        self._solver = solver
        self._send({"solver": solver})
        self._owed += 1

    def _settle(self) -> None:
        """Wait until the empty program has been made."""
        while self._owed:
            answer = self._receive()
            self._owed -= 1
            if "failed" in answer:
                self.end()
                reason = _last_line(answer["failed"])
                if self._solver == DEFAULT:  # the user has not asked for it by name
                    raise _Ended(f"{self._solver} cannot be loaded ({reason})")
                raise SolverError(f"python-mip has no solver {self._solver!r} here: {reason}")

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            _Ended: where there is none within ``seconds``; the process has ended then.
        """
        with self._at_most(seconds):
            self._settle()
            self._send(request)
            answer = self._receive()
        if "failed" in answer:
            self.end()
            raise _Ended(f"{self._solver} failed ({_last_line(answer['failed'])})")
        return answer

    @contextlib.contextmanager
    def _at_most(self, seconds: float) -> Iterator[None]:
        """A context after whose ``seconds`` the process is killed."""
        late = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._stop)
        late.daemon = True
        try:
            late.start()
        except RuntimeError as error:  # there can be no more threads
            self.end()
            raise _Ended(f"{self._solver} cannot be waited for ({error})") from error
        try:
            yield
        finally:
            late.cancel()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            last = b""
            while not self._begun:
                if not (one := self._process.stdout.read(1)):
                    raise EOFError
                last = (last + one)[-len(BEGINNING) :]
                self._begun = last == BEGINNING
            answer: dict[str, Any] = pickle.load(self._process.stdout)
        except Exception as error:
            raise self._ended() from error
        return answer

    def _ended(self) -> _Ended:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = 0
        self.end()
        if self._stopped:
            return _Ended(f"{self._solver} did not stop when its time was over")
        if code >= 0:
            return _Ended(f"{self._solver} ended with code {code}")
        names = {one.value: one.name for one in signal.Signals}
        return _Ended(f"{self._solver} crashed ({names.get(-code, f'signal {-code}')})")

    def _stop(self) -> None:
        self._stopped = True
        self._process.kill()

    def rest(self) -> None:
        """Have the process forget its program, and keep it for the next."""
        with contextlib.suppress(_Ended):
            self._send({"solver": None})
            self._idle[os.getpid()].append(self)

    def end(self) -> None:
        if self._owner != os.getpid():  # this process was forked from the owner, and may not end it
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not sent yet
                if pipe is not None:
                    pipe.close()


def _absolute_path() -> list[str]:
    """The import path as Python reads it: strings; the folder that it may be relative to can be removed meanwhile."""
    entries = [Path(str(one)) for one in sys.path if isinstance(one, str)]
    with contextlib.suppress(FileNotFoundError):
        folder = Path.cwd()
        entries = [folder / one for one in entries]
    return [str(one) for one in entries if one.is_absolute()]


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]


atexit.register(_Process.end_idle)
