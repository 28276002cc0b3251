"""The integer program on computation nodes and data nodes, with options and phantom nodes (Gusak et al. 2025, appendix B).

Variables (B.2), for phase t, whose goal is the first evaluation of node t:

* R: node k runs, with option o, in phase t; CR is the sum over its options;
* P: data node d is in memory before phase t;
* C: d is created, and D: d is deleted, when node k has run in phase t;
* Sp: the phantom node of layer j is saved with option o before phase t.

What differs from the paper:

* results are values, each written by one node, so a data node has one predecessor. Then S (which contributions a data node
  holds) is P, and is left out;
* there is no loss node; the boundary lies between two phases. From there on the caller holds what it is handed (forward
  outputs), and has handed in the tangents. What must exist at the boundary alone is held through the last phase before
  it;
* nodes that may run only once run in their own phase. Nodes that nothing depends on have no phase of their own;
* in the condition for a deletion, and in its linear form (appendix B.3), the paper's ``P_k^{t+1}`` must read
  ``P_d^{t+1}``: it is the data node that is not in memory in the next phase.

The order is the captured one, a node runs at most once a phase, and a value is deleted only after a node related to it has run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import mip

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._mip import Model
from lightning_remat.solvers.common._solution import Status

Term: TypeAlias = "mip.LinExpr | mip.Var | float"


@dataclasses.dataclass(frozen=True)
class Way:
    """One option of a computation node.

    Attributes:
        seconds: of one evaluation.
        reads: data nodes that it needs.
        steps: its sub-steps, each with the bytes that it needs beyond what is in memory when the node is done and
            nothing is deleted yet (m of appendix B.3), and with the data nodes that are freed before it if the node
            deletes them.
    """

    seconds: float
    reads: frozenset[int]
    steps: tuple[tuple[int, frozenset[int]], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A forward node, its backward node, and the bytes of their phantom node with each option."""

    forward: int
    backward: int
    phantom_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DataFlow:
    """Computation nodes in a topological order, with the data nodes between them.

    Attributes:
        ways: options of each computation node.
        writes: data nodes that each computation node makes.
        once: whether each computation node runs in its own phase only.
        wanted: whether each computation node must run at all.
        nbytes, producer: of each data node; producer -1: handed in at the boundary.
        boundary: number of computation nodes of the forward.
        outputs, transient, finals: data nodes, as in `PlainProblem`.
        base_bytes, forward_extra_bytes: as in `PlainProblem`.
        layers: forward nodes with their backward nodes, of the same options; a forward node may have more, which save nothing.
    """

    ways: tuple[tuple[Way, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    once: tuple[bool, ...]
    wanted: tuple[bool, ...]
    nbytes: tuple[int, ...]
    producer: tuple[int, ...]
    boundary: int
    outputs: frozenset[int]
    transient: frozenset[int]
    finals: frozenset[int]
    base_bytes: int
    forward_extra_bytes: int
    layers: tuple[Layer, ...] = ()


@dataclasses.dataclass(frozen=True)
class PhasesResult:
    """The runs in each phase that the program found, how its solve ended, and its bound.

    Attributes:
        runs: (node, option) in each phase; ``None`` if none was found.
        status: how the solve ended.
        seconds: of ``runs``, by the program's own account.
        bound_seconds: no schedule of the program is faster.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...] | None
    status: Status
    seconds: float = math.inf
    bound_seconds: float = 0.0


def solve_phases(
    flow: DataFlow, budget_bytes: int, *, gap: float, deadline: float, solver: str = "CBC"
) -> PhasesResult:
    """Solve the program of appendix B for ``flow``.

    Args:
        flow: the data flow.
        budget_bytes: the most that may be held at any moment.
        gap: stop when the schedule is proven to be within this share of the program's bound.
        deadline: `clock` at which to stop.
        solver: python-mip's name of the solver.
    """
    fixed = flow.base_bytes + sum(flow.nbytes[d] for d in flow.outputs if flow.boundary < len(flow.ways))
    if budget_bytes < max(fixed, flow.base_bytes + flow.forward_extra_bytes):
        return PhasesResult(None, Status.INFEASIBLE)
    if clock() >= deadline:
        return PhasesResult(None, Status.TIMEOUT)
    with contextlib.closing(_Program(flow, budget_bytes, solver, deadline)) as program:
        return program.solve(gap, deadline)


class _Program:
    """The one program for a data flow and a budget, in the paper's order: variables (B.2), then the constraints of each phase.

    Bytes and seconds are scaled so that the numbers stay near one.
    """

    def __init__(self, flow: DataFlow, budget_bytes: int, solver: str, deadline: float) -> None:
        self.flow, self.count = flow, len(flow.ways)
        self.unit_bytes = max(1.0, (budget_bytes - flow.base_bytes) / 1000)
        self.budget = (budget_bytes - flow.base_bytes) / self.unit_bytes
        self.size = [nbytes / self.unit_bytes for nbytes in flow.nbytes]
        times = [way.seconds for ways in flow.ways for way in ways if way.seconds > 0]
        self.unit_seconds = sum(times) / len(times) if times else 1.0
        self.possible = True
        self.model = Model(solver)
        self.model.threads = 1
        self.readers: list[list[int]] = [[] for _ in flow.nbytes]
        for node, ways in enumerate(flow.ways):
            for d in sorted(frozenset().union(*[way.reads for way in ways])):
                self.readers[d].append(node)
        self.layer_of = {node: layer for layer in flow.layers for node in (layer.forward, layer.backward)}
        self._add_variables()
        for phase in range(self.count):
            if clock() < deadline:
                self._add_phase(phase)
        objective = mip.xsum(  # eq. 2
            way.seconds / self.unit_seconds * variable
            for node, ways in enumerate(flow.ways)
            for way, row in zip(ways, self.runs[node], strict=True)
            for variable in row.values()
        )
        self.model.minimize(objective)

    # -- variables (B.2) --------------------------------------------------------------------------------------------------

    def _add_variables(self) -> None:
        flow, count = self.flow, self.count
        last = self._last_phases()
        self.runs: list[list[dict[int, mip.Var]]] = []  # R: node, option, phase; none for k > t
        for node, ways in enumerate(flow.ways):
            until = node if flow.once[node] else last[node]
            phases = range(node, until + 1 if flow.wanted[node] else node)
            self.runs.append([{t: self._binary() for t in phases} for o in range(len(ways))])
        self.held: list[dict[int, Term]] = []  # P: data node, phase; absent: not in memory
        for d, producer in enumerate(flow.producer):
            first = producer + 1 if producer >= 0 else flow.boundary
            until = max([last[reader] for reader in self.readers[d]], default=-1)
            fixed: dict[int, Term] = {}
            if d in flow.finals:
                until = count - 1
                fixed[count] = 1.0  # final data nodes are in memory after the last phase
            if producer < 0:
                fixed[first] = 1.0
            if d in flow.transient:
                until = max(until, flow.boundary - 1)
            if d in flow.outputs:  # held by the caller from the boundary on
                until = flow.boundary - 1
                fixed = dict.fromkeys(range(flow.boundary, count + 1), 1.0)
            free = {t: self._binary() for t in range(first, until + 1) if t not in fixed}
            self.held.append({**free, **fixed} if free or d in flow.finals or self.readers[d] or producer >= 0 else {})
        self.saved: dict[int, list[dict[int, mip.Var]]] = {}  # Sp: layer's forward node, option, phase
        for layer in flow.layers:
            phases = range(layer.forward + 1, layer.backward + 1)
            options = range(len(layer.phantom_bytes))
            self.saved[layer.forward] = [{t: self._binary() for t in phases} for o in options]

    def _last_phases(self) -> list[int]:
        """Last phase in which a run of each node can serve another node, the boundary or the end."""
        flow = self.flow
        last = list(range(self.count))
        for node in range(self.count - 1, -1, -1):
            if flow.once[node]:
                continue
            serves = [self.layer_of[node].backward] if node in self.layer_of else []
            for d in flow.writes[node]:
                if d in flow.outputs:
                    serves.append(flow.boundary - 1)
                else:
                    serves += [last[reader] for reader in self.readers[d]]
                    serves += [self.count - 1] if d in flow.finals else []
                    serves += [flow.boundary - 1] if d in flow.transient else []
            last[node] = max([last[node], *serves])
        return last

    def _binary(self) -> mip.Var:
        return self.model.add_var(var_type=mip.BINARY)

    def _computed(self, node: int, phase: int) -> Term:
        """CR: whether ``node`` runs in ``phase``, with any option."""
        found = [row[phase] for row in self.runs[node] if phase in row]
        return mip.xsum(found) if found else 0.0

    # -- constraints (B.3) ------------------------------------------------------------------------------------------------

    def _add_phase(self, t: int) -> None:
        flow = self.flow
        backward = t >= flow.boundary
        nodes = [node for node in range(t + 1) if any(t in row for row in self.runs[node])]
        computed = {node: self._computed(node, t) for node in nodes}
        for node in nodes:
            self._at_most(computed[node], 1.0)  # eq. 5
        if flow.wanted[t]:
            self._at_most(1.0, computed[t])  # node t is executed in phase t
        self._add_phantoms(t)
        self._add_dependencies(t, nodes, computed)
        created: dict[int, list[tuple[int, Term]]] = {node: [] for node in nodes}
        deleted: dict[int, list[tuple[int, Term]]] = {node: [] for node in nodes}
        for d, producer in enumerate(flow.producer):
            if (backward and d in flow.outputs) or (producer < 0 and not backward):
                continue
            related = [node for node in (producer, *self.readers[d]) if node in computed]
            present = self.held[d].get(t, 0.0)
            # What must exist at the boundary is needed "in the next phase", though it may be gone then.
            at_boundary = t + 1 == flow.boundary and d in flow.transient
            following: Term = 1.0 if at_boundary else self.held[d].get(t + 1, 0.0)
            alive: Term = present  # A, an alias
            for place, node in enumerate(related):
                if node == producer:
                    make = self.model.add_var(lb=0.0, ub=1.0)
                    created[node].append((d, make))
                    self._at_most(make, computed[node])  # a value can only be created by a node that is really computed
                    alive = alive + make
                    self._at_most(alive, 1.0)
                drop = self._binary()
                deleted[node].append((d, drop))
                alive = alive - drop
                self._at_most(0.0, alive)  # alive or not
                if node == producer:
                    self._at_most(computed[node] - drop, alive)  # alive if computed and not deleted
                later = [computed[reader] for reader in related[place + 1 :]]
                uses = mip.xsum(later) if later else 0.0
                # Deleted if and only if computed, not in memory in phase t + 1 (P_d, not P_k), and not used later in phase t.
                self._at_most(computed[node] - following - uses, drop)
                self._at_most(1.0 - computed[node] + following + uses, (2 + len(later)) * (1.0 - drop))
            self._at_most(following, alive)  # P^{t+1} = A after the last related node
            self._at_most(alive, following)
        self._add_memory(t, nodes, created, deleted)

    def _add_phantoms(self, t: int) -> None:
        for layer in self.flow.layers:
            saved = self.saved[layer.forward]
            self._at_most(mip.xsum(row[t] for row in saved if t in row), 1.0)  # eq. 6
            for option, row in enumerate(saved):
                now: Term = row.get(t, 0.0)
                after: Term = row.get(t + 1, 0.0)
                made: Term = self.runs[layer.forward][option].get(t, 0.0)
                used: Term = self.runs[layer.backward][option].get(t, 0.0)
                self._at_most(after, now + made)  # eq. 7
                if t <= layer.backward:
                    self._at_most(now + made - used, after)  # eq. 8
                self._at_most(used, now + made)  # eq. 9

    def _add_dependencies(self, t: int, nodes: Sequence[int], computed: dict[int, Term]) -> None:
        flow = self.flow
        for node in nodes:
            ways = flow.ways[node]
            common = frozenset.intersection(*[way.reads for way in ways])
            for option, way in enumerate(ways):
                for d in sorted(way.reads):
                    source = computed.get(flow.producer[d], 0.0) + self.held[d].get(t, 0.0)
                    if d not in common:
                        self._at_most(self.runs[node][option].get(t, 0.0), source)  # option-specific dependencies
                    elif option == 0:
                        self._at_most(computed[node], source)

    def _add_memory(
        self,
        t: int,
        nodes: Sequence[int],
        created: dict[int, list[tuple[int, Term]]],
        deleted: dict[int, list[tuple[int, Term]]],
    ) -> None:
        """U: memory after each node of phase t, and the budget while it runs (eq. 10 with the correction terms)."""
        flow, size = self.flow, self.size
        backward = t >= flow.boundary
        constant = sum([size[d] for d in flow.outputs]) if backward else flow.forward_extra_bytes / self.unit_bytes
        usage: Term = mip.xsum(  # M_t
            size[d] * row[t]
            for d, row in enumerate(self.held)
            if t in row and size[d] and not (backward and d in flow.outputs)
        )
        for layer in flow.layers:
            for nbytes, row in zip(layer.phantom_bytes, self.saved[layer.forward], strict=True):
                usage = usage + nbytes / self.unit_bytes * row.get(t, 0.0)
        for node in nodes:
            usage = usage + mip.xsum(size[d] * term for d, term in created[node])
            layer_ = self.layer_of.get(node)
            if layer_ is not None:
                for option, nbytes in enumerate(layer_.phantom_bytes):
                    phantom = nbytes / self.unit_bytes
                    made = self.runs[layer_.forward][option].get(t, 0.0)
                    if node == layer_.forward:  # IF_k
                        usage = usage + phantom * made
                    else:  # IB_k: given up where it is not saved for the next phase
                        row = self.saved[layer_.forward][option]
                        usage = usage - phantom * (made + row.get(t, 0.0) - row.get(t + 1, 0.0))
            level = self.model.add_var(lb=0.0)  # with all that is deleted after the node
            self._at_most(usage, level)
            surplus = sum([size[d] for d in flow.writes[node] if backward and d in flow.outputs])
            for option, way in enumerate(flow.ways[node]):
                run = self.runs[node][option].get(t, 0.0)
                for overhead, gone in way.steps:
                    freed = mip.xsum(size[d] * term for d, term in deleted[node] if d in gone)
                    extra = overhead / self.unit_bytes + surplus
                    self._at_most(level + constant + extra * run - freed, self.budget)
            usage = level - mip.xsum(size[d] * term for d, term in deleted[node])

    def _at_most(self, left: Term, right: Term) -> None:
        """Add a constraint, unless it holds for constants alone."""
        difference = mip.LinExpr() + left - right
        if difference.expr:
            self.model.add_constr(difference <= 0)
        elif difference.const > 1e-9:
            self.possible = False

    # -- answer -----------------------------------------------------------------------------------------------------------

    def solve(self, gap: float, deadline: float) -> PhasesResult:
        """Run the solver and read R."""
        if not self.possible:
            return PhasesResult(None, Status.INFEASIBLE)
        left = deadline - clock()
        if left <= 0:
            return PhasesResult(None, Status.TIMEOUT)
        self.model.max_mip_gap = gap
        self.model.max_mip_gap_abs = 1e-9
        status = self.model.optimize(left)
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            return PhasesResult(None, Status.INFEASIBLE)
        if (
            status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
            or not self.model.num_solutions
        ):
            return PhasesResult(None, Status.TIMEOUT)
        chosen = [
            [(t, option) for option, row in enumerate(rows) for t, term in row.items() if float(term.x) > 0.5]
            for rows in self.runs
        ]
        phases: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for node, at in enumerate(chosen):
            for t, option in at:
                phases[t].append((node, option))
        seconds = sum(self.flow.ways[node][option].seconds for phase in phases for node, option in phase)
        bound = self.model.objective_bound * self.unit_seconds
        proven = status is mip.OptimizationStatus.OPTIMAL
        return PhasesResult(
            tuple(tuple(phase) for phase in phases),
            Status.OPTIMAL if proven else Status.FEASIBLE,
            seconds,
            min(bound, seconds) if math.isfinite(bound) else 0.0,
        )

    def close(self) -> None:
        """Give the solver back now (see `_mip.Model`)."""
        self.model.close()
