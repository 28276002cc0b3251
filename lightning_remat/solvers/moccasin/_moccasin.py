"""The method "moccasin": retention intervals (`_constraint_program`) by OR-Tools CP-SAT, an optional package.

The model is that of Bartan, Li, Teague, Lott and Dilkina 2023, "Moccasin: Efficient Tensor Rematerialization for Neural
Networks". Above ``max_ops`` nodes the problem is coarsened first, as for ``"milp"``: no bound of its own is reported then.

CP-SAT runs in a process of its own: a crash of OR-Tools ends that process alone, and the libraries that it loads do not
clash with others of the same names in this one.
"""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import clock, counts, limited, program_limits
from lightning_remat.solvers.common._coarse_search import COARSE_GAP, search_coarsened
from lightning_remat.solvers.common._mip_process import BEGINNING
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._stages import StagesResult, best_start

GRACE_SECONDS = 15.0
"""How long after the deadline the process is waited for: CP-SAT looks at its clock now and then."""


class Request(NamedTuple):
    """What the process is asked to solve.

    ``until`` is a reading of `time.time`, which all processes share; ``work`` is a limit in seconds of counted work, or
    ``None`` (see `limited`); the rest is as for `moccasin`.
    """

    problem: PlainProblem
    budget_bytes: int
    until: float
    intervals: int = 3
    gap: float = 1e-4
    max_ops: int = 120
    coarsen_to: int = 60
    workers: int = 1
    start: NodeSequence | None = None
    work: float | None = None


@register("moccasin")
def moccasin(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    intervals: int = 3,
    gap: float = 1e-4,
    max_ops: int = 120,
    coarsen_to: int = 60,
    workers: int = 1,
    start: NodeSequence | None = None,
) -> Answer:
    """Moccasin's program, solved by CP-SAT in a process of its own.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        intervals: C_v, the most retention intervals of a node.
        gap: stop when the schedule is proven to be within this share of the bound.
        max_ops: with more nodes than this the problem is coarsened.
        coarsen_to: number of nodes of the coarsened problem, about.
        workers: threads of CP-SAT, each with a search of its own.
        start: a sequence to begin from, used where its peak is within the budget.

    Raises:
        SolverError: when OR-Tools is not installed, for an ``intervals`` below 1, or when the process fails (see
            `ask`).
    """
    if importlib.util.find_spec("ortools") is None:
        raise SolverError(
            "the method 'moccasin' needs OR-Tools, which is not installed: install it with "
            "`pip install 'lightning-remat[moccasin]'` (or `pip install ortools`)"
        )
    if intervals < 1:
        raise SolverError(f"moccasin: intervals={intervals!r}: a node has at least one retention interval")
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    seconds, _ = program_limits(deadline - clock())
    work = max(1e-6, deadline - clock()) if counts() else None
    until = time.time() + seconds
    return ask([Request(problem, budget_bytes, until, intervals, gap, max_ops, coarsen_to, workers, start, work)])[0]


def ask(requests: Sequence[Request]) -> list[Answer]:
    """Answer requests, one after the other, in one process that loads OR-Tools.

    Raises:
        SolverError: when the process fails, or is not done `GRACE_SECONDS` after the last deadline.
    """
    # The import path is handed over; the user's own script is not run again.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from lightning_remat.solvers.moccasin._moccasin import serve; serve()"
    )
    if not sys.executable:
        raise SolverError("OR-Tools needs a process of its own, and this Python is a part of another program")
    left = max([request.until for request in requests]) - time.time()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=pickle.dumps(requests),
            capture_output=True,
            timeout=max(0.0, left) + GRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SolverError(f"OR-Tools did not stop {GRACE_SECONDS:g} s after its time limit") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise SolverError(f"OR-Tools failed: {lines[-1] if lines else f'exit status {done.returncode}'}")
    answers: list[Answer] = pickle.loads(done.stdout.partition(BEGINNING)[2])
    return answers


def serve() -> None:
    """The process's own part: requests from the standard input, answers to the standard output."""
    requests: list[Request] = pickle.load(sys.stdin.buffer)
    answers = [_answer(request) for request in requests]
    sys.stdout.buffer.write(BEGINNING)
    pickle.dump(answers, sys.stdout.buffer)


def _answer(request: Request) -> Answer:
    with limited(max(1e-3, request.until - time.time()), request.work) as deadline:
        return _solved(request, deadline)


def _solved(request: Request, deadline: float) -> Answer:
    from lightning_remat.solvers.moccasin._constraint_program import solve_intervals

    problem, budget_bytes, intervals, gap = request.problem, request.budget_bytes, request.intervals, request.gap
    until = deadline - min(2.0, 0.1 * max(0.0, deadline - clock()))  # the rest is for filling up

    def solved(what: PlainProblem, budget: int, gap: float, turn: float, start: NodeSequence | None) -> StagesResult:
        return solve_intervals(
            what, budget, intervals=intervals, gap=gap, workers=request.workers, deadline=turn, start=start
        )

    if len(problem) <= request.max_ops:
        result = solved(problem, budget_bytes, gap, until, request.start)
        scope = f"schedules in the captured order that evaluate an op at most once a stage and {intervals} times in all"
        if any(problem.overwrites):
            scope += ", each result in memory of its own"
        if result.sequence is None:
            return Answer(None, result.status, result.lower_bound_seconds, scope, notes=result.notes)
        sequence = drop_unused(problem, result.sequence)  # a first evaluation that nobody reads yet may wait
        if result.status is not Status.OPTIMAL:
            sequence = keep_longer(problem, sequence, budget_bytes, max(deadline, clock() + 0.5))
        bound = min(result.lower_bound_seconds, problem.evaluate(sequence).seconds)
        return Answer(sequence, result.status, bound, scope, notes=result.notes)

    def coarsely(coarse: PlainProblem, budget: int, turn: float) -> tuple[NodeSequence | None, Status]:
        result = solved(coarse, budget, max(gap, COARSE_GAP), turn, None)
        return result.sequence, result.status

    # Checkpointed schedules are known in any case, and a program takes long: only one tighter budget is tried.
    known = (request.start, best_start(problem, budget_bytes, request.start))
    return search_coarsened(problem, budget_bytes, request.coarsen_to, coarsely, deadline, known=known, tighter=(50,))
