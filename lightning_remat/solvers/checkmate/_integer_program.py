"""Checkmate's mixed integer linear program (Jain et al. 2020), solved by CBC.

Equation and section numbers are those of the MLSys version: eq. 9 in section 4.7 is the complete program, with the
frontier-advancing stages of section 4.6: stage t evaluates node t for the first time, after evaluating again any of the
nodes before it, in the captured order and each at most once.

What differs from the paper:

* a node may write several values, so R is indexed by nodes and S by values; sizes are bytes of values;
* an op's workspace counts while it runs; what the caller holds, hands in (tangents) or takes (forward outputs) counts from
  the boundary on, which lies between the stages ``boundary - 1`` and ``boundary``;
* nodes that may run only once have R_{t,k} = 0 for t > k. Random nodes run again freely: their numbers are replayed.

What is written differently, without changing the set of schedules: FREE_{t,v,k} (eq. 5) is the difference of two
successive variables P, "v is held up to its next event in stage t", where the events of v are its evaluation and its
reads, in captured order. Along this chain of events P may only fall, must be 1 where a read takes place, and ends in
S_{t+1,v}. This gives (1b), (1c) and (7a-7c) with one row an event instead of one a pair of events, and a tighter
relaxation (Theorem 4.1, no double deallocation, holds by construction). With R integral the smallest feasible P and S
are integral too, so only R is declared so.

What is not optimal: the order is the captured one, and an op runs at most once a stage; the unrestricted optimum can be
cheaper, and a bound from here holds for `CAPTURED_ORDER` only.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Collection, Sequence
from functools import reduce
from typing import TypeAlias

import mip

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._mip import Model
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import required
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._stages import (
    Stages,
    StagesResult,
    best_start,
    from_stages,
    last_useful_stages,
    to_stages,
)
from lightning_remat.solvers.common._working_set import alone_bytes

CAPTURED_ORDER = "schedules in the captured order that evaluate an op at most once a stage (Checkmate, eq. 9)"


def solve_stages(
    problem: PlainProblem,
    budget_bytes: int,
    *,
    gap: float,
    deadline: float,
    solver: str = "CBC",
    start: NodeSequence | None = None,
) -> StagesResult:
    """Solve eq. 9 for ``problem``.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        gap: stop when proven to be within this share of the time of a step without rematerialization.
        deadline: `clock` at which to stop.
        solver: python-mip's name of the solver.
        start: a sequence to begin from, used where its peak is within the budget.

    Raises:
        SolverError: when the solver's answer breaks the program's own memory accounting (a defect, not bad luck).
    """
    if note := too_large(problem, budget_bytes):
        return StagesResult(None, Status.INFEASIBLE, 0.0, (note,))
    best = best_start(problem, budget_bytes, start)
    with contextlib.closing(Program(problem, budget_bytes, solver)) as program:
        return solve_program(program, best, gap, deadline)


def solve_program(program: Program, best: NodeSequence | None, gap: float, deadline: float) -> StagesResult:
    """Solve a program of stages, beginning at ``best``, a sequence within its budget, if there is one.

    Raises:
        SolverError: when the solver's answer breaks the program's own memory accounting (a defect, not bad luck).
    """
    problem, budget_bytes = program.problem, program.budget_bytes
    if best is not None:
        program.begin_at(best)
    notes: tuple[str, ...] = (f"started {'cold' if best is None else 'from a feasible schedule'}",)
    left = deadline - clock()
    if left <= 0:
        program.status = mip.OptimizationStatus.NO_SOLUTION_FOUND
    else:
        program.optimize(gap, left)
    bound = program.bound_seconds()
    if program.status is mip.OptimizationStatus.INFEASIBLE and best is None:
        return StagesResult(None, Status.INFEASIBLE, 0.0, notes)
    proven = program.status is mip.OptimizationStatus.OPTIMAL
    stages = program.stages()
    if stages is not None:
        sequence = from_stages(problem, stages)
        evaluation = problem.evaluate(sequence)
        accounted = program.peak_bytes()
        if evaluation.peak_bytes > accounted + program.tolerance_bytes:
            raise SolverError(
                f"eq. 9 accounts for {accounted:,.0f} bytes, the schedule peaks at {evaluation.peak_bytes:,}"
            )
        if evaluation.peak_bytes > budget_bytes:  # within the solver's tolerance, but not within the budget
            proven = False
            notes = (*notes, f"the solver's schedule is {evaluation.peak_bytes - budget_bytes:,} bytes over the budget")
        elif best is None or evaluation.seconds <= problem.evaluate(best).seconds:
            best = sequence
        else:
            proven = proven and problem.evaluate(best).seconds <= bound * (1 + gap)
    elif best is not None:
        proven = False
    if best is None:
        return StagesResult(None, Status.TIMEOUT, bound, notes)
    bound = min(bound, problem.evaluate(best).seconds)
    return StagesResult(best, Status.OPTIMAL if proven else Status.FEASIBLE, bound, notes)


def too_large(problem: PlainProblem, budget_bytes: int) -> str:
    """Names a node that every schedule evaluates and that does not fit the budget alone; "" without one."""
    for node in required(problem):
        if alone_bytes(problem, node) > budget_bytes:
            return f"{problem.name(node)} alone needs {alone_bytes(problem, node):,} bytes"
    return ""


# -- from the rows of S to those of R -------------------------------------------------------------------------------------


def fill_computations(problem: PlainProblem, checkpoints: Sequence[Collection[int]]) -> Stages:
    """The rows of R with the fewest ones for given rows of S: the two correction loops of Algorithm 2 (section 5.2).

    Args:
        problem: the problem.
        checkpoints: for each stage, and for the end after the last one, the values to be held into it. What the caller
            takes at the boundary and the gradients at the end count whether listed or not. A value of a node that may
            run only once cannot be made again: where it is needed, it is held from its evaluation on.
    """
    count, boundary, producer = len(problem), problem.boundary, problem.producer
    held = [set(values) for values in checkpoints]
    must = {boundary: {*problem.forward_outputs, *problem.forward_transient}}
    must[count] = must.get(count, set()) | set(problem.finals)
    outputs = frozenset(problem.forward_outputs)
    stages: Stages = [set() for _ in problem.reads]
    for node in required(problem):
        stages[node].add(node)  # eq. 8a

    def is_missing(value: int, stage: int) -> bool:
        if value in held[stage] or (value in outputs and stage >= boundary):
            return False
        return producer[value] not in stages[stage]

    def supply(value: int, stage: int) -> int:
        """Make ``value`` exist in ``stage``: returns the node that is evaluated there for it, -1 for none."""
        node = producer[value]
        if node < 0 or not (problem.recomputable[node] or node == stage):
            for later in range(boundary if node < 0 else node + 1, stage + 1):
                held[later].add(value)
            return -1
        stages[stage].add(node)
        return node

    for stage in range(1, count + 1):
        for v in held[stage] | must.get(stage, set()):
            if is_missing(v, stage - 1) and not (producer[v] < 0 and stage == boundary):  # eq. 1c violated
                supply(v, stage - 1)
    for stage in range(count):
        waiting = [-node for node in stages[stage]]  # in reverse topological order
        heapq.heapify(waiting)
        while waiting:
            for v in problem.reads[-heapq.heappop(waiting)]:
                if is_missing(v, stage):  # eq. 1b violated
                    node = supply(v, stage)
                    if node >= 0:
                        heapq.heappush(waiting, -node)
    return stages


# -- the program ----------------------------------------------------------------------------------------------------------

Term: TypeAlias = "mip.Var | float"
Expression: TypeAlias = "mip.LinExpr | mip.Var | float"
Scaled: TypeAlias = "tuple[float, Expression]"


class Program:
    """Eq. 9 for one problem and budget. Bytes and seconds are scaled so that the numbers stay near one."""

    def __init__(self, problem: PlainProblem, budget_bytes: int, solver: str) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        headroom = budget_bytes - problem.base_bytes
        sizes = [*problem.nbytes, *problem.workspace, problem.forward_extra_bytes]
        divisor = reduce(math.gcd, sizes, 0) or 1
        self.exact = headroom // divisor <= 100_000
        # Either the sizes' common divisor, with which everything is a small whole number, or a share of the budget.
        self.unit_bytes: float = divisor if self.exact else headroom / 10_000
        self.limit = self._limit(budget_bytes)
        self.tolerance_bytes = 1e-4 * self.unit_bytes * len(problem)
        positive = [s for s in problem.seconds if s > 0]
        self.unit_seconds = sum(positive) / len(positive) if positive else 1.0
        self.status = mip.OptimizationStatus.LOADED
        self.model = Model(solver)
        self.model.threads = 1
        self.outputs = frozenset(problem.forward_outputs)
        self.transient = frozenset(problem.forward_transient)
        self.finals = frozenset(problem.finals)
        self.first_stage = self._first_stages()
        self.last_stage = self._last_useful_stages()
        self._add_computations()
        self._add_retention()
        self.usage: list[tuple[mip.Var, float, Term, float, mip.Constr | None]] = []
        for stage in range(len(problem)):
            self._add_stage(stage)

    def _limit(self, budget_bytes: int) -> float:
        """What a budget leaves beside ``base_bytes``, in the program's unit."""
        headroom = budget_bytes - self.problem.base_bytes
        return headroom // int(self.unit_bytes) if self.exact else headroom / self.unit_bytes

    def _first_stages(self) -> list[int]:
        """The first stage in which each node may be evaluated: its own."""
        return list(range(len(self.problem)))

    def _last_useful_stages(self) -> list[int]:
        return last_useful_stages(self.problem, self.problem.consumers)

    def _add_computations(self) -> None:
        """R_{t,k}: 1 where stage t evaluates node k. Row t ends with R_{t,t} = 1."""
        problem = self.problem
        wanted = set(required(problem))
        self.once_seconds = self.constant_seconds = sum([problem.seconds[node] for node in wanted])
        self.computed: list[dict[int, Term]] = []
        for stage in range(len(problem)):
            row: dict[int, Term] = {}  # [Lower triangular] eq. 8c: none beyond the diagonal
            for node in range(stage):
                if stage <= self.last_stage[node]:
                    row[node] = self.model.add_var(var_type=mip.BINARY)  # eq. 1f
            if stage in wanted:  # a node that nothing depends on has no first evaluation
                row[stage] = 1.0  # [Frontier-advancing stages] eq. 8a
            self.computed.append(row)
        self._minimize_seconds()

    def _minimize_seconds(self) -> None:
        """[Objective] eq. 1a; evaluations that are a constant of the program (`constant_seconds`) are left out."""
        seconds = mip.xsum(
            self.problem.seconds[node] / self.unit_seconds * variable
            for row in self.computed
            for node, variable in row.items()
            if isinstance(variable, mip.Var) and self.problem.seconds[node] > 0
        )
        self.model.minimize(seconds)

    def _add_retention(self) -> None:
        """S_{t,v}: 1 where v is held from stage t - 1 into stage t. Constants stand for what must or cannot be held."""
        problem, count = self.problem, len(self.problem)
        self.held: list[dict[int, Term]] = [{} for _ in range(count + 1)]
        for v, producer in enumerate(problem.producer):
            first = (
                problem.boundary if producer < 0 else self.first_stage[producer] + 1
            )  # eq. 8b: not before it is made
            readers = [self.last_stage[reader] for reader in problem.consumers[v]]
            until = max(readers, default=-1)
            if v in self.transient or v in self.outputs:
                until = max(until, problem.boundary - 1)
            if v in self.finals:
                until = count - 1
                self.held[count][v] = 1.0  # [Completion] eq. 1e: gradients are there at the end
            if v in self.outputs:  # [Boundary] taken by the caller there, whose copy is accounted as a constant
                until = min(until, problem.boundary - 1)
                self.held[problem.boundary][v] = 1.0
            for stage in range(first, until + 1):
                self.held[stage][v] = self.model.add_var(lb=0.0, ub=1.0)

    def _add_stage(self, stage: int) -> None:
        """Dependencies, lifetimes and memory of one stage."""
        problem = self.problem
        backward = stage >= problem.boundary
        row = self.computed[stage]
        initial: list[Scaled] = []
        allocated: dict[int, list[Scaled]] = {node: [] for node in row}  # when a node begins to run
        released: dict[int, list[Scaled]] = {node: [] for node in row}  # after it has run
        for v, producer in enumerate(problem.producer):
            if backward and v in self.outputs:
                continue  # the caller holds it, reads find it, and evaluating it again makes a surplus copy
            size = problem.nbytes[v] / self.unit_bytes
            present = self.held[stage].get(v, 0.0)
            after = self.held[stage + 1].get(v, 0.0)
            if stage + 1 == problem.boundary and v in self.transient:
                after = 1.0  # [Boundary] held up to the crossing, though not into the next stage
            readers = [reader for reader in problem.consumers[v] if reader in row]
            made: Term = row.get(producer, 0.0)
            if not (_is_free(present) or _is_free(made) or made):
                continue  # neither held nor computed in this stage: what reads it is not in this row either
            initial.append((size, present))
            base = mip.LinExpr() + present + made
            if _is_free(made) and _is_free(present):
                # [One copy] what is computed again is not held as well: an evaluation replaces all its outputs
                self._require(base, "<=", 1.0)
            level: Expression = base
            if producer in row:
                allocated[producer].append((size, made))
                effect = problem.random[producer] or not problem.recomputable[producer]
                if readers and (effect or not _is_free(made) or len(problem.writes[producer]) > 1):
                    level = self._present()  # an output may be of no use in this stage
                    self._require(base, ">=", level)
                    released[producer] += [(size, base), (-size, level)]
            # [Deallocation] eqs. 5 and 7a-7c as a chain that only falls: FREE after an event is its fall there.
            for index, reader in enumerate(readers):
                self._require(level, ">=", row[reader])  # [Dependencies] eq. 1b
                following: Expression = after
                if index + 1 < len(readers):
                    following = self._present()
                self._require(level, ">=", following)  # [Retention] eq. 1c, at the last event
                released[reader] += [(size, level), (-size, following)]
                level = following
            if not readers:
                self._require(level, ">=", after)  # [Retention] eq. 1c
                if producer in row:
                    released[producer] += [(size, level), (-size, after)]
        self._add_memory(stage, initial, allocated, released)

    def _add_memory(
        self,
        stage: int,
        initial: list[Scaled],
        allocated: dict[int, list[Scaled]],
        released: dict[int, list[Scaled]],
    ) -> None:
        """U_{t,k}: bytes held when node k of stage t has its outputs, before anything is given up."""
        problem = self.problem
        backward = stage >= problem.boundary
        constant = float(problem.base_bytes)
        constant += sum([problem.nbytes[v] for v in self.outputs]) if backward else problem.forward_extra_bytes
        limit = self.limit - (constant - problem.base_bytes) / self.unit_bytes
        usage = mip.xsum(size * term for size, term in initial)  # [Memory] eq. 2
        for node, computed in self.computed[stage].items():
            usage = usage + mip.xsum(size * term for size, term in allocated[node])  # eq. 3
            variable = self.model.add_var(lb=0.0, ub=max(limit, 0.0))  # [Budget] eq. 9
            self._require(usage, "==", variable)
            surplus = sum([problem.nbytes[v] for v in problem.writes[node] if backward and v in self.outputs])
            extra = (problem.workspace[node] + surplus) / self.unit_bytes
            row = None
            if extra > 0:  # workspace, and a second copy of what the caller holds, while the op runs
                row = self._require(variable + extra * computed, "<=", limit)
            elif limit < 0:
                self._require(variable + 1.0, "<=", 0.0)
            self.usage.append((variable, extra, computed, constant, row))
            usage = variable - mip.xsum(size * term for size, term in released[node])  # eqs. 3 and 4

    def _present(self) -> mip.Var:
        """A new variable P: 1 where a value is held up to its next event in a stage."""
        return self.model.add_var(lb=0.0, ub=1.0)

    def _require(self, left: Expression, relation: str, right: Expression) -> mip.Constr | None:
        """Add a constraint, unless it holds for constants alone."""
        difference = mip.LinExpr()
        difference.add_term(left)
        difference.add_term(right, -1.0)
        if not difference.expr:
            holds = {
                "<=": difference.const <= 1e-9,
                ">=": difference.const >= -1e-9,
                "==": abs(difference.const) < 1e-9,
            }
            if holds[relation]:
                return None
            difference.add_var(self.model.vars[0], 0.0)
        return self.model.add_constr(difference, relation[0])  # "<", ">" or "="; python-mip's operators copy it

    def close(self) -> None:
        """Give the solver back now (see `_mip.Model`)."""
        self.model.close()

    def begin_at(self, sequence: NodeSequence) -> None:
        """Hand a feasible sequence of stages to the solver, which completes S, P and U by a linear program."""
        stages = to_stages(self.problem, sequence)
        self.model.begin_at(
            (variable, float(node in stages[stage]))
            for stage, row in enumerate(self.computed)
            for node, variable in row.items()
            if isinstance(variable, mip.Var)
        )

    def optimize(self, gap: float, seconds: float) -> None:
        """Run the solver; ``gap`` is a share of `once_seconds`, whatever constant the objective leaves out."""
        self.model.max_mip_gap = 1e-9
        self.model.max_mip_gap_abs = gap * self.once_seconds / self.unit_seconds
        self.status = self.model.optimize(seconds)

    def relax(self, budget_bytes: int, seconds: float) -> float | None:
        """Solve the relaxation R, S, FREE in [0, 1] (section 5.1) at any budget.

        Right-hand sides alone change with the budget, so that the solver goes on from the last relaxation.

        Returns:
            Its value in seconds; ``None`` without one (`status` tells why).
        """
        for variable, extra, computed, constant, row in self.usage:
            limit = self._limit(budget_bytes) - (constant - self.problem.base_bytes) / self.unit_bytes
            if limit < 0:  # no room for what the program holds as a constant
                self.status = mip.OptimizationStatus.INFEASIBLE
                return None
            variable.ub = limit
            if row is not None:
                row.rhs = limit if _is_free(computed) else limit - extra * _value(computed)
        self.status = self.model.optimize(seconds, relax=True)
        if self.status is not mip.OptimizationStatus.OPTIMAL:
            return None
        return self.constant_seconds + self.model.objective_value * self.unit_seconds

    def checkpoints(self) -> list[dict[int, float]]:
        """S of the solution at hand, fractional after `relax`: by stage, for each value, the share held into it."""
        return [{v: _value(term) for v, term in row.items()} for row in self.held]

    def bound_seconds(self) -> float:
        """Proven bound on the time of any schedule of the program; that of evaluating all once where nothing is proven."""
        bound = self.model.objective_bound if self.status in _SOLVED else math.nan
        if not math.isfinite(bound):
            return self.once_seconds
        return max(self.once_seconds, self.constant_seconds + bound * self.unit_seconds)

    def stages(self) -> Stages | None:
        """The rows of R in the best solution found."""
        if self.status not in _SOLVED or not self.model.num_solutions:
            return None
        return [{node for node, term in row.items() if _value(term) > 0.5} for row in self.computed]

    def peak_bytes(self) -> float:
        """The program's own account of the peak, eqs. 2 and 3."""
        held = [c + (_value(u) + extra * _value(r)) * self.unit_bytes for u, extra, r, c, _ in self.usage]
        return max(held, default=float(self.problem.base_bytes))


_SOLVED = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)


def _is_free(term: Term) -> bool:
    return isinstance(term, mip.Var)


def _value(term: Term) -> float:
    return float(term.x) if isinstance(term, mip.Var) else term
