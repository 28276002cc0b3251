"""The program of the moments that bind, with a third choice: a value is held, waits on the host, or neither.

Let o_v say that value v is copied to the host in the forward and fetched in the backward, and g_v that it is copied and fetched
anywhere. To the program of `_linear_program`, with s_v and l_v the seconds of v's copies to the host and back, come

    minimize    sum of seconds_n r_ns over the phases s  +  w_f + w_b
    subject to  o_v <= g_v,  o_v <= sum of r_ns over the phases of the forward   for the values v that n writes
                r_ms + h_vi + c_v >= r_ns (or h_vj), where c_v is o_v after the crossing and g_v after other moments i
                w_f >= sum of s_v o_v - sum of seconds_n r_ns over the phases of the forward
                w_b >= sum of l_v o_v - sum of seconds_n r_ns over those of the backward
                w_f + w_b >= sum of s_v g_v - sum of seconds_n r_ns,  and the same with l_v
                sum of bytes_v g_v <= the host's bytes

What a schedule reads or holds in a span that begins at the moment i it has computed in the span, held at i, or copied to the
host before i. Its forward takes as long as its ops do, and as its copies do, one after another; so does its backward, and so do
both. So the program has no more seconds than any schedule within the budget, with copies or without.

To choose what is copied there are more rows (`expect_order`), which hold for schedules in about the captured order only: what
is made late in the forward must be copied in what is left of it, and what is read early in the backward be fetched by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mip

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.bounds._linear_program import MomentsProgram, Span, Term
from lightning_remat.solvers.common._problem import PlainProblem, Problem
from lightning_remat.solvers.offload._rewriting import host_of

ANY_COPIES = "any schedule that runs the backward after the forward, in any order, with any copies to the host"

POINTS = 16
"""Moments of the forward, and of the backward, for which `expect_order` adds rows."""


class OffloadProgram(MomentsProgram):
    """The program of the module's docstring.

    Args:
        graph: with host memory.
        problem: its problem.
        moments: see `MomentsProgram`.
        solver: python-mip's name of the solver.
        slower: how many times as long as expected copies are said to take; over 1, what is solved is no bound.
    """

    def __init__(
        self,
        graph: ComputationGraph,
        problem: Problem,
        moments: Sequence[int] = (),
        solver: str = "CBC",
        slower: float = 1.0,
    ) -> None:
        self.slower = slower
        self.host, self._copyable = host_of(graph), copyable_values(graph, problem)
        super().__init__(problem, moments, solver)
        try:
            self._add_copies()
        except BaseException:  # as in `MomentsProgram`
            self.close()
            raise

    def _add_held(self) -> None:
        super()._add_held()
        made = [v for node in self.nodes for v in self.problem.writes[node] if v in self._copyable]
        self.copied = {v: self.model.add_var(lb=0.0, ub=1.0) for v in made}
        self.early = {v: self.model.add_var(lb=0.0, ub=1.0) for v in made if self._makes_early(v)}

    def _makes_early(self, value: int) -> bool:
        return self.problem.producer[value] < self.problem.boundary

    def _require_present(self, value: int, span: Span, least: Term) -> None:
        made = self.problem.producer[value]
        terms: list[Term | None] = [self._runs.get((made, span)), self._held.get((value, span[0]))]
        if span[0] >= 0:
            terms.append((self.early if span[0] == self.crossing else self.copied).get(value))
        if made >= 0:
            self._require([term for term in terms if term is not None], least)

    def _add_copies(self) -> None:
        phases = [(moment - 1, moment) for moment in range(len(self.moments) + 1)]
        self._forward, self._backward = phases[: self.crossing + 1], phases[self.crossing + 1 :]
        for v, early in self.early.items():
            node = self.problem.producer[v]
            self._require([self.copied[v]], early)
            self._require([self._runs[node, s] for s in self._forward if (node, s) in self._runs], early)
        # [what the forward and the backward wait for]
        self._waits = [self.model.add_var(obj=1.0) for _ in range(2)]
        self._in_time(self._waits[:1], self.early, False, self._ran(self.nodes, self._forward))
        self._in_time(self._waits[1:], self.early, True, self._ran(self.nodes, self._backward))
        for to_device in (False, True):
            self._in_time(self._waits, self.copied, to_device, self._ran(self.nodes, phases))
        # [the host's bytes]
        unit = self._unit_bytes
        factors = [self.problem.nbytes[v] / unit for v in self.copied]
        columns = [copied.idx for copied in self.copied.values()]
        self.model.add_row(columns, factors, -self.host.bytes / unit, mip.LESS_OR_EQUAL)

    def _ran(self, nodes: Iterable[int], phases: Iterable[Span]) -> list[tuple[int, Span]]:
        return [(node, phase) for phase in phases for node in nodes if (node, phase) in self._runs]

    def _in_time(
        self, waits: Sequence[mip.Var], values: Iterable[int], to_device: bool, runs: Iterable[tuple[int, Span]]
    ) -> None:
        """The copies of these values take no longer than these evaluations, beside what is waited for."""
        problem, unit = self.problem, self._unit
        columns, factors, given = [wait.idx for wait in waits], [1.0] * len(waits), 0.0
        for node, phase in runs:
            ran = self._runs[node, phase]
            if isinstance(ran, mip.Var):
                columns.append(ran.idx)
                factors.append(problem.seconds[node] / unit)
            else:
                given += ran * problem.seconds[node] / unit
        for v in values:
            copied = self.early[v] if v in self.early else self.copied[v]
            columns.append(copied.idx)
            factors.append(-self.slower * self.host.seconds(problem.nbytes[v], to_device=to_device) / unit)
        self.model.add_row(columns, factors, given, mip.GREATER_OR_EQUAL)

    def expect_order(self) -> None:
        """Add the rows for schedules in about the captured order, and copy what the forward makes only: what is solved then
        is no bound.
        """
        problem = self.problem
        forward = [node for node in self.nodes if node < problem.boundary]
        backward = [node for node in self.nodes if node >= problem.boundary]
        first = first_reads(problem)
        for v, copied in self.copied.items():
            self.model.add_row([copied.idx], [1.0], 0.0, mip.LESS_OR_EQUAL) if v not in self.early else self._require(
                [self.early[v]], copied
            )
        for point in range(1, POINTS):
            at = forward[len(forward) * point // POINTS] if forward else -1
            late = [v for v in self.early if problem.producer[v] >= at]
            self._in_time(self._waits[:1], late, False, self._ran([n for n in forward if n > at], self._forward))
            at = backward[len(backward) * point // POINTS] if backward else len(problem)
            soon = [v for v in self.early if first[problem.producer[v]] <= at]
            by = [n for n in self.nodes if first[n] < at]
            self._in_time(self._waits[1:], soon, True, self._ran(by, self._backward))

    def chosen(self, share: float = 0.5) -> frozenset[int]:
        """Values of which at least ``share`` is copied to the host in the last solution."""
        return frozenset(v for v, early in self.early.items() if float(early.x) >= share - 1e-9)


def copyable_values(graph: ComputationGraph, problem: Problem) -> dict[int, int]:
    """Values that may be copied to the host, each with its tensor."""
    value_of = {storage: v for v, storage in enumerate(problem.storage)}
    storages = [tensor.storage for tensor in graph.tensors]
    return {value_of[storages[t]]: t for t, may in enumerate(graph.copyable) if may and storages[t] in value_of}


def first_reads(problem: PlainProblem) -> list[int]:
    """For each node of the backward itself; for others the first one that reads its results, perhaps through others."""
    found = list(range(len(problem)))
    for node in range(problem.boundary - 1, -1, -1):
        readers = [c for v in problem.writes[node] for c in problem.consumers[v]]
        direct = [c for c in readers if c >= problem.boundary]
        found[node] = min(direct) if direct else max([found[c] for c in readers], default=len(problem))
    return found
