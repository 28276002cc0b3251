"""The portfolio: what is quick and good on networks first, the cheapest schedules improved, and a bound beside.

"crossing" gives the bound, and schedules that are near it where the moment between forward and backward is what binds.
"rotor" decides by blocks, which is better where the budget is low, and "descent" gives up what is held at the peak, which is
best where it is very low. Where the cheapest so far is well above the bound, "hiremate" is tried too. The cheapest are where
`improve` begins. Graphs of a few dozen nodes get the other methods as well, Checkmate's program among them; larger ones only
where nothing was found so far. What was tried, and how it went, is in the answer's notes.
"""

from __future__ import annotations

import math
import time

from lightning_remat.solvers._crossing import BACKWARD_AFTER_FORWARD
from lightning_remat.solvers._improve import improve
from lightning_remat.solvers._problem import NodeSequence, Problem
from lightning_remat.solvers._registry import Answer, register, run_algorithm
from lightning_remat.solvers._solution import Status

EXACT_UP_TO = 40
"""Nodes up to which Checkmate's program is tried whole."""

FIRST = ("crossing", "rotor", "descent")
SMALL = (
    "greedy", "chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy", "griewank_logn",
    "greedy_xla", "treewidth", "pathwidth", "approx_dp", "exact_dp",
)  # fmt: skip
"""Methods that take milliseconds on a few dozen nodes."""

OPEN_GAP = 0.005
"""Gap from which it pays to ask "hiremate" as well, which takes seconds where the first methods take tenths of them."""

CLOSED_GAP = 0.001
"""Gap up to which nothing is improved any more: costs are not known as well as that."""

HOPELESS = 1.25
"""Times the cheapest schedule from which another is not improved."""

HIREMATE_UP_TO = 1500
"""Nodes up to which it is asked."""

OTHERWISE = ("greedy", "hiremate", "treewidth", "linearized_greedy", "griewank_logn")
"""Methods for larger graphs on which the first ones found nothing."""


def usual_seconds(problem: Problem) -> float:
    """How long a search for a graph of this size pays: a few seconds, and some more for thousands of nodes."""
    return 4.0 + len(problem) / 400


@register("auto")
def auto(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    seconds: float | None = None,
    exact_up_to: int = EXACT_UP_TO,
    exact_seconds: float = 5.0,
    improvements: int = 4,
) -> Answer:
    """Try what suits the size of the problem, improve what is cheapest, and keep the best.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        seconds: how long to search; ``None`` for what usually pays (`usual_seconds`). "hiremate" gets as much again.
        exact_up_to: nodes up to which Checkmate's program is solved whole, and all quick methods are tried.
        exact_seconds: the most that Checkmate's program may take here; method ``"milp"`` takes the whole time limit.
        improvements: how many of the cheapest schedules are improved, half as many again each time.
    """
    started = time.monotonic()
    span = usual_seconds(problem) if seconds is None else seconds
    until = min(deadline, started + span)
    notes: list[str] = []
    found: list[tuple[float, NodeSequence, str]] = []
    bounds: list[tuple[float, str]] = []

    def attempt(method: str, limit: float) -> None:
        begun = time.monotonic()
        answer = run_algorithm(method, problem, budget_bytes, limit)
        taken = time.monotonic() - begun
        if answer.sequence is None:
            notes.append(f"{method}: {answer.status.value} after {taken:.1f} s")
        else:
            cost = problem.evaluate(answer.sequence).seconds
            notes.append(f"{method}: {cost:.6g} s a step, {answer.status.value} after {taken:.1f} s")
            found.append((cost, answer.sequence, method))
        notes.extend(f"{method}: {note}" for note in answer.notes)
        bounds.append((answer.lower_bound_seconds, answer.bound_scope))

    def proven(cost: float) -> tuple[float, str]:
        """The largest bound; a schedule that is cheaper than a narrow bound is not one of those that it speaks of."""
        holds = [one for one in bounds if one[1] == BACKWARD_AFTER_FORWARD or one[0] <= cost * (1 + 1e-9)]
        return max(holds, default=(0.0, ""))

    attempt("no_remat", deadline)
    if not found:
        small = len(problem) <= exact_up_to
        for method in FIRST:
            attempt(method, until)
        for method in SMALL if small else ():
            attempt(method, until)
        if small:
            attempt("lp_rounding", min(until, time.monotonic() + exact_seconds))
            attempt("milp", min(deadline, time.monotonic() + exact_seconds))
        else:
            notes.append(f"milp: not tried, {len(problem)} operations are more than {exact_up_to}")
        least = min([cost for cost, _, _ in found], default=math.inf)
        if not small and len(problem) <= HIREMATE_UP_TO and found and least > (1 + OPEN_GAP) * proven(least)[0]:
            attempt("hiremate", min(deadline, time.monotonic() + span))
            until = min(deadline, max(until, time.monotonic() + 0.5 * span))
        for method in OTHERWISE:
            if not found and time.monotonic() < deadline:
                attempt(method, 0.5 * (deadline + time.monotonic()))
        distinct = {sequence.nodes: (cost, sequence, method) for cost, sequence, method in reversed(found)}
        best = sorted(distinct.values(), key=lambda one: one[0])[:improvements]
        best = [one for one in best if one[0] <= HOPELESS * best[0][0]]
        rounds = len(best).bit_length()
        # Successive halving: as much time for each round, and in it for each schedule.
        for number in range(rounds):
            for index, (cost, sequence, method) in enumerate(best):
                left, least = until - time.monotonic(), min([one[0] for one in best])
                if left <= 0 or least <= (1 + CLOSED_GAP) * proven(least)[0]:
                    break
                stop = time.monotonic() + left / ((rounds - number) * len(best) - index)
                better, attempts = improve(problem, sequence, budget_bytes, stop, seed=number)
                now = problem.evaluate(better).seconds
                notes.append(f"improved {method} from {cost:.6g} to {now:.6g} s a step in {attempts} attempts")
                best[index] = (now, better, method)
            best = sorted(best, key=lambda one: one[0])[: max(1, len(best) // 2)]
            found += best
    if not found:
        late = time.monotonic() >= deadline
        bound, scope = proven(math.inf)
        return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, bound, scope, notes=tuple(notes))
    cost, sequence, method = min(found, key=lambda one: one[0])
    bound, scope = proven(cost)
    status = Status.OPTIMAL if cost <= bound * (1 + 1e-9) else Status.FEASIBLE
    notes.append(f"chose {method} after {time.monotonic() - started:.1f} s")
    return Answer(sequence, status, bound, scope, method=method, notes=tuple(notes))
