"""Solvers by name, and the one call that runs any of them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning_remat.errors import BudgetError, SolverError
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import verify
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._plugins import Registry
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import required, resting_bytes
from lightning_remat.solvers.common._solution import Solution, Status

ANY_ORDER = "any schedule, in any order"
"""Scope of the trivial bound: every op that the results depend on must run at least once."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one algorithm found, before it is verified and timed.

    Attributes:
        sequence: nodes in order; ``None`` if none was found within the budget.
        status: all but `Status.OPTIMAL` and `Status.FEASIBLE` come without a sequence.
        lower_bound_seconds: 0 where the algorithm proves none of its own.
        bound_scope: the schedules that this bound holds for, in words.
        method: a finer name where one method chose among several ("" otherwise).
        notes: what happened, for people.
    """

    sequence: NodeSequence | None
    status: Status
    lower_bound_seconds: float = 0.0
    bound_scope: str = ""
    method: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of_search(
        cls, best: NodeSequence | None, deadline: float, bound: float = 0.0, scope: str = "", *, notes: tuple[str, ...]
    ) -> Answer:
        """What a search without a proof of its own ends with: the best that it found, or why there is none."""
        missed = Status.TIMEOUT if clock() > deadline else Status.INFEASIBLE
        return cls(best, missed if best is None else Status.FEASIBLE, bound, scope, notes=notes)


class Algorithm(Protocol):
    """A solver: takes the problem, a budget in bytes, a deadline (a reading of `clock`), and its own keyword options."""

    def __call__(self, problem: Problem, budget_bytes: int, *, deadline: float) -> Answer: ...


GIVEN = ("deadline", "known", "below_seconds")
"""Keywords of methods that are not options: `solve` gives them."""

METHODS: Registry[Callable[..., Answer]] = Registry("solver", "lightning_remat.solvers")


def register(name: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Decorator that adds an algorithm to the registry under ``name``.

    Raises:
        SolverError: when the name is taken.
    """

    def add(function: Callable[..., Answer]) -> Callable[..., Answer]:
        METHODS.add(name, function)
        return function

    return add


def available() -> tuple[str, ...]:
    """Names of all registered methods, and of those that other packages offer through an entry point."""
    return METHODS.names()


def options_of(method: str) -> Mapping[str, Any]:
    """Option names of a method, with their defaults.

    Raises:
        SolverError: for an unknown method, or another package's that cannot be loaded.
    """
    parameters = inspect.signature(METHODS.get(method)).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in GIVEN
    }


def solve(
    graph: ComputationGraph,
    budget_bytes: int,
    method: str = "auto",
    time_limit: float = 30.0,
    *,
    work_limit: float | None = None,
    known: Solution | None = None,
    below_seconds: float = math.inf,
    **options: Any,
) -> Solution:
    """Find the cheapest schedule of ``graph`` whose peak memory is at most ``budget_bytes``.

    Args:
        graph: the problem, with costs.
        budget_bytes: the most that may be held at any moment, everything counted (see `ComputationGraph.floor_bytes`).
        method: one of `available()`.
        time_limit: seconds the method may take.
        work_limit: seconds of counted work that it may do: the answer is the same on every machine that is fast enough for
            the time limit (see `lightning_remat.solvers.common._clock`). ``None`` to go by time alone.
        known: a solution of the same graph within the budget, if there is one: the answer is never dearer. Methods with a
            keyword ``known`` ("auto") go on from it.
        below_seconds: a schedule is of no use unless it takes less than so many seconds a step. Methods with a keyword of that
            name ("auto") end once they have proven that none does, with what they have found so far.
        **options: the method's own options (`options_of`).

    Returns:
        A `Solution`; its schedule has passed `verify` at this budget.

    Raises:
        SolverError: for an unknown method or option, or another package's method that cannot be loaded.
        BudgetError: for a budget that is not a positive whole number of bytes, or a limit that is not positive.
        GraphError: for a graph whose forward outputs are produced in the backward.
        ScheduleError: when the answer breaks a rule or the budget: a defect of the method, or ``known`` is not as said.
    """
    accepted = check(budget_bytes, method, options)
    algorithm = METHODS.get(method)
    started = time.monotonic()
    with _clock.limited(time_limit, work_limit) as deadline:
        problem = Problem(graph)
        sequence = problem.contract(known.schedule) if known is not None and known.schedule is not None else None
        given = {"known": sequence, "below_seconds": below_seconds}
        given = {name: one for name, one in given.items() if name in inspect.signature(algorithm).parameters}
        if (resting := resting_bytes(problem)) > budget_bytes:
            answer = Answer(None, Status.INFEASIBLE, notes=(f"{resting:,} bytes are held while nothing runs",))
        else:
            answer = algorithm(problem, budget_bytes, deadline=deadline, **given, **options)
    if not isinstance(answer, Answer):  # the type checker cannot see into other packages
        raise SolverError(f"solver {method!r} returned a {type(answer).__name__}, not an Answer")
    if sequence is not None and known is not None:
        best = math.inf if answer.sequence is None else problem.evaluate(answer.sequence).seconds
        if problem.evaluate(sequence).seconds < best:
            answer = dataclasses.replace(answer, sequence=sequence, status=Status.FEASIBLE, method=known.method)
    return solution_of(graph, problem, answer, budget_bytes, method, dict(accepted, **options), started)


def check(budget_bytes: int, method: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The method's options with their defaults; raises as `solve` does where what it is asked makes no sense."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes <= 0:
        raise BudgetError(f"a budget of {budget_bytes!r}: solve() takes a positive whole number of bytes")
    accepted = options_of(method)
    for name in options:
        if name not in accepted:
            names = ", ".join(accepted) or "none"
            raise SolverError(f"solver {method!r} has no option {name!r}; it takes: {names}")
    return accepted


def run_algorithm(method: str, problem: PlainProblem, budget_bytes: int, deadline: float, **options: Any) -> Answer:
    """Run one algorithm on a problem that exists already, without verifying its answer: what a portfolio calls.

    Raises:
        SolverError: for an unknown method, another package's that cannot be loaded, or options that make no sense.
    """
    return METHODS.get(method)(problem, budget_bytes, deadline=deadline, **options)


def solution_of(
    graph: ComputationGraph,
    problem: Problem,
    answer: Answer,
    budget_bytes: float,
    method: str,
    options: Mapping[str, Any],
    started: float,
) -> Solution:
    """An answer, expanded to a schedule and verified, with the trivial bound where its own is no larger.

    Raises:
        ScheduleError: when the schedule breaks a rule or the budget.
    """
    once = sum(problem.seconds[n] for n in required(problem))  # these run at least once: no schedule is faster
    bound, scope = once, ANY_ORDER
    if answer.lower_bound_seconds > once:
        bound, scope = answer.lower_bound_seconds, answer.bound_scope
    schedule, seconds, peak, status = None, math.inf, 0, answer.status
    if answer.sequence is not None:
        schedule = problem.expand(answer.sequence)
        peak = verify(graph, schedule, int(budget_bytes) if math.isfinite(budget_bytes) else None)
        seconds = sum(problem.seconds[n] for n in answer.sequence.nodes)
        if seconds <= bound * (1 + 1e-9):
            status = Status.OPTIMAL
    return Solution(
        schedule=schedule,
        status=status,
        seconds=seconds,
        peak_bytes=peak,
        lower_bound_seconds=bound,
        bound_scope=scope,
        solve_seconds=time.monotonic() - started,
        method=f"{method}:{answer.method}" if answer.method else method,
        options=options,
        notes=answer.notes,
    )
