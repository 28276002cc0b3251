"""Working sets: the bytes that must be held while an op runs, whatever else a schedule keeps."""

from __future__ import annotations

from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import required


def alone_bytes(problem: PlainProblem, node: int) -> int:
    """Bytes that must be held while ``node`` runs in any schedule that gives each result memory of its own."""
    own = sum([problem.nbytes[v] for v in (*problem.reads[node], *problem.writes[node])])
    return problem.base_bytes + own + problem.workspace[node]


def least_bytes(problem: PlainProblem, node: int) -> int:
    """Bytes that must be held while ``node`` runs in any schedule, its result taking the memory of an input if it may.

    While the backward runs, the caller holds what the forward has handed out.
    """
    taken = max([problem.nbytes[v] for v in problem.overwrites[node]], default=0) if problem.overwrites else 0
    own = {*problem.reads[node], *problem.writes[node]}
    beside = [v for v in problem.forward_outputs if v not in own] if node >= problem.boundary else []
    return alone_bytes(problem, node) - taken + sum([problem.nbytes[v] for v in beside])


def largest_bytes(problem: PlainProblem) -> tuple[int, int | None]:
    """The largest working set, in bytes, below which no schedule's peak lies, and its node; ``None`` without nodes."""
    return max([(least_bytes(problem, node), node) for node in required(problem)], default=(0, None))


def needs_more(problem: PlainProblem, budget_bytes: int) -> str:
    """Names a node that needs more than a budget whatever the schedule; "" without one."""
    least, node = largest_bytes(problem)
    return f"{problem.name(node)} alone needs {least:,} bytes" if node is not None and least > budget_bytes else ""
