"""The method "griewank_logn": REVOLVE (Griewank and Walther 2000), Checkmate's baseline "Griewank et al. log n" (section 6.1).

A chain of l steps is reversed with s snapshots (checkpoints), the one it starts from included. While a snapshot is
left, the chain is advanced to the place where a binomial split puts it; the part behind it is reversed with the s - 1
others, and then the part before it with all s. Advancing takes ``advances(l, s)`` = r l - C(s + r, s + 1) steps, r
being the smallest number with C(s + r, s) >= l, which is the fewest possible for equal steps; with s of the order of
log l, r is so too.

How it is extended to chains whose backward reads results (b_l reads f_l and f_(l-1)) and to graphs that are no chains:

* the forward is linearized: one node a step, in the captured order. A snapshot after a step holds all values that cross it,
  as in "chen_sqrt", so that the forward can be resumed from there;
* the backward runs in the captured order. Where a value that it reads is gone, the forward is resumed from the last
  snapshot before that value. Once all that the rest of the backward reads lies before a snapshot, the snapshot is
  freed;
* what the backward has read stays until its last use, so a step is not run once more to be reversed. A unit chain of L layers
  takes ``advances(L, s)`` evaluations, f_L, the loss and L backward ones: ``advances(L, s) + L + 2``, at a peak of s + 3
  values, which is the optimum there.

s is searched for the fewest evaluations that fit the budget. Costs and sizes are not looked at, so nothing here is
optimal on other graphs. Values of nodes that may run only once, and what the caller holds, are kept.
"""

from __future__ import annotations

import dataclasses
from math import comb

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._segments import crossing_values
from lightning_remat.solvers.common._solution import Status


@register("griewank_logn")
def griewank_logn(problem: Problem, budget_bytes: int, *, deadline: float, longest: float = 30.0) -> Answer:
    """REVOLVE on the linearized forward, with as many snapshots as fit the budget.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        longest: numbers of snapshots that lead to more evaluations than this many times the nodes are not tried.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    steps = problem.boundary
    too_few = 0  # snapshots; more are assumed to cost more memory and less time
    while too_few < steps and advances(steps, too_few + 1) > longest * len(problem):
        too_few += 1
    low, high = too_few, steps + 1
    best: tuple[float, int, NodeSequence] | None = None
    smallest = -1
    while high - low > 1 and clock() < deadline:
        middle = low + 1 if best is None else min(2 * low, (low + high) // 2)
        sequence = drop_unused(problem, revolve(problem, middle))
        evaluation = problem.evaluate(sequence)
        smallest = evaluation.peak_bytes if smallest < 0 else min(smallest, evaluation.peak_bytes)
        if evaluation.peak_bytes <= budget_bytes:
            low = middle
            if best is None or evaluation.seconds < best[0]:
                best = (evaluation.seconds, middle, sequence)
        else:
            high = middle
    if best is not None:
        return Answer(best[2], Status.FEASIBLE, notes=(f"{best[1]} snapshots",))
    status = Status.TIMEOUT if clock() >= deadline else Status.INFEASIBLE
    return Answer(None, status, notes=(f"the smallest peak found is {smallest:,} bytes",) if smallest >= 0 else ())


# -- the binomial schedule ------------------------------------------------------------------------------------------------


def repetitions(steps: int, snapshots: int) -> int:
    """r: the smallest number with C(s + r, s) >= l; no step is advanced over more often."""
    r = 0
    while comb(snapshots + r, snapshots) < steps:
        r += 1
    return r


def advances(steps: int, snapshots: int) -> int:
    """The fewest steps forward in which a chain of ``steps`` is reversed: r l - C(s + r, s + 1); 0 for none or one."""
    r = repetitions(steps, snapshots)
    return r * steps - comb(snapshots + r, snapshots + 1) if r else 0


def split(steps: int, snapshots: int) -> int:
    """How far to advance from the first snapshot to take the next one; the whole way but one step where it is the last."""
    if snapshots == 1 or steps <= 2:
        return steps - 1
    r = repetitions(steps, snapshots)
    # The part before may be passed over r - 1 times with s snapshots, the part behind r times with s - 1.
    return max(1, comb(snapshots + r - 2, snapshots), steps - comb(snapshots + r - 1, r))


def revolve(problem: Problem, snapshots: int) -> NodeSequence:
    """The sequence that reverses the linearized forward with ``snapshots``, of which the start of the step is one."""
    return _Reversal(problem, snapshots).run()


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """A place in the linearized forward, and the values held from which the forward can be resumed there."""

    position: int
    """The forward node after which it was taken; -1 for the start."""
    values: frozenset[int]


class _Reversal:
    """The forward evaluated once, taking snapshots, then the backward, with the forward resumed where it must be."""

    def __init__(self, problem: Problem, snapshots: int) -> None:
        self.problem, self.snapshots = problem, snapshots
        boundary = problem.boundary
        self.crossing = crossing_values(problem)
        self.asked = [[v for v in read if 0 <= problem.producer[v] < boundary] for read in problem.reads[boundary:]]
        self.wanted = sorted({v for values in self.asked for v in values}, key=lambda v: problem.producer[v])
        once_only = [node for node in range(boundary) if not problem.recomputable[node]]
        self.kept = {*problem.forward_outputs, *[v for node in once_only for v in problem.writes[node]]}
        self.taken = [_Snapshot(-1, frozenset())]
        self.nodes: list[int] = []

    def run(self) -> NodeSequence:
        boundary, producer = self.problem.boundary, self.problem.producer
        if (frontier := self._frontier()) is not None:
            # The last step is reversed without advancing: what it reads and writes is there when the forward ends.
            last = next(values for values in self.asked if frontier in values)
            positions = {producer[v] for v in last}
            lowest = producer[frontier]
            while lowest - 1 in positions:
                lowest -= 1
            self._advance(lowest)
            self.kept.update(last)
        self.nodes = list(range(boundary))
        for target, values in enumerate(self.asked, start=boundary):
            self._supply(values)
            self.nodes.append(target)
        return NodeSequence(tuple(self.nodes), boundary)

    def _frontier(self) -> int | None:
        """The last value of the forward that the backward still asks for and that is not kept."""
        while self.wanted and self.wanted[-1] in self.kept:
            self.wanted.pop()
        return self.wanted[-1] if self.wanted else None

    def _supply(self, values: list[int]) -> None:
        """Have ``values`` present until their last use: resume the forward for what is missing, the latest first."""
        producer = self.problem.producer
        missing = sorted([v for v in values if not self._is_there(v)], key=lambda v: producer[v])
        self.kept.update(v for v in values if v not in missing)
        while missing:
            value = missing.pop()
            if value in self.kept:
                continue
            frontier = self._frontier()
            while self._is_over(frontier):
                self.taken.pop()
            target = producer[value]
            if value == frontier and self.taken[-1].position < target:
                self._advance(target)
            else:  # asked for out of order: no snapshots on the way there
                self._evaluate(max(one.position for one in self.taken if one.position < target), target)
            self.kept.update(v for v in self.problem.writes[target] if v in values)

    def _is_over(self, frontier: int | None) -> bool:
        """Whether nothing that the backward still asks for needs the last snapshot."""
        if len(self.taken) == 1:
            return False
        before, last = self.taken[-2], self.taken[-1]
        producer = self.problem.producer
        if frontier is not None and producer[frontier] > last.position:
            return False
        wanted = {v for v in last.values if producer[v] > before.position} - self.kept  # the one before has the others
        return wanted.isdisjoint(self.wanted)

    def _is_there(self, value: int) -> bool:
        return value in self.kept or any(value in one.values for one in self.taken)

    def _advance(self, target: int) -> None:
        """Evaluate from the last snapshot to ``target``, and take snapshots on the way as long as there are any left."""
        while (position := self.taken[-1].position) < target:
            left = self.snapshots - len(self.taken) + 1
            following = min(target, position + split(target + 1 - position, left))
            self._evaluate(position, following)
            if following == target:
                return
            self.taken.append(_Snapshot(following, frozenset(self.crossing[following])))

    def _evaluate(self, after: int, until: int) -> None:
        """Evaluate the forward nodes behind a snapshot, up to a position, but those whose results are there."""
        for node in range(after + 1, until + 1):
            if not all([self._is_there(v) for v in self.problem.writes[node]]):
                self.nodes.append(node)
