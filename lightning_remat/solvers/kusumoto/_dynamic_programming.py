"""Dynamic programming over lower sets: Kusumoto et al. 2019, section 4 and Algorithm 1.

The paper's problem is the forward graph alone, with its own cost model: of the canonical strategies (`_lower_sets`) find the
one of least overhead (eq. 1) whose memory (eq. 2) is within a budget B. A state is a lower set, the overhead so far and the
memory cached so far; of states that differ in memory alone only the smallest is followed. `exact_dp` does so over all lower
sets, `approx_dp` over the #V of the pruned family (section 4.3).

On the joint graph, its forward part, loss included, is the paper's graph, and the backward nodes follow the segments.
Eq. 2 takes a gradient to be as large as its value, and frees nothing inside a segment; the exact peak of the schedule
counts every op of the captured backward, and frees each value after its last use (their liveness analysis). So B is not
the budget. Eq. 2 decides which strategies are candidates, the exact peak decides what fits, and B is searched: the
fastest schedule among those that fit wins. Without liveness analysis (``liveness=False``), what counts as the peak is
what it would be if a segment gave nothing up before its end.

With objective ``"time"`` the strategy of least overhead within B is taken; with ``"memory"`` that of most (section 4.4): coarse
segments, in which liveness analysis frees more. Times are rounded to whole units (`resolution` of them in one forward),
and a canonical strategy computes no node more than twice: nothing here is optimal for the joint graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.kusumoto._lower_sets import (
    ForwardGraph,
    canonical,
    count_lower_sets,
    forward_graph,
    lower_sets,
    peak_without_liveness,
    pruned_family,
)

OBJECTIVES = ("time", "memory")

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]


@register("exact_dp")
def exact_dp(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    objective: str = "time",
    liveness: bool = True,
    resolution: int = 2000,
    limit: int = 20_000,
) -> Answer:
    """Algorithm 1 over all lower sets (section 4.2).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        objective: ``"time"`` for the time-centric strategy, ``"memory"`` for the memory-centric one (section 4.4).
        liveness: whether values are taken to be freed after their last use, or at the end of their segment only.
        resolution: units of time in one forward (see `forward_graph`).
        limit: graphs with more lower sets than this are refused; the time grows with the square of their number.

    Raises:
        SolverError: for an unknown objective, or a resolution below 1.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if not problem.boundary:
        return Answer(None, Status.INFEASIBLE, notes=("no forward node that could be computed again",))
    graph = forward_graph(problem, resolution)
    count = count_lower_sets(graph)
    if count is None or count > limit:
        found = "too many lower sets to count" if count is None else f"{count:,} lower sets"
        return Answer(None, Status.REFUSED, notes=(f"{found}, the limit is {limit:,}: approx_dp takes such graphs",))
    return _search(problem, budget_bytes, graph, lower_sets(graph), objective, liveness, deadline)


@register("approx_dp")
def approx_dp(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    objective: str = "time",
    liveness: bool = True,
    resolution: int = 1000,
) -> Answer:
    """Algorithm 1 over the pruned family of lower sets (section 4.3).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        objective: ``"time"`` for the time-centric strategy, ``"memory"`` for the memory-centric one (section 4.4).
        liveness: whether values are taken to be freed after their last use, or at the end of their segment only.
        resolution: units of time in one forward (see `forward_graph`).

    Raises:
        SolverError: for an unknown objective, or a resolution below 1.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if not problem.boundary:
        return Answer(None, Status.INFEASIBLE, notes=("no forward node that could be computed again",))
    graph = forward_graph(problem, resolution)
    return _search(problem, budget_bytes, graph, pruned_family(graph), objective, liveness, deadline)


def _search(
    problem: Problem,
    budget_bytes: int,
    graph: ForwardGraph,
    sets: Sequence[int],
    objective: str,
    liveness: bool,
    deadline: float,
    grid: int = 8,
    halvings: int = 5,
) -> Answer:
    """The fastest strategy within the budget, over B: a grid of values, then bisection above the largest that fits."""
    if objective not in OBJECTIVES:
        raise SolverError(f"unknown objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    program = LowerSetProgram(graph, sets)
    low, high = program.smallest_budget(deadline), program.largest_budget
    notes = [f"{len(program)} lower sets", f"smallest feasible budget of the paper's model {low:,} bytes"]
    fastest: tuple[float, NodeSequence] | None = None
    smallest = -1
    seen: set[tuple[int, ...]] = set()

    def fits(inner: int) -> bool:
        nonlocal fastest, smallest
        strategy = program.solve(inner, objective, deadline)
        if strategy is None:
            return False
        found = canonical(problem, graph, strategy)
        evaluation = problem.evaluate(found.sequence)
        peak = evaluation.peak_bytes if liveness else peak_without_liveness(problem, found)
        smallest = peak if smallest < 0 else min(smallest, peak)
        seen.add(tuple(strategy))
        if peak > budget_bytes:
            return False
        if fastest is None or evaluation.seconds < fastest[0]:
            fastest = (evaluation.seconds, found.sequence)
        return True

    largest, beyond = -1, high
    for inner in dict.fromkeys(low + (high - low) * step // grid for step in range(grid + 1)):
        if clock() > deadline:
            break
        if fits(inner):
            largest, beyond = inner, high
        elif largest >= 0 and beyond == high:
            beyond = inner
    for _ in range(halvings):
        if largest < 0 or beyond - largest < 2 or clock() > deadline:
            break
        middle = (largest + beyond) // 2
        largest, beyond = (middle, beyond) if fits(middle) else (largest, middle)
    notes.append(f"{len(seen)} strategies tried, smallest peak {smallest:,} bytes")
    if fastest is not None:
        return Answer(fastest[1], Status.FEASIBLE, notes=tuple(notes))
    late = clock() > deadline
    return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, notes=tuple(notes))


class LowerSetProgram:
    """Algorithm 1 on a family of lower sets, in the paper's own model: bytes and time units of the forward graph alone.

    Args:
        graph: the forward graph.
        sets: the family. The empty set and the set of all nodes are added.
    """

    def __init__(self, graph: ForwardGraph, sets: Iterable[int]) -> None:
        count = len(graph)
        width = count // 64 + 1
        masks = list({0, graph.everything, *sets})
        packed = np.frombuffer(b"".join(s.to_bytes(8 * width, "little") for s in masks), dtype=np.uint8)
        inside = np.unpackbits(packed.reshape(len(masks), -1), axis=1, bitorder="little")[:, :count].astype(bool)
        nbytes, times = np.array(graph.sizes, dtype=np.float64), np.array(graph.times, dtype=np.float64)
        held = inside @ nbytes
        # By M(L): a subset of a set comes before it, and the sets that differ from it by little lie next to it.
        order = np.lexsort((inside.sum(axis=1), held))
        inside, self.held = inside[order], held[order]
        self.graph, self.sets = graph, [masks[i] for i in order]
        self.words = np.ascontiguousarray(packed.view(np.uint64).reshape(len(masks), width)[order].T)
        self.work = inside @ times
        self.nbytes, self.times = nbytes, times
        outside = ~inside
        edges = np.zeros((count, count), dtype=np.float32)
        for node, before in enumerate(graph.predecessors):
            edges[list(before), node] = 1
        frontier = outside & (inside @ edges > 0)  # δ+(L) \ L
        beside = outside & (frontier @ edges.T > 0)  # δ-(δ+(L)) \ L
        boundary = inside & (outside @ edges.T > 0)  # ∂(L)
        pinned = np.array([graph.pinned >> node & 1 for node in range(count)], dtype=bool)
        boundary |= inside & pinned
        self.across = frontier @ nbytes + beside @ nbytes  # the terms (iii) and (iv) of eq. 2
        self.boundary = [np.flatnonzero(row) for row in boundary]
        self.outside = np.ascontiguousarray(outside.T).astype(np.float64)

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def largest_budget(self) -> int:
        """Bytes by eq. 2 of the strategy of a single segment, 2 M(V). No strategy takes more."""
        return int(2 * self.held[-1])

    def _before(self, at: int, least: _Floats, budget: float) -> tuple[_Indices, _Floats]:
        """The sets that the set ``at`` may follow within ``budget``, and eq. 2 less M(U) of each.

        Args:
            at: the later set.
            least: the smallest M(U) with which each set before it is reached.
            budget: B.
        """
        # Eq. 2 is at least 2 M(V_i) and its last two terms: sets that are too small to precede this one are left out.
        first = int(np.searchsorted(self.held[:at], self.held[at] - (budget - self.across[at]) / 2 - 0.5))
        peak = 2 * (self.held[at] - self.held[first:at]) + self.across[at]
        sets = np.flatnonzero(least[first:at] + peak <= budget) + first
        for word in self.words:
            sets = sets[word[sets] & ~word[at] == 0]
        return sets, peak[sets - first]

    def feasible(self, budget: float) -> bool:
        """Whether any strategy of the family is within ``budget`` (eq. 2)."""
        least = np.full(len(self), np.inf)
        least[0] = 0
        for at in range(1, len(self)):
            sets, _ = self._before(at, least, budget)
            if len(sets):
                least[at] = np.min(least[sets] + self._cached(at, sets)[0])
        return bool(np.isfinite(least[-1]))

    def _cached(self, at: int, sets: _Indices) -> tuple[_Floats, _Floats]:
        """M(U') - M(U) and t' - t (section 4.2) where the set ``at`` follows each of ``sets``."""
        boundary = self.boundary[at]
        newly = self.outside[boundary[:, None], sets]  # ∂(L') less L
        again = self.work[at] - self.work[sets] - self.times[boundary] @ newly  # T(V' \ ∂(L'))
        return self.nbytes[boundary] @ newly, again

    def smallest_budget(self, deadline: float = np.inf, tolerance: float = 0.0) -> int:
        """The smallest B, in bytes, for which there is a strategy (sections 4.4 and 5.1), by binary search.

        Args:
            deadline: `clock` at which to stop; the answer is feasible even then, but not the smallest.
            tolerance: stop within this share of the smallest.
        """
        low, high = -1, self.largest_budget
        while high - low > max(1, int(tolerance * high)) and clock() < deadline:
            middle = (low + high) // 2
            low, high = (low, middle) if self.feasible(middle) else (middle, high)
        return high

    def solve(self, budget: float, objective: str = "time", deadline: float = np.inf) -> list[int] | None:
        """Algorithm 1: the strategy within ``budget`` of least overhead (``"time"``) or of most (``"memory"``).

        Args:
            budget: B, in bytes by eq. 2.
            objective: ``"time"`` or ``"memory"``.
            deadline: `clock` at which to give up.

        Returns:
            Its lower sets, L_1 to L_k; ``None`` where there is none, or where time ran out.
        """
        sign = 1.0 if objective == "time" else -1.0
        # The table opt[L, t] = m, sparse: states in the order of their sets, those of one set next to each other.
        cost, held = np.zeros(1), np.zeros(1)  # t (negative where the most is sought) and m
        owner, previous = np.zeros(1, dtype=np.int64), np.full(1, -1, dtype=np.int64)
        start = np.zeros(len(self) + 1, dtype=np.int64)
        start[1] = 1
        least = np.full(len(self), np.inf)
        least[0] = 0
        for at in range(1, len(self)):
            if clock() > deadline:
                return None
            sets, peak = self._before(at, least, budget)
            cached, again = self._cached(at, sets)
            # The states of all those sets, and for each the place of its set among them.
            lengths = start[sets + 1] - start[sets]
            rows = np.repeat(np.arange(len(sets)), lengths)
            states = np.arange(len(rows)) + np.repeat(start[sets] - np.cumsum(lengths) + lengths, lengths)
            possible = held[states] + peak[rows] <= budget
            states, rows = states[possible], rows[possible]
            new_cost, new_held = cost[states] + sign * again[rows], held[states] + cached[rows]
            front = _pareto(new_cost, new_held)
            end = int(start[at]) + len(front)
            while end > len(cost):
                cost, held = np.resize(cost, 2 * len(cost)), np.resize(held, 2 * len(held))
                owner, previous = np.resize(owner, 2 * len(owner)), np.resize(previous, 2 * len(previous))
            here = slice(int(start[at]), end)
            cost[here], held[here], owner[here], previous[here] = new_cost[front], new_held[front], at, states[front]
            start[at + 1] = end
            if len(front):
                least[at] = new_held[front[-1]]
        if not np.isfinite(least[-1]):
            return None
        state = int(start[-2])  # the front is sorted: this is t*
        strategy: list[int] = []
        while state > 0:
            strategy.append(self.sets[int(owner[state])])
            state = int(previous[state])
        return strategy[::-1]


def _pareto(cost: _Floats, held: _Floats) -> _Indices:
    """Indices, by rising cost, of the states that none dominates in cost and memory (end of section 4.2)."""
    order = np.lexsort((held, cost))
    least = np.minimum.accumulate(held[order])
    better = np.ones(len(order), dtype=bool)
    better[1:] = least[1:] < least[:-1]
    return order[better]
