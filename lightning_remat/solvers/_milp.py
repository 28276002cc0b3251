"""The method "milp": Checkmate's program (`_stages`), on the problem itself where it is small enough, coarsened otherwise.

The program gives every result memory of its own, though some may take an input's. CBC solves a few dozen ops to the
optimum. Above ``max_ops`` nodes the problem is coarsened first (`coarsen`): then neither the answer nor the program's bound
says anything exact about the problem, so no bound of its own is reported, and "infeasible" means infeasible for that
coarsening.
"""

from __future__ import annotations

import time

from lightning_remat.solvers._coarsen import Coarsening, coarsen
from lightning_remat.solvers._problem import NodeSequence, Problem
from lightning_remat.solvers._prune import drop_unused, keep_longer, once, required
from lightning_remat.solvers._registry import Answer, register
from lightning_remat.solvers._solution import Status
from lightning_remat.solvers._stages import CAPTURED_ORDER, alone_bytes, solve_stages


@register("milp")
def milp(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    gap: float = 1e-4,
    max_ops: int = 48,
    coarsen_to: int = 30,
    solver: str = "CBC",
    start: NodeSequence | None = None,
) -> Answer:
    """Checkmate's program.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        gap: stop when the schedule is proven to be within this share of the bound.
        max_ops: with more nodes than this the problem is coarsened.
        coarsen_to: number of nodes of the coarsened problem, about.
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".
        start: a sequence to begin from, used where its peak is within the budget.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if len(problem) <= max_ops:
        result = solve_stages(problem, budget_bytes, gap=gap, deadline=deadline, solver=solver, start=start)
        scope = f"{CAPTURED_ORDER}, each result in memory of its own" if any(problem.overwrites) else CAPTURED_ORDER
        if result.sequence is None:
            return Answer(None, result.status, result.lower_bound_seconds, scope, notes=result.notes)
        # Eq. 8a evaluates every node in its own stage, even where it is not needed yet: outside eq. 9 it may wait.
        sequence = drop_unused(problem, result.sequence)
        if result.status is not Status.OPTIMAL:
            sequence = keep_longer(problem, sequence, budget_bytes, deadline)
        bound = min(result.lower_bound_seconds, problem.evaluate(sequence).seconds)
        return Answer(sequence, result.status, bound, scope, notes=result.notes)
    return _solve_coarsened(problem, budget_bytes, coarsen(problem, coarsen_to), gap, deadline, solver, start)


def _solve_coarsened(
    problem: Problem,
    budget_bytes: int,
    coarse: Coarsening,
    gap: float,
    deadline: float,
    solver: str,
    start: NodeSequence | None,
) -> Answer:
    """Solve the coarse program at several budgets, and fill up what the real budget has left on the fine problem.

    A coarse node is kept or computed again as a whole, which wastes a budget on tensors that are large and cheap. So the
    program also runs at tighter budgets, and `keep_longer` spends the rest tensor by tensor. Where the coarse program does
    not fit, larger budgets are tried: on the fine problem frees come earlier, and its schedule may fit all the same.
    """
    alone = [alone_bytes(coarse.problem, node) for node in required(coarse.problem)]
    low = max(alone, default=problem.base_bytes)
    notes = [f"{len(problem)} ops coarsened to {len(coarse.problem)}"]
    tighter = [low + (budget_bytes - low) * share // 100 for share in (50, 25) if budget_bytes > low]
    larger = [budget_bytes * share // 100 for share in (110, 125, 150)]
    found = [] if start is None or problem.evaluate(start).peak_bytes > budget_bytes else [start]
    queue, status = [budget_bytes], Status.INFEASIBLE
    until = deadline - min(2.0, 0.1 * max(0.0, deadline - time.monotonic()))  # the rest is for filling up
    while queue and time.monotonic() < until:
        budget = queue.pop(0)
        now = time.monotonic()
        turn = now + (until - now) / (len(queue) + 1 + (len(tighter) if budget == budget_bytes else 0))
        # The gap of a coarse program means little for the fine problem: half a percent will do.
        result = solve_stages(coarse.problem, budget, gap=max(gap, 5e-3), deadline=turn, solver=solver)
        fits = False
        if result.sequence is not None:
            sequence = coarse.refine(result.sequence)
            fits = problem.evaluate(sequence).peak_bytes <= budget_bytes
            if fits:
                found.append(sequence)
        elif result.status is Status.TIMEOUT:
            status = Status.TIMEOUT
        notes.append(f"coarse program at {budget:,} bytes: {result.status.value}{', fits' if fits else ''}")
        if budget == budget_bytes:
            queue = tighter if fits else larger
        elif budget > budget_bytes and fits:
            break
    if not found:
        if status is Status.INFEASIBLE:
            notes.append("infeasible for this coarsening only: more ops (coarsen_to) may fit")
        return Answer(None, status, notes=tuple(notes))
    kept = [keep_longer(problem, sequence, budget_bytes, max(deadline, time.monotonic() + 0.5)) for sequence in found]
    return Answer(min(kept, key=lambda s: problem.evaluate(s).seconds), Status.FEASIBLE, notes=tuple(notes))
