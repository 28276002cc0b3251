"""The method "checkmate_unpartitioned": Checkmate's program without frontier-advancing stages (Jain et al. 2020).

As `_integer_program` (sections 4.3 to 4.5), but stage t need not end with the first evaluation of node t: any stage may
evaluate any of the nodes, in the captured order and each at most once, and the last one must be reached (eq. 1e) from
nothing (eq. 1d). The program has more schedules, and its relaxation says next to nothing (appendix A: an integrality
gap of 21.56 against 1.18 on the unit chain of 8 layers), so branch and bound hardly prunes: the paper's solver took 9.4
hours for the 17 ops of that chain, to find the same cost as the partitioned program in 0.23 seconds (section 4.6). It
is here for comparison, on tiny graphs, begins at the partitioned program's schedule, and seldom proves more than the
trivial bound.

What differs from the paper: the stages before ``boundary``, as many as there are forward nodes, evaluate forward nodes
only, and what the caller takes must exist between them and the others, so that every schedule of eq. 9 is one of these
too. Random nodes, and nodes that may run only once, are evaluated first in the captured order and on their own side of
the boundary.
"""

from __future__ import annotations

import contextlib
import itertools

import mip

from lightning_remat.solvers.checkmate._integer_program import Program, solve_program, solve_stages, too_large
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once, required
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status

UNPARTITIONED = (
    "schedules in as many stages as ops, each in the captured order with every op at most once (Checkmate, 4.3)"
)


@register("checkmate_unpartitioned")
def checkmate_unpartitioned(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    gap: float = 1e-4,
    max_ops: int = 20,
    solver: str = "CBC",
    start: NodeSequence | None = None,
) -> Answer:
    """Checkmate's program without frontier-advancing stages.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        gap: stop when the schedule is proven to be within this share of the bound.
        max_ops: problems of more nodes are refused.
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".
        start: a sequence to begin from, used where its peak is within the budget.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if len(problem) > max_ops:
        note = (
            f"refused: {len(problem)} ops are more than max_ops={max_ops}, and this program is for comparison; use milp"
        )
        return Answer(None, Status.REFUSED, notes=(note,))
    if note := too_large(problem, budget_bytes):
        return Answer(None, Status.INFEASIBLE, notes=(note,))
    half = clock() + 0.5 * max(0.0, deadline - clock())
    partitioned = solve_stages(problem, budget_bytes, gap=gap, deadline=half, solver=solver, start=start)
    notes: tuple[str, ...] = (f"the partitioned program: {partitioned.status.value}",)
    if partitioned.sequence is not None:
        notes = (f"{notes[0]}, {problem.evaluate(partitioned.sequence).seconds:.6g} s a step",)
    with contextlib.closing(UnpartitionedProgram(problem, budget_bytes, solver)) as program:
        result = solve_program(program, partitioned.sequence, gap, deadline)
    scope = f"{UNPARTITIONED}, each result in memory of its own" if any(problem.overwrites) else UNPARTITIONED
    notes = (*notes, *result.notes)
    if result.sequence is None:
        return Answer(None, result.status, result.lower_bound_seconds, scope, notes=notes)
    sequence = drop_unused(problem, result.sequence)
    if result.status is not Status.OPTIMAL:
        sequence = keep_longer(problem, sequence, budget_bytes, deadline)
    bound = min(result.lower_bound_seconds, problem.evaluate(sequence).seconds)
    return Answer(sequence, result.status, bound, scope, notes=notes)


class UnpartitionedProgram(Program):
    """Eq. 9 with eqs. 1d and 1e in the place of 8a to 8c."""

    def _first_stages(self) -> list[int]:
        boundary = self.problem.boundary
        return [0 if node < boundary else boundary for node in range(len(self.problem))]

    def _last_useful_stages(self) -> list[int]:
        problem, count = self.problem, len(self.problem)
        return [
            problem.boundary - 1 if node < problem.boundary and not problem.recomputable[node] else count - 1
            for node in range(count)
        ]

    def _add_computations(self) -> None:
        """R_{t,k}: 1 where stage t evaluates node k. R is not lower triangular, and none of its entries is constant."""
        problem, count = self.problem, len(self.problem)
        self.once_seconds = sum([problem.seconds[node] for node in required(problem)])
        self.constant_seconds = 0.0
        self.computed = [
            {
                node: self.model.add_var(var_type=mip.BINARY)  # eq. 1f
                for node in range(count)
                if self.first_stage[node] <= stage <= self.last_stage[node]
            }
            for stage in range(count)
        ]
        for kind in (problem.random, [not flag for flag in problem.recomputable]):
            self._add_effects([node for node in range(count) if kind[node]])
        self._minimize_seconds()

    def _add_effects(self, nodes: list[int]) -> None:
        """[Effects] Nodes run on their side of the boundary, first in captured order, and once if not recomputable."""
        problem = self.problem
        for node in nodes:
            own_side = range(problem.boundary) if node < problem.boundary else range(problem.boundary, len(problem))
            runs = mip.xsum(self.computed[stage][node] for stage in own_side)
            self._require(runs, ">=" if problem.recomputable[node] else "==", 1.0)
        for earlier, node in itertools.pairwise(nodes):
            for stage, row in enumerate(self.computed):
                if node in row:
                    before = mip.xsum(
                        self.computed[s][earlier] for s in range(stage + 1) if earlier in self.computed[s]
                    )
                    self._require(before, ">=", row[node])
