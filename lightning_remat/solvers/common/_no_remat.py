"""No rematerialization: every op once, in the captured order.

It is NoRemat in Kumar et al. 2019 (section 4) and "checkpoint all" in Checkmate (Jain et al. 2020, Table 1).
"""

from __future__ import annotations

from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status


@register("checkpoint_all")
@register("no_remat")
def no_remat(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
    """Evaluate every op once and free every tensor after its last use."""
    del deadline  # one pass
    if problem.evaluate(problem.captured).peak_bytes > budget_bytes:
        return Answer(None, Status.INFEASIBLE)
    return Answer(problem.captured, Status.FEASIBLE)  # `solution_of` makes it optimal where every node is required
