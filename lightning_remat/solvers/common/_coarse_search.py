"""A program that is too slow for the whole problem, solved at several budgets on a coarsening of it.

A coarse node is kept or computed again as a whole, which spends budget on tensors that are large and cheap to compute
again. So the coarse program also runs at tighter budgets, and `keep_longer` spends the rest on the problem itself,
tensor by tensor. Where nothing fits the coarse program's budget, larger ones are tried: on the problem itself frees
come earlier, and the schedule may fit all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._coarsen import coarsen
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import keep_longer, required
from lightning_remat.solvers.common._registry import Answer
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._working_set import alone_bytes

COARSE_GAP = 5e-3
"""The least gap at which a coarse program stops: its optimum means little for the problem itself."""

LARGER = (110, 125, 150)
"""Budgets for coarse programs, in percent of the budget, where the budget itself is too small for one."""

Solve = Callable[[PlainProblem, int, float], tuple[NodeSequence | None, Status]]
"""Solves a coarse problem within a budget in bytes, until a deadline: the sequence, and how the solve ended."""


def search_coarsened(
    problem: PlainProblem,
    budget_bytes: int,
    size: int,
    solve: Solve,
    deadline: float,
    *,
    known: Iterable[NodeSequence | None] = (),
    tighter: Sequence[int] = (50, 25),
) -> Answer:
    """The cheapest sequence of ``problem`` from programs on its coarsening to ``size`` nodes.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        size: number of nodes of the coarsened problem, about.
        solve: the program.
        deadline: `clock` at which to stop.
        known: sequences of ``problem`` that compete where they are within the budget.
        tighter: further budgets once the budget itself fits, in percent of the way to it from the largest coarse
            working set.

    Returns:
        The cheapest sequence; no bound, since that of a coarse program says nothing about the problem itself.
    """
    coarse = coarsen(problem, size)
    notes = [f"{len(problem)} ops coarsened to {len(coarse.problem)}"]
    low = max([alone_bytes(coarse.problem, node) for node in required(coarse.problem)], default=problem.base_bytes)
    smaller = [low + (budget_bytes - low) * share // 100 for share in tighter if budget_bytes > low]
    larger = [budget_bytes * share // 100 for share in LARGER]
    found = [s for s in known if s is not None and problem.evaluate(s).peak_bytes <= budget_bytes]
    until = deadline - min(2.0, 0.1 * max(0.0, deadline - clock()))  # the rest is for filling up
    queue, status = [budget_bytes], Status.INFEASIBLE
    while queue and (clock() < until or queue == [budget_bytes]):
        budget = queue.pop(0)
        now = clock()
        turn = now + (until - now) / (len(queue) + 1 + (len(smaller) if budget == budget_bytes else 0))
        result, ended = solve(coarse.problem, budget, turn)
        fits = False
        if result is not None:
            sequence = coarse.refine(result)
            fits = problem.evaluate(sequence).peak_bytes <= budget_bytes
            found += [sequence] * fits
        elif ended is Status.TIMEOUT:
            status = Status.TIMEOUT
        notes.append(f"coarse program at {budget:,} bytes: {ended.value}{', fits' if fits else ''}")
        if budget == budget_bytes:
            queue = smaller if fits else larger
        elif budget > budget_bytes and fits:
            break
    if not found:
        if status is Status.INFEASIBLE:
            notes.append("infeasible for this coarsening only: more ops (coarsen_to) may fit")
        return Answer(None, status, notes=tuple(notes))
    kept = [keep_longer(problem, sequence, budget_bytes, max(deadline, clock() + 0.5)) for sequence in found]
    return Answer(min(kept, key=lambda s: problem.evaluate(s).seconds), Status.FEASIBLE, notes=tuple(notes))
