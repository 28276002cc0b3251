"""The method "descent": from schedules that hold too much, down to the budget, moment by moment.

At the moment of the peak, what is held there without being used is given up and computed again later (`lower_peak`):
all of it, or the largest value whose loss lowers the peak. That is repeated until the peak is low enough or no single
step lowers it. Such schedules repeat far more than they must; `keep_longer` drops the repetitions that the budget has
room to avoid. Descents begin at what the program of "crossing" holds for small amounts of bytes, and at the block
boundaries of "greedy".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_remat.solvers.bounds._minimum_cut import CrossingProgram, rollouts
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, finish, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._working_set import needs_more
from lightning_remat.solvers.heuristics._greedy import starts

SHARES = (0.5, 0.25, 0.125, 0.06, 0.03, 0.0)
"""Shares of the bytes of all forward values that are held at the crossing where descents begin."""


def beginnings(problem: PlainProblem, deadline: float, solver: str = "CBC") -> Iterator[NodeSequence]:
    """Schedules to descend from: some by the program of "crossing", then some by block boundaries."""
    with contextlib.closing(CrossingProgram(problem, solver)) as program:
        for share in SHARES:
            left = deadline - clock()
            if left < 0 or program.solve(share * program.all_bytes, left) is None:
                break
            yield from rollouts(problem, program.kept())
    boundaries = sorted(starts(problem, deadline), key=lambda one: one[0].peak_bytes)
    for _, keep in boundaries[:4]:
        yield drop_unused(problem, rollout(problem, keep))


@register("descent")
def descent(problem: Problem, budget_bytes: int, *, deadline: float, enough: int = 6, attempts: int = 4) -> Answer:
    """Give up what is held at the moment of the peak until the budget is kept.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        enough: how many schedules within the budget are enough.
        attempts: how many of them, the cheapest, `keep_longer` is run on.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if too_large := needs_more(problem, budget_bytes):
        return Answer(None, Status.INFEASIBLE, notes=(too_large,))
    fits: list[NodeSequence] = []
    tried = 0
    for sequence in beginnings(problem, deadline):
        if len(fits) >= enough or clock() > deadline:
            break
        tried += 1
        lowered = lower_peak(problem, sequence, budget_bytes, deadline)
        if problem.evaluate(lowered).peak_bytes <= budget_bytes:
            fits.append(lowered)
    notes = (f"{len(fits)} of {tried} descents reached the budget",)
    best = finish(problem, fits, budget_bytes, deadline, attempts)
    return Answer.of_search(best, deadline, notes=notes)
