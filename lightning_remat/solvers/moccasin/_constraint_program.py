"""Moccasin's program (Bartan, Li, Teague, Lott and Dilkina 2023), solved by OR-Tools CP-SAT: retention intervals.

Where Checkmate has a binary variable for each stage and node, of the order of n², Moccasin gives each node a few
**retention intervals**: from an evaluation up to the last read of its results. Their number C_v is small (the paper
finds that 2 are enough on its networks), so the integer variables grow with n, and memory is one cumulative constraint
over the intervals. Written from the model as the paper describes it; no section or equation of it is quoted by number.

* **Events.** With the input topological order fixed, time is a staged integer domain: stage j has one event for each of its
  nodes 0 to j, n (n + 1) / 2 in all. Node k may only be evaluated at its own event of a stage from k on, and first in stage k.
  Starts so differ by construction, and a node is evaluated at most once a stage, at most C_v times in all.
* **Intervals.** ``start <= end`` of each, in order and apart: ``end_i < start_(i+1)``; the first one is always there.
* **Precedence.** An evaluation starts within a retention interval of every node that it reads.
* **Memory.** A cumulative constraint: the sizes of the intervals over each event add up to the budget at most.
* **Objective.** The total duration of the evaluations.
* **Two phases.** Where no start within the budget is known, the peak is minimized first, from the plain order, until it meets
  the budget; the objective is minimized from there.

What differs from the paper: a node may write several values, which share its starts and have ends of their own;
workspaces, and values that nobody reads, take memory at their own event only; nodes that may run only once have one
interval; random nodes run again freely, their numbers are replayed. What the caller hands in (tangents) or takes
(forward outputs) counts from the boundary on, the event at which the stages of the backward begin; evaluating a forward
output again there makes a surplus copy.

What is not optimal: the order is the captured one, an op runs at most once a stage and C_v times in all, and every result has
memory of its own. With C_v as large as n these are the schedules of Checkmate's program ("milp").
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeAlias

from ortools.sat.python import cp_model

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import clock, counts, program_limits
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


def solve_intervals(
    problem: PlainProblem,
    budget_bytes: int,
    *,
    intervals: int,
    gap: float,
    workers: int,
    deadline: float,
    start: NodeSequence | None = None,
) -> StagesResult:
    """The best sequence within the budget, from a start or, without one, after a search for the smallest peak.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        intervals: C_v, the most retention intervals of a node.
        gap: stop when proven to be within this share of the time of a step without rematerialization.
        workers: threads of CP-SAT.
        deadline: `clock` at which to stop.
        start: a sequence to begin from, used where its peak is within the budget.

    Raises:
        SolverError: when the solver's answer breaks the program's own memory accounting (a defect, not bad luck).
    """
    order = required(problem)
    for node in order:
        if alone_bytes(problem, node) > budget_bytes:
            note = f"{problem.name(node)} alone needs {alone_bytes(problem, node):,} bytes"
            return StagesResult(None, Status.INFEASIBLE, 0.0, (note,))
    if not order:
        return StagesResult(None, Status.INFEASIBLE, 0.0, ("what is always held is over the budget",))
    own = copy.copy(problem)
    own.overwrites = []  # the program gives every result memory of its own
    staged = best_start(own, budget_bytes, start)
    others = [staged, start, best_start(problem, budget_bytes, start) if any(problem.overwrites) else None]
    known = [s for s in others if s is not None and problem.evaluate(s).peak_bytes <= budget_bytes]
    program = _Program(own, budget_bytes, intervals)
    notes, status = "started from a feasible schedule", Status.FEASIBLE
    first = staged if staged is not None and max(Counter(staged.nodes).values()) <= intervals else None
    if first is None:
        program.begin_at(problem.captured)
        status, first = program.minimize_peak(deadline, workers)
        notes = f"phase 1, from the plain order to a peak within the budget: {status.value}"
    bound = 0.0
    if first is not None:
        program.begin_at(first)
        found, bound = program.minimize_seconds(deadline, gap, workers)
        if found is not None and (peak := problem.evaluate(found).peak_bytes) > budget_bytes:
            raise SolverError(f"Moccasin's program is within {budget_bytes:,} bytes, its schedule peaks at {peak:,}")
        known += [sequence for sequence in (first, found) if sequence is not None]
    if not known:
        return StagesResult(None, status, bound, (notes,))
    best = min(known, key=lambda sequence: problem.evaluate(sequence).seconds)
    seconds = problem.evaluate(best).seconds
    status = Status.OPTIMAL if seconds <= bound * (1 + max(gap, 1e-9)) else Status.FEASIBLE
    return StagesResult(best, status, min(bound, seconds), (notes,))


# -- the program ----------------------------------------------------------------------------------------------------------

Variable: TypeAlias = cp_model.IntVar
Time: TypeAlias = "cp_model.IntVar | int"
"""The number of an event, or a variable for it: first evaluations, the boundary and the end have fixed events."""


def _event(stage: int, node: int) -> int:
    """The event of ``node`` in ``stage``."""
    return stage * (stage + 1) // 2 + node


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """An evaluation of a node, where ``active``, at the event ``start``, which is not before ``earliest``."""

    active: Variable
    start: Time
    earliest: int


@dataclasses.dataclass(frozen=True)
class _Retention(_Evaluation):
    """A value held from an evaluation of its producer (or from the boundary) up to and with the event ``end``."""

    end: Time


@dataclasses.dataclass(frozen=True)
class _Read:
    """``value`` is held at ``reader``; ``by`` has a literal for each of its retentions that may hold it there."""

    value: int
    reader: _Evaluation
    by: dict[int, Variable]


class _Program:
    """Moccasin's model of one problem and budget. A node that nothing depends on has a stage, but no evaluation."""

    def __init__(self, problem: PlainProblem, budget_bytes: int, intervals: int) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.model: Any = cp_model.CpModel()  # not all of it has types
        self.true = self.model.new_constant(1)
        self.required = frozenset(required(problem))
        self.boundary = _event(problem.boundary, 0)  # the first event of the backward
        self.end = _event(len(problem), 0) - 1  # the last event
        self.readers = [[reader for reader in readers if reader in self.required] for readers in problem.consumers]
        self.outputs, self.finals = frozenset(problem.forward_outputs), frozenset(problem.finals)
        self.spans: list[Any] = []
        self.demands: list[int] = []
        self.sizes: list[tuple[Variable, _Retention]] = []
        self.late: list[tuple[Variable, Time]] = []
        self.reads: list[_Read] = []
        self._scale()
        self.evaluations = [
            self._add_evaluations(node, intervals, last)
            for node, last in enumerate(last_useful_stages(problem, self.readers))
        ]
        self.retentions = [self._add_retentions(v) for v in range(len(problem.nbytes))]
        self._add_own_memory()
        self._add_precedences()
        self.model.add_cumulative(self.spans, self.demands, self.capacity)  # [Memory]

    def _scale(self) -> None:
        """Units in which bytes (by their common divisor) and seconds are whole; seconds round down: bounds hold so."""
        problem = self.problem
        sizes = [*problem.nbytes, *problem.workspace, problem.forward_extra_bytes]
        self.unit_bytes = reduce(math.gcd, sizes, 0) or 1
        self.limit = (self.budget_bytes - problem.base_bytes) // self.unit_bytes
        self.capacity = self.model.new_int_var(self.limit, max(self.limit, sum(sizes) // self.unit_bytes), "capacity")
        seconds = [problem.seconds[node] for node in sorted(self.required)]
        self.once_seconds = sum(seconds)
        whole = self.once_seconds <= 1e9 and all([float(one).is_integer() for one in seconds])
        self.unit_seconds = 1.0 if whole else self.once_seconds / 1e9

    def _add_evaluations(self, node: int, intervals: int, last: int) -> list[_Evaluation]:
        """The first evaluation at its own event, up to C_v - 1 others at the node's events of later stages, in order."""
        if node not in self.required:
            return []
        found = [_Evaluation(self.true, _event(node, node), _event(node, node))]
        if not self.problem.recomputable[node]:
            return found
        for stage in range(node + 1, min(node + intervals - 1, last) + 1):
            active = self.model.new_bool_var(f"active_{node}_{len(found)}")
            events = cp_model.Domain.from_values([_event(later, node) for later in range(stage, last + 1)])
            start = self.model.new_int_var_from_domain(events, f"start_{node}_{len(found)}")
            self.model.add_implication(active, found[-1].active)
            self.model.add(start > found[-1].start).only_enforce_if(active)
            found.append(_Evaluation(active, start, _event(stage, node)))
        return found

    def _add_retentions(self, v: int) -> list[_Retention]:
        """Retention intervals of a value, one an evaluation of its producer; none for a value that nobody reads."""
        problem, producer = self.problem, self.problem.producer[v]
        handed_out = v in self.outputs
        wanted = bool(self.readers[v]) or handed_out or v in problem.forward_transient or v in self.finals
        runs: list[_Evaluation] = []
        if producer in self.required and wanted:
            runs = self.evaluations[producer]
        elif producer < 0 and self.boundary <= self.end and (wanted or self.boundary == 0):
            runs = [_Evaluation(self.true, self.boundary, self.boundary)]
        found: list[_Retention] = []
        for i, run in enumerate(runs):
            end = self.model.new_int_var(run.earliest, self.end, f"end_{v}_{i}")
            self.model.add(end >= run.start).only_enforce_if(run.active)
            if i:
                self.model.add(found[-1].end < run.start).only_enforce_if(run.active)
            if handed_out:
                self._end_at_the_boundary(run, end)
            found.append(_Retention(run.active, run.start, run.earliest, end))
        if handed_out and self.boundary <= self.end:  # the caller's own copy
            found.append(_Retention(self.true, self.boundary, self.boundary, self.end))
        for held in found:
            self._hold(held, problem.nbytes[v])
        return found

    def _end_at_the_boundary(self, run: _Evaluation, end: Variable) -> None:
        """A forward output is the caller's from the boundary on: a copy made later is surplus, and freed at once."""
        late = self.model.new_bool_var("late")
        self.late.append((late, run.start))
        self.model.add(run.start >= self.boundary).only_enforce_if(late)
        self.model.add(end <= run.start).only_enforce_if(late, run.active)
        self.model.add(end <= self.boundary - 1).only_enforce_if(~late)

    def _hold(self, held: _Retention, nbytes: int) -> None:
        """Let a retention take memory, from its start to its end, both events included."""
        if not nbytes:
            return
        if held.start is held.end:
            size: Any = 1
        elif isinstance(held.start, int):
            size = held.end - held.start + 1
        else:
            size = self.model.new_int_var(1, self.end + 1 - held.earliest, "size")
            self.sizes.append((size, held))
        self.spans.append(self.model.new_optional_interval_var(held.start, size, held.end + 1, held.active, "held"))
        self.demands.append(nbytes // self.unit_bytes)

    def _add_own_memory(self) -> None:
        """Bytes that only the running node needs, at its event, and those held outside the graph until the boundary."""
        problem = self.problem
        for node, runs in enumerate(self.evaluations):
            unread = [v for v in problem.writes[node] if not self.retentions[v]]
            own = problem.workspace[node] + sum([problem.nbytes[v] for v in unread])
            for run in runs:
                self._hold(_Retention(run.active, run.start, run.earliest, run.start), own)
        if self.boundary:
            self._hold(_Retention(self.true, 0, 0, self.boundary - 1), problem.forward_extra_bytes)

    def _add_precedences(self) -> None:
        """An evaluation starts within a retention of each value that it reads. So do the crossing and the end."""
        problem = self.problem
        for values, runs in zip(problem.reads, self.evaluations, strict=True):
            for v in values:
                for run in runs:
                    self._within(v, run)
        for v in (*problem.forward_outputs, *problem.forward_transient):
            self._within(v, _Evaluation(self.true, self.boundary - 1, self.boundary - 1))
        for v in problem.finals:
            if problem.producer[v] >= 0 or self.boundary <= self.end:
                self._within(v, _Evaluation(self.true, self.end, self.end))

    def _within(self, v: int, reader: _Evaluation) -> None:
        by: dict[int, Variable] = {}
        for i, held in enumerate(self.retentions[v]):
            if isinstance(reader.start, int) and held.earliest > reader.start:
                continue
            by[i] = self.model.new_bool_var(f"by_{v}_{i}")
            self.model.add_implication(by[i], held.active)
            self.model.add(held.start <= reader.start).only_enforce_if(by[i])
            self.model.add(reader.start <= held.end).only_enforce_if(by[i])
        self.model.add_bool_or(list(by.values())).only_enforce_if(reader.active)
        self.reads.append(_Read(v, reader, by))

    # -- solving ----------------------------------------------------------------------------------------------------------

    def begin_at(self, sequence: NodeSequence) -> None:
        """Hand a sequence to the solver: what `to_stages` and C_v leave of it, as a hint for each variable."""
        stages = to_stages(self.problem, sequence)
        times: list[list[int]] = [[] for _ in stages]
        for stage, row in enumerate(stages):
            for node in row & self.required:
                times[node].append(_event(stage, node))
        peak = self.problem.evaluate(from_stages(self.problem, stages)).peak_bytes
        hint = {self.true.index: 1, self.capacity.index: -(-(peak - self.problem.base_bytes) // self.unit_bytes)}

        def value(time: Time) -> int:
            return time if isinstance(time, int) else hint[time.index]

        for runs, events in zip(self.evaluations, times, strict=True):
            for run, event in zip_longest(runs[1:], events[1 : len(runs)]):
                assert not isinstance(run.start, int)
                hint[run.active.index] = int(event is not None)
                hint[run.start.index] = run.earliest if event is None else event
        for held in [held for retentions in self.retentions for held in retentions]:
            if not isinstance(held.end, int):
                hint[held.end.index] = value(held.start)
        for read in self.reads:
            at, kept = value(read.reader.start), self.retentions[read.value]
            there = [i for i in read.by if hint[kept[i].active.index] and value(kept[i].start) <= at]
            serving = max(there, default=-1) if hint[read.reader.active.index] else -1
            hint.update({literal.index: int(i == serving) for i, literal in read.by.items()})
            if serving >= 0 and not isinstance(end := kept[serving].end, int):
                hint[end.index] = max(hint[end.index], at)
        hint.update({size.index: value(held.end) - value(held.start) + 1 for size, held in self.sizes})
        hint.update({late.index: int(value(start) >= self.boundary) for late, start in self.late})
        self.model.clear_hints()
        for index in sorted(hint.keys() - {self.true.index}):
            self.model.add_hint(self.model.get_int_var_from_proto_index(index), hint[index])

    def minimize_peak(self, deadline: float, workers: int) -> tuple[Status, NodeSequence | None]:
        """Phase 1: `Status.FEASIBLE` and a sequence within the budget, or how the search for one ended and ``None``."""
        self.model.minimize(self.capacity)
        solver, found = self._solve(deadline, 0.0, workers)
        if found is not None and solver.value(self.capacity) <= self.limit:
            return Status.FEASIBLE, found
        proven = found is not None and solver.best_objective_bound > self.limit
        return Status.INFEASIBLE if proven else Status.TIMEOUT, None

    def minimize_seconds(self, deadline: float, gap: float, workers: int) -> tuple[NodeSequence | None, float]:
        """Phase 2: the best sequence within the budget that is found, and the proven bound in seconds.

        ``gap`` is a share of the time of all first evaluations, which are a constant that the objective leaves out.
        """
        again = [
            (run.active, math.floor(self.problem.seconds[node] / self.unit_seconds))
            for node, runs in enumerate(self.evaluations)
            for run in runs[1:]
        ]
        self.model.add(self.capacity <= self.limit)
        self.model.minimize(sum([weight * active for active, weight in again]))  # [Objective]
        solver, found = self._solve(deadline, gap * self.once_seconds / self.unit_seconds, workers)
        bound = solver.best_objective_bound if found is not None else 0.0
        return found, self.once_seconds + max(0.0, bound) * self.unit_seconds

    def _solve(self, deadline: float, gap: float, workers: int) -> tuple[Any, NodeSequence | None]:
        solver: Any = cp_model.CpSolver()
        left = max(0.0, deadline - clock())
        if counts():
            solver.parameters.max_deterministic_time = left
        solver.parameters.max_time_in_seconds, _ = program_limits(left)
        solver.parameters.num_workers = workers
        solver.parameters.absolute_gap_limit = gap
        status = solver.solve(self.model)
        if status in (cp_model.MODEL_INVALID, cp_model.INFEASIBLE):  # it has the solution that it began at
            raise SolverError(f"Moccasin's program is refused: {self.model.validate() or 'infeasible'}")
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return solver, None
        stages: Stages = [set() for _ in self.problem.reads]
        stage_of = {_event(stage, node): stage for stage in range(len(stages)) for node in range(stage + 1)}
        for node, runs in enumerate(self.evaluations):
            for run in runs:
                if solver.boolean_value(run.active):
                    stages[stage_of[solver.value(run.start)]].add(node)
        return solver, from_stages(self.problem, stages)
