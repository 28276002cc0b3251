"""The method "rk_checkmate": Rockmate's Checkmate, an integer program on computation nodes and data nodes, op by op.

Rockmate (Zhao et al. 2023) writes Checkmate's program for values instead of ops, so that one op may have several
results with liveness intervals of their own. HiRemate (Gusak et al. 2025, appendix B) gives the formulation:
`_integer_program`, here without options and phantom nodes. Its bound holds for `PHASES` only. Above ``max_ops`` nodes
the problem is coarsened (`_coarse_search`), and no bound is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_remat.solvers.common._coarse_search import COARSE_GAP, search_coarsened
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once, required
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.hiremate._integer_program import DataFlow, Way, solve_phases

PHASES = "schedules in the captured order that evaluate an op at most once a phase (HiRemate, appendix B)"


def data_flow(problem: PlainProblem) -> DataFlow:
    """The program's data flow for a problem: every node, with one option."""
    wanted = set(required(problem))
    return DataFlow(
        ways=tuple(
            (Way(seconds, frozenset(reads), ((workspace, frozenset()),)),)
            for seconds, reads, workspace in zip(problem.seconds, problem.reads, problem.workspace, strict=True)
        ),
        writes=tuple(problem.writes),
        once=tuple(not flag for flag in problem.recomputable),
        wanted=tuple(node in wanted for node in range(len(problem))),
        nbytes=tuple(problem.nbytes),
        producer=tuple(problem.producer),
        boundary=problem.boundary,
        outputs=frozenset(problem.forward_outputs),
        transient=frozenset(problem.forward_transient),
        finals=frozenset(problem.finals),
        base_bytes=problem.base_bytes,
        forward_extra_bytes=problem.forward_extra_bytes,
    )


def to_sequence(flow: DataFlow, runs: Sequence[Sequence[tuple[int, int]]]) -> NodeSequence:
    """The runs of all phases in order, for a data flow whose nodes are the problem's."""
    nodes = [node for phase in runs for node, _ in phase]
    return NodeSequence(tuple(nodes), sum([len(phase) for phase in runs[: flow.boundary]]))


@register("rk_checkmate")
def rk_checkmate(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    gap: float = 1e-4,
    max_ops: int = 40,
    coarsen_to: int = 24,
    solver: str = "CBC",
) -> Answer:
    """The program on computation nodes and data nodes (appendix B), without options.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        gap: stop when the schedule is proven to be within this share of the bound.
        max_ops: with more nodes than this the problem is coarsened.
        coarsen_to: number of nodes of the coarsened problem, about.
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if len(problem) > max_ops:

        def solve(coarse: PlainProblem, budget: int, until: float) -> tuple[NodeSequence | None, Status]:
            flow = data_flow(coarse)
            result = solve_phases(flow, budget, gap=max(gap, COARSE_GAP), deadline=until, solver=solver)
            return None if result.runs is None else to_sequence(flow, result.runs), result.status

        return search_coarsened(problem, budget_bytes, coarsen_to, solve, deadline)
    flow = data_flow(problem)
    result = solve_phases(flow, budget_bytes, gap=gap, deadline=deadline, solver=solver)
    scope = f"{PHASES}, each result in memory of its own" if any(problem.overwrites) else PHASES
    if result.runs is None:
        return Answer(None, result.status, result.bound_seconds, scope)
    sequence = drop_unused(problem, to_sequence(flow, result.runs))
    if problem.evaluate(sequence).peak_bytes > budget_bytes:  # within the solver's tolerance only
        return Answer(None, Status.TIMEOUT, result.bound_seconds, scope, notes=("over the budget by a rounding error",))
    if result.status is not Status.OPTIMAL:
        sequence = keep_longer(problem, sequence, budget_bytes, deadline)
    bound = min(result.bound_seconds, problem.evaluate(sequence).seconds)
    return Answer(sequence, result.status, bound, scope)
