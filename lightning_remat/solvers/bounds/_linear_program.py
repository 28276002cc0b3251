"""What is held at a few moments of a step, as a linear program: a bound on its time for any order of evaluation.

Every schedule that runs the backward after the forward passes certain moments in a given order: the crossing between
the two, and the first evaluations of nodes x_1, x_2, ... that are each an ancestor of the next on their side of the
crossing (before it, only nodes that what the forward hands out depends on). They cut the step into phases. A span is
one phase, or all of them after a moment. Let r_ns say that node n runs in the span s, and h_vi that value v is held at
the moment i. Then

    minimize    sum of seconds_n r_ns over the phases s
    subject to  r_ns <= sum of r_np over the phases p of a span s, and r_ns = 1 where n must run in s  (x_i in phase i, which it
                ends, its ancestors by then), r_ns = 0 where what n depends on has not run yet
                r_ms + h_vi >= r_ns          for the values v that n reads, written by m, and the moment i before s
                r_ms + h_vi >= h_vj          for all values v, written by m, and the moments i before and j after s
                sum of bytes_v h_vi <= budget - what x_i's working set and what is held in any case take

has no more seconds than any schedule within the budget, whatever it repeats: let r and h say what that schedule does,
as 0 or 1. What it reads in a span, or holds at the span's end, it has computed there or held into it; and while x_i
runs it holds x_i's working set beside what it holds for later. So the optimum of the integer program is a lower bound,
so is that of its relaxation, and so is what a branch and bound has proven when it is stopped. With no moment but the
crossing this is `_minimum_cut`'s program; which others to take is decided in `_binding_moments`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import mip

from lightning_remat.solvers.common._mip import Model
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import required

TOLERANCE = 1e-6
"""Share of the step's time by which a program's value may be too high: CBC's own tolerance, for nodes of mean cost."""

CROSSING = -1
"""Stands for the crossing in a list of moments, where the others are given by their nodes."""

Term: TypeAlias = "mip.Var | float"

Span = tuple[int, int]
"""Indices of the moments before and after: -1 for the beginning of the step, the number of moments for its end."""

_STOPPED = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE, mip.OptimizationStatus.NO_SOLUTION_FOUND)


class MomentsProgram:
    """The program of the module's docstring for given moments, which is solved for any budget.

    Args:
        problem: the problem.
        moments: nodes that every schedule evaluates, each an ancestor of the next one on its side of the crossing (`is_chain`);
            those before it are among what is `needed_at_the_boundary`. The crossing itself is always a moment.
        solver: python-mip's name of the solver.

    Attributes:
        moments: nodes, with `CROSSING` among them.
        crossing: its index there.
        once_seconds: seconds of a step without rematerialization.

    Raises:
        SolverError: when python-mip has no such solver here; perhaps not before the first `bound`.
    """

    def __init__(self, problem: PlainProblem, moments: Sequence[int] = (), solver: str = "CBC") -> None:
        self.problem = problem
        self.model = Model(solver)
        try:
            self._build(moments)
        except BaseException:  # an interrupt, say: nobody else can close it
            self.close()
            raise

    def _build(self, moments: Sequence[int]) -> None:
        problem = self.problem
        self.nodes = required(problem)
        self.once_seconds = sum([problem.seconds[node] for node in self.nodes])
        # Both units are means: the solver's tolerances are absolute, and shares of a whole of thousands would be lost in them.
        self._unit = self.once_seconds / max(1, len(self.nodes)) or 1.0
        self._unit_bytes = sum(problem.nbytes) / max(1, len(problem.nbytes)) or 1.0
        self.crossing = sum([node < problem.boundary for node in moments])
        self.moments = [*moments[: self.crossing], CROSSING, *moments[self.crossing :]]
        self._find_phases()
        end = len(self.moments)
        phases = [(moment - 1, moment) for moment in range(end + 1)]
        spans = phases + [(moment, end) for moment in range(end - 1)]
        self._given_seconds = 0.0
        self._runs: dict[tuple[int, Span], Term] = {}
        self._held: dict[tuple[int, int], Term] = {}
        for span in spans:
            self._add_runs(span)
        self._add_held()
        for node in self.nodes:
            by = range(self._first[node], self._due[node] + 1)
            self._require([self._runs[node, (phase - 1, phase)] for phase in by], 1.0)
        for span in spans:
            self._add_dependencies(span)
        self._limits = [self._add_limit(moment) for moment in range(end)]

    # -- variables ----------------------------------------------------------------------------------------------------------

    def _find_phases(self) -> None:
        """By node, its first phase, the one by which it must have run, and its last; by value, that of its last use."""
        problem, end = self.problem, len(self.moments)
        early = needed_at_the_boundary(problem)
        self._first = {node: 0 if node < problem.boundary else self.crossing + 1 for node in self.nodes}
        self._due = dict.fromkeys(self.nodes, end)
        for node in self.nodes:
            if node < problem.boundary and (node in early or problem.random[node]):
                self._due[node] = self.crossing
        for moment, at in enumerate(self.moments):
            if at != CROSSING:
                for node in ancestors(problem, [at]):
                    self._due[node] = min(self._due[node], moment)
                for node in self._descendants(at):
                    self._first[node] = max(self._first[node], moment + (node != at))
        self._last = {node: end if problem.recomputable[node] else self._due[node] for node in self.nodes}
        self._read = dict.fromkeys(problem.forward_transient, self.crossing)
        self._read |= dict.fromkeys((*problem.finals, *problem.forward_outputs), end)
        for node in self.nodes:
            for v in problem.reads[node]:
                self._read[v] = max(self._read.get(v, 0), self._last[node])

    def _descendants(self, node: int) -> set[int]:
        """A node and those that depend on it, of the required ones."""
        found = {node}
        for other in self.nodes[self.nodes.index(node) :]:
            if not found.isdisjoint(self.problem.predecessors[other]):
                found.add(other)
        return found

    def _add_runs(self, span: Span) -> None:
        before, end = span
        for node in self.nodes:
            if self._first[node] > end or self._last[node] <= before:
                continue
            given = before < self._first[node] and self._due[node] <= end
            phases = [(moment - 1, moment) for moment in range(before + 1, end + 1)]
            cost = self.problem.seconds[node] / self._unit if len(phases) == 1 else 0.0
            self._runs[node, span] = 1.0 if given else self.model.add_var(lb=0.0, ub=1.0, obj=cost)
            if len(phases) > 1:
                self._require(
                    [self._runs[node, one] for one in phases if (node, one) in self._runs], self._runs[node, span]
                )
            elif given:
                self._given_seconds += self.problem.seconds[node]

    def _add_held(self) -> None:
        outputs = frozenset(self.problem.forward_outputs)
        for node in self.nodes:
            for v in self.problem.writes[node]:
                for moment in range(self._first[node], min(len(self.moments), self._read.get(v, 0))):
                    given = v in outputs and moment >= self.crossing
                    self._held[v, moment] = 1.0 if given else self.model.add_var(lb=0.0, ub=1.0)

    # -- constraints --------------------------------------------------------------------------------------------------------

    def _require(self, terms: Sequence[Term], least: Term) -> None:
        """The sum of the terms is at least ``least``, which is at most 1: no row is needed where a term is 1."""
        columns: list[int] = []
        for term in terms:
            if not isinstance(term, mip.Var):
                return  # all numbers among them are 1
            columns.append(term.idx)
        factors = [1.0] * len(columns)
        constant = 0.0
        if isinstance(least, mip.Var):
            columns.append(least.idx)
            factors.append(-1.0)
        else:
            constant = -least
        self.model.add_row(columns, factors, constant, mip.GREATER_OR_EQUAL)

    def _add_dependencies(self, span: Span) -> None:
        """What is read in a span, and what is held or handed out at its end, was computed in it or held into it."""
        problem, (_, end) = self.problem, span
        for node in self.nodes:
            if (node, span) in self._runs:
                for v in problem.reads[node]:
                    self._require_present(v, span, self._runs[node, span])
            for v in problem.writes[node]:
                if (v, end) in self._held:
                    self._require_present(v, span, self._held[v, end])
        handed_out = {self.crossing: problem.forward_transient, len(self.moments): problem.finals}
        for v in handed_out.get(end, ()):
            self._require_present(v, span, 1.0)

    def _require_present(self, value: int, span: Span, least: Term) -> None:
        made = self.problem.producer[value]
        if made >= 0:
            terms = (self._runs.get((made, span)), self._held.get((value, span[0])))
            self._require([term for term in terms if term is not None], least)

    def fixed_bytes(self, moment: int) -> int:
        """Bytes that any schedule holds at a moment, forward outputs left out."""
        problem, node = self.problem, self.moments[moment]
        if node == CROSSING:
            later = {n for n in self.nodes if n >= problem.boundary}
            return problem.base_bytes + sum([problem.nbytes[v] for v in self._tangents(later)])
        tangents = self._tangents(self._descendants(node)) if node >= problem.boundary else set()
        total = problem.base_bytes + problem.workspace[node]
        total += 0 if node >= problem.boundary else problem.forward_extra_bytes
        over = problem.overwrites[node] if problem.overwrites else ()
        taken = max([problem.nbytes[v] for v in over]) if len(over) > 1 else 0
        return total + sum([problem.nbytes[v] for v in tangents | self._own(node)]) - taken

    def _tangents(self, readers: set[int]) -> set[int]:
        return {v for v in self.problem.tangents if not readers.isdisjoint(self.problem.consumers[v])}

    def _own(self, node: int) -> set[int]:
        """A node's reads and writes; a single value whose memory its result may take counts only if held on."""
        over = self.problem.overwrites[node] if self.problem.overwrites else ()
        return {*self.problem.reads[node], *self.problem.writes[node]}.difference(over if len(over) == 1 else ())

    def _add_limit(self, moment: int) -> tuple[int, mip.Constr | None]:
        """Bytes that any schedule holds at a moment, and the constraint on those that are decided on, if any are."""
        node = self.moments[moment]
        own = set() if node == CROSSING else self._own(node)
        there = self.fixed_bytes(moment)
        decided: list[mip.LinExpr] = []
        for (v, when), held in self._held.items():
            if when == moment and v not in own:
                if isinstance(held, mip.Var):
                    decided.append(self.problem.nbytes[v] / self._unit_bytes * held)
                else:
                    there += self.problem.nbytes[v]
        return there, self.model.add_constr(mip.xsum(decided) <= 0) if decided else None

    # -- solving ------------------------------------------------------------------------------------------------------------

    def bound(self, budget_bytes: float, seconds: float = 60.0, whole: bool = False) -> float | None:
        """A lower bound on the time of any schedule within a budget that runs the backward after the forward.

        Args:
            budget_bytes: the most that may be held at any moment.
            seconds: how long solving may take.
            whole: whether nodes run in a phase, and values are held, whole or not at all, instead of in part: a larger
                bound, by branching. Either implies the other, but with one alone branching takes far longer.

        Returns:
            Seconds; ``None`` where nothing was proven, or nothing fits.
        """
        for there, row in self._limits:
            if there > budget_bytes:
                return None
            if row is not None:
                row.rhs = (budget_bytes - there) / self._unit_bytes
        if whole:
            phases = [one for (_, (before, end)), one in self._runs.items() if end - before == 1]
            for one in (*self._held.values(), *phases):
                if isinstance(one, mip.Var):
                    one.var_type = mip.BINARY
            self.model.max_mip_gap = TOLERANCE / 10
            self.model.preprocess = 0  # branching gets further without
        status = self.model.optimize(max(seconds, 1e-3), relax=not whole)
        if status not in (_STOPPED if whole else _STOPPED[:1]):
            return None
        value = self.model.objective_bound if whole else self.model.objective_value
        if not math.isfinite(value):
            return None
        # Branching stops within 1e-5 of the best, whatever the scale.
        slack = max(TOLERANCE * self.once_seconds, 1e-5 * self._unit)
        return self._given_seconds + value * self._unit - slack

    def held_at(self, moment: int, share: float = 0.5) -> frozenset[int]:
        """Values of which at least ``share`` is held at a moment in the last solution."""
        return frozenset(
            v
            for (v, when), held in self._held.items()
            if when == moment and (float(held.x) if isinstance(held, mip.Var) else held) >= share - 1e-9
        )

    def close(self) -> None:
        """Give the solver back now (see `_mip.Model`)."""
        self.model.close()


def ancestors(problem: PlainProblem, nodes: Iterable[int]) -> set[int]:
    """Nodes, and those that they depend on."""
    stack = list(nodes)
    found: set[int] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(problem.predecessors[node])
    return found


def needed_at_the_boundary(problem: PlainProblem) -> set[int]:
    """Nodes that what the forward hands out depends on."""
    handed_out = [problem.producer[v] for v in (*problem.forward_outputs, *problem.forward_transient)]
    return ancestors(problem, [node for node in handed_out if node >= 0])


def is_chain(problem: PlainProblem, nodes: Sequence[int]) -> bool:
    """Whether each of the nodes, in the captured order, is an ancestor of the next on its side of the crossing."""
    return all(
        before < problem.boundary <= node or before in ancestors(problem, [node])
        for before, node in itertools.pairwise(nodes)
    )
