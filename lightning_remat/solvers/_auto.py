"""The portfolio: methods in turn within the time limit, the cheapest verified schedule kept, and a word on each.

No method is best everywhere. The block-wise greedy is fast and good on networks; Checkmate's program is exact on small
graphs; treewidth finds schedules at low budgets where the others find none. What was tried, and how it went, is in the
answer's notes.
"""

from __future__ import annotations

import math
import time

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers._greedy import smallest
from lightning_remat.solvers._problem import Problem
from lightning_remat.solvers._registry import Answer, register, run_algorithm, solution_of
from lightning_remat.solvers._solution import Solution, Status

EXACT_UP_TO = 40
"""Nodes up to which Checkmate's program is tried whole."""


@register("auto")
def auto(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    exact_up_to: int = EXACT_UP_TO,
    exact_seconds: float = 5.0,
) -> Answer:
    """Try what suits the size of the problem, and keep the cheapest schedule.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        exact_up_to: nodes up to which Checkmate's program is solved whole (beyond, only the heuristics are tried, and
            treewidth where they find nothing).
        exact_seconds: the most that Checkmate's program may take here; method ``"milp"`` takes the whole time limit.
    """
    started = time.monotonic()
    notes: list[str] = []
    best: tuple[float, Answer, str] | None = None
    bound, scope = 0.0, ""

    def attempt(method: str, share: float, seconds: float = math.inf) -> Answer:
        nonlocal best, bound, scope
        begun = time.monotonic()
        limit = begun + min(seconds, share * max(0.0, deadline - begun))
        answer = run_algorithm(method, problem, budget_bytes, limit)
        taken = time.monotonic() - begun
        if answer.sequence is None:
            notes.append(f"{method}: {answer.status.value} after {taken:.1f} s")
        else:
            cost = problem.evaluate(answer.sequence).seconds
            notes.append(f"{method}: {cost:.6g} s a step, {answer.status.value} after {taken:.1f} s")
            if best is None or cost < best[0]:
                best = (cost, answer, method)
        notes.extend(f"{method}: {note}" for note in answer.notes)
        if answer.lower_bound_seconds > bound:
            bound, scope = answer.lower_bound_seconds, answer.bound_scope
        return answer

    if attempt("no_remat", 1.0).sequence is None:
        attempt("greedy", 0.5)
        attempt("chen_sqrt", 0.5)
        if len(problem) <= exact_up_to:
            attempt("milp", 0.7, exact_seconds)
        else:
            notes.append(f"milp: not tried, {len(problem)} operations are more than {exact_up_to}")
        if best is None:
            attempt("treewidth", 1.0)
    if best is None:
        late = time.monotonic() >= deadline
        return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, notes=tuple(notes))
    cost, answer, method = best
    status = Status.OPTIMAL if cost <= bound * (1 + 1e-9) else Status.FEASIBLE
    notes.append(f"chose {method} after {time.monotonic() - started:.1f} s")
    return Answer(answer.sequence, status, bound, scope, method=method, notes=tuple(notes))


def find_smallest(graph: ComputationGraph, time_limit: float = 30.0) -> Solution:
    """The schedule of the smallest peak that is found: what ``budget="min"`` means. It always has a schedule.

    Args:
        graph: the problem.
        time_limit: seconds it may take.

    Returns:
        A `Solution` whose ``peak_bytes`` is the smallest feasible budget found. No method proves that none is smaller.
    """
    started = time.monotonic()
    problem = Problem(graph)
    _evaluation, sequence = smallest(problem, started + time_limit)
    answer = Answer(sequence, Status.FEASIBLE, notes=("the smallest peak found; a smaller one may exist",))
    return solution_of(graph, problem, answer, math.inf, "smallest", {}, started)
