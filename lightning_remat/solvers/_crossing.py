"""The method "crossing": what is held at the one moment between forward and backward, by a linear program.

Every schedule passes from the forward to the backward at some moment, and what it holds then fits the budget. Let k_v say that
value v is held there, f_n that node n runs in the forward and b_n that it runs in the backward. Then

    minimize    sum of seconds_n (f_n + b_n)
    subject to  k_v <= f_n                           for the values v that n writes
                f_m >= f_n,  k_v + b_m >= b_n        for the values v that n reads, written by m
                f_n + b_n >= 1                       for what must run at all, f_n = 1 or b_n = 1 where the side is given
                sum of bytes_v k_v <= budget - what is held in any case

has no more seconds than any schedule within the budget, in whatever order, however often a node runs: a bound, and a strong
one where the crossing is what binds. It is a minimum cut with a knapsack, of as many variables as nodes and values. PyTorch's
partitioner (`min_cut_rematerialization_partition`) solves a program like it and takes its answer for the peak; here it is asked
for several amounts of bytes, the values that it holds by half or more are kept (`rollout`), and the exact peak of each schedule
decides, before what is left of the budget is filled up (`keep_longer`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import mip

from lightning_remat.solvers._blocks import finish
from lightning_remat.solvers._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers._prune import drop_unused, once, required
from lightning_remat.solvers._registry import Answer, register
from lightning_remat.solvers._rollout import rollout
from lightning_remat.solvers._solution import Status

BACKWARD_AFTER_FORWARD = "any schedule that runs the backward after the forward, in any order"

TOLERANCE = 1e-6
"""Share of the step's time that a linear program's value may be too high by: CBC's own tolerance, for nodes of mean cost."""

LONGEST = 4
"""Evaluations a node after which a schedule is not looked at."""


class CrossingProgram:
    """The program of the module's docstring, for any number of bytes.

    Args:
        problem: the problem.
        solver: python-mip's name of the solver.
    """

    def __init__(self, problem: PlainProblem, solver: str = "CBC") -> None:
        self.problem = problem
        self.model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
        self.model.verbose = 0
        nodes = required(problem)
        self.once_seconds = sum([problem.seconds[node] for node in nodes])
        # Both units are means: the solver's tolerances are absolute, and shares of a whole of thousands would be lost in them.
        self._unit = self.once_seconds / max(1, len(nodes)) or 1.0
        early = _needed_at_the_boundary(problem)
        self._forward: dict[int, mip.Var | float] = {}
        self._backward: dict[int, mip.Var | float] = {}
        for node in nodes:
            if node >= problem.boundary:
                self._backward[node] = 1.0
                continue
            cost = problem.seconds[node] / self._unit
            given = node in early or problem.random[node] or not problem.recomputable[node]
            self._forward[node] = 1.0 if given else self.model.add_var(f"f_{node}", lb=0.0, ub=1.0, obj=cost)
            if problem.recomputable[node]:
                self._backward[node] = self.model.add_var(f"b_{node}", lb=0.0, ub=1.0, obj=cost)
        self._given_seconds = sum(
            [
                problem.seconds[node]
                for side in (self._forward, self._backward)
                for node, runs in side.items()
                if not isinstance(runs, mip.Var)
            ]
        )
        self.held: dict[int, mip.Var] = {}
        outputs = frozenset(problem.forward_outputs)
        for node in self._forward:
            for v in problem.writes[node]:
                self.held[v] = self.model.add_var(f"k_{v}", lb=1.0 if v in outputs else 0.0, ub=1.0)
                self._require(self._forward[node] - self.held[v])
        for node, runs in self._forward.items():
            self._require(runs + self._backward.get(node, 0.0) - 1.0)
            for v in problem.reads[node]:
                if problem.producer[v] >= 0:
                    self._require(self._forward[problem.producer[v]] - runs)
        for node, runs in self._backward.items():
            for v in problem.reads[node]:
                made = problem.producer[v]
                if 0 <= made < problem.boundary:
                    self._require(self.held[v] + self._backward.get(made, 0.0) - runs)
        self.all_bytes = float(sum([problem.nbytes[v] for v in self.held])) or 1.0
        self._unit_bytes = self.all_bytes / max(1, len(self.held))
        if not self.held:
            return  # nothing to decide: CBC aborts on a program without variables
        self._limit = self.model.add_constr(
            mip.xsum(problem.nbytes[v] / self._unit_bytes * held for v, held in self.held.items())
            <= self.all_bytes / self._unit_bytes
        )
        # CBC prints its first linear program whatever the verbosity, but none after a solve with integers.
        self.model.add_var("integer", var_type=mip.BINARY)
        self.model.optimize(max_seconds=1e-6)

    def _require(self, expression: mip.LinExpr | float) -> None:
        """The expression is not negative."""
        if isinstance(expression, (mip.LinExpr, mip.Var)):
            self.model.add_constr(expression >= 0)

    def room(self, budget_bytes: int) -> int:
        """Bytes that may be held at the crossing, forward outputs included, within a budget."""
        tangents = sum([self.problem.nbytes[v] for v in self.problem.tangents])
        return budget_bytes - self.problem.base_bytes - tangents

    def solve(self, held_bytes: float, seconds: float = 60.0) -> float | None:
        """The least time of a step that holds ``held_bytes`` at most; ``None`` where nothing was proven in ``seconds``."""
        if held_bytes < 0:
            return None
        if not self.held:
            return self.once_seconds
        self._limit.rhs = min(held_bytes, self.all_bytes) / self._unit_bytes
        status = self.model.optimize(max_seconds=max(seconds, 1e-3), relax=True)
        if status is not mip.OptimizationStatus.OPTIMAL:
            return None
        value = self._given_seconds + float(self.model.objective_value) * self._unit
        return value - TOLERANCE * self.once_seconds

    def kept(self, share: float = 0.5) -> frozenset[int]:
        """Values held by at least ``share`` in the solution at hand."""
        return frozenset(v for v, held in self.held.items() if float(held.x) >= share - 1e-9)

    def close(self) -> None:
        """Give the solver's memory back now (see `_stages.Program.close`)."""
        self.model.solver = None


def _needed_at_the_boundary(problem: PlainProblem) -> set[int]:
    """Nodes that what the forward hands out depends on."""
    stack = [problem.producer[v] for v in (*problem.forward_outputs, *problem.forward_transient)]
    found: set[int] = set()
    while stack:
        node = stack.pop()
        if node >= 0 and node not in found:
            found.add(node)
            stack.extend(problem.predecessors[node])
    return found


def schedules(
    problem: PlainProblem,
    program: CrossingProgram,
    amounts: Iterable[float],
    budget_bytes: int,
    most: int,
    deadline: float,
) -> tuple[list[NodeSequence], int]:
    """Schedules that keep what the program holds for each amount of bytes; what is computed again waits, or does not.

    Args:
        problem: the problem.
        program: its program.
        amounts: of bytes at the crossing, from the largest on, since those take the least time.
        budget_bytes: the most that may be held at any moment.
        most: how many schedules within the budget are enough.
        deadline: `time.monotonic` at which to stop.

    Returns:
        Those within the budget, and the smallest peak that was met.
    """
    forward = frozenset(v for v, made in enumerate(problem.producer) if 0 <= made < problem.boundary)
    found: list[NodeSequence] = []
    smallest = problem.evaluate(problem.captured).peak_bytes
    seen: set[frozenset[int]] = set()
    for amount in amounts:
        left = deadline - time.monotonic()
        if len(found) >= most or left < 0 or program.solve(amount, left) is None:
            break
        keep = program.kept()
        if keep in seen:
            continue
        seen.add(keep)
        for forget in (frozenset[int](), forward - keep):
            sequence = rollout(problem, keep, forget)
            if len(sequence.nodes) <= LONGEST * len(problem):
                sequence = drop_unused(problem, sequence)
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
        deadline: `time.monotonic` at which to stop.
        amounts: how many amounts of bytes at the crossing are tried, evenly spaced up to what the budget allows.
        attempts: how many schedules are filled up.
        solver: python-mip's name of the solver.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    with contextlib.closing(CrossingProgram(problem, solver)) as program:
        most = min(float(program.room(budget_bytes)), program.all_bytes)
        bound = program.solve(most, deadline - time.monotonic())
        steps = [most * step / amounts for step in range(amounts, -1, -1)]
        found, smallest = schedules(problem, program, steps, budget_bytes, attempts, deadline)
    notes = (f"{len(found)} schedules fit, the smallest peak met is {smallest:,} bytes",)
    best = finish(problem, found, budget_bytes, deadline, attempts)
    if best is None:
        status = Status.TIMEOUT if time.monotonic() > deadline else Status.INFEASIBLE
        return Answer(None, status, bound or 0.0, BACKWARD_AFTER_FORWARD, notes=notes)
    return Answer(best, Status.FEASIBLE, bound or 0.0, BACKWARD_AFTER_FORWARD, notes=notes)
