"""The method "crossing": what is held at the one moment between forward and backward, by a linear program.

Every schedule passes from the forward to the backward at some moment, and what it holds there fits the budget. Let k_v
say that value v is held there, f_n that node n runs in the forward and b_n that it runs in the backward. Then

    minimize    sum of seconds_n (f_n + b_n)
    subject to  k_v <= f_n                           for the values v that n writes
                f_m >= f_n,  k_v + b_m >= b_n        for the values v that n reads, written by m
                f_n + b_n >= 1                       for what must run at all, f_n = 1 or b_n = 1 where the side is given
                sum of bytes_v k_v <= budget - what is held in any case

has no more seconds than any schedule within the budget, in whatever order, however often a node runs: a lower bound,
and a strong one where the budget binds at the crossing. It is a minimum cut with a knapsack constraint, with about as
many variables as nodes and values. PyTorch's partitioner (`min_cut_rematerialization_partition`) solves a program like
it, and takes the bytes held at the crossing for the peak. Here it is solved for several amounts of bytes; values of
which it holds half or more are kept (`rollout`), the exact peak of each schedule decides, and `keep_longer` spends what
is left of the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from lightning_remat.solvers.bounds._linear_program import MomentsProgram
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import LONGEST
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, finish, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._solution import Status

BACKWARD_AFTER_FORWARD = "any schedule that runs the backward after the forward, in any order"


class CrossingProgram(MomentsProgram):
    """The program of the module's docstring, which is solved for any number of bytes held at the crossing.

    Args:
        problem: the problem.
        solver: python-mip's name of the solver.

    Attributes:
        all_bytes: bytes of all values that the forward computes.
    """

    def __init__(self, problem: PlainProblem, solver: str = "CBC") -> None:
        super().__init__(problem, (), solver)
        forward = [node for node in self.nodes if node < problem.boundary]
        self.all_bytes = float(sum([problem.nbytes[v] for node in forward for v in problem.writes[node]])) or 1.0
        self._solved: tuple[float, float] | None = None

    def room(self, budget_bytes: int) -> int:
        """Bytes that may be held at the crossing, forward outputs included, within a budget."""
        return budget_bytes - self.fixed_bytes(self.crossing)

    def solve(self, held_bytes: float, seconds: float = 60.0) -> float | None:
        """A lower bound, in seconds, on steps that hold at most ``held_bytes`` there; ``None`` if none is proven."""
        if self._solved is None or self._solved[0] != held_bytes:
            value = self.bound(held_bytes + self.fixed_bytes(self.crossing), seconds)
            self._solved = None if value is None else (held_bytes, value)
        return None if self._solved is None else self._solved[1]

    def kept(self, share: float = 0.5) -> frozenset[int]:
        """Values of which at least ``share`` is held in the last solution."""
        return self.held_at(self.crossing, share)


def rollouts(problem: PlainProblem, keep: frozenset[int]) -> Iterator[NodeSequence]:
    """Two schedules that keep some values: what is computed again stays until its last use, or for one reader."""
    forward = frozenset(v for v, made in enumerate(problem.producer) if 0 <= made < problem.boundary)
    for forget in (frozenset[int](), forward - keep):
        sequence = rollout(problem, keep, forget)
        if len(sequence.nodes) <= LONGEST * len(problem):
            yield drop_unused(problem, sequence)


def schedules(
    problem: PlainProblem,
    program: CrossingProgram,
    amounts: Iterable[float],
    budget_bytes: int,
    most: int,
    deadline: float,
) -> tuple[list[NodeSequence], int]:
    """Schedules that keep what the program holds for each amount of bytes, for each the first of `rollouts` that fits.

    Args:
        problem: the problem.
        program: its program.
        amounts: of bytes at the crossing, the largest first, since these take the least time.
        budget_bytes: the most that may be held at any moment.
        most: how many schedules within the budget are enough.
        deadline: `clock` at which to stop.

    Returns:
        Schedules within the budget, and the smallest peak that was met, in bytes.
    """
    found: list[NodeSequence] = []
    smallest = problem.evaluate(problem.captured).peak_bytes
    seen: set[frozenset[int]] = set()
    for amount in amounts:
        left = deadline - clock()
        if len(found) >= most or left < 0 or program.solve(amount, left) is None:
            break
        keep = program.kept()
        if keep in seen:
            continue
        seen.add(keep)
        for sequence in rollouts(problem, keep):
            peak = problem.evaluate(sequence).peak_bytes
            smallest = min(smallest, peak)
            if peak <= budget_bytes:
                found.append(sequence)
                break
    return found, smallest


@register("crossing")
def crossing(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    amounts: int = 24,
    attempts: int = 4,
    solver: str = "CBC",
) -> Answer:
    """Keep what a linear program holds between forward and backward.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        amounts: how many amounts of bytes at the crossing are tried at most, evenly spaced up to what the budget
            allows.
        attempts: how many schedules are enough; `keep_longer` is run on each.
        solver: python-mip's name of the solver.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    with contextlib.closing(CrossingProgram(problem, solver)) as program:
        most = min(float(program.room(budget_bytes)), program.all_bytes)
        bound = program.solve(most, deadline - clock())
        steps = [most * step / amounts for step in range(amounts, -1, -1)]
        found, smallest = schedules(problem, program, steps, budget_bytes, attempts, deadline)
    notes = (f"{len(found)} schedules fit, the smallest peak met is {smallest:,} bytes",)
    best = finish(problem, found, budget_bytes, deadline, attempts)
    return Answer.of_search(best, deadline, bound or 0.0, BACKWARD_AFTER_FORWARD, notes=notes)
