"""The method "milp": Checkmate's program (`_integer_program`), on the problem itself or, where it is large, a coarsening of it.

The program gives every result memory of its own, though some results may take the memory of an input. CBC solves a few
dozen ops to the optimum. Above ``max_ops`` nodes the problem is coarsened first (`_coarse_search`): then neither the
answer nor the program's bound says anything exact about the problem, so no bound of its own is reported, and
"infeasible" means infeasible for that coarsening.
"""

from __future__ import annotations

from lightning_remat.solvers.checkmate._integer_program import CAPTURED_ORDER, solve_stages
from lightning_remat.solvers.common._coarse_search import COARSE_GAP, search_coarsened
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status


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
    """Checkmate's program (eq. 9), with of the order of n² binary variables for n nodes.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
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

    def solve(coarse: PlainProblem, budget: int, until: float) -> tuple[NodeSequence | None, Status]:
        result = solve_stages(coarse, budget, gap=max(gap, COARSE_GAP), deadline=until, solver=solver)
        return result.sequence, result.status

    return search_coarsened(problem, budget_bytes, coarsen_to, solve, deadline, known=[start])
