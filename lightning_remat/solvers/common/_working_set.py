"""Working sets: the bytes that an op needs while it runs, whatever the schedule."""

from __future__ import annotations

from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import required


def alone_bytes(problem: PlainProblem, node: int) -> int:
    """Bytes that must be held while ``node`` runs, whatever the schedule."""
    own = sum([problem.nbytes[v] for v in (*problem.reads[node], *problem.writes[node])])
    return problem.base_bytes + own + problem.workspace[node]


def least_bytes(problem: PlainProblem, node: int) -> int:
    """Bytes that must be held while ``node`` runs, also where its result takes the memory of one of its inputs.

    While the backward runs the caller holds what the forward has handed out.
    """
    taken = max([problem.nbytes[v] for v in problem.overwrites[node]], default=0) if problem.overwrites else 0
    own = {*problem.reads[node], *problem.writes[node]}
    beside = [v for v in problem.forward_outputs if v not in own] if node >= problem.boundary else []
    return alone_bytes(problem, node) - taken + sum([problem.nbytes[v] for v in beside])


def largest_bytes(problem: PlainProblem) -> tuple[int, int | None]:
    """Bytes that no schedule can do without, and the node that needs them while it runs (``None``: there are no nodes)."""
    return max([(least_bytes(problem, node), node) for node in required(problem)], default=(0, None))


def needs_more(problem: PlainProblem, budget_bytes: int) -> str:
    """Names a node that needs more than a budget whatever the schedule; "" without one."""
    least, node = largest_bytes(problem)
    return f"{problem.name(node)} alone needs {least:,} bytes" if node is not None and least > budget_bytes else ""
