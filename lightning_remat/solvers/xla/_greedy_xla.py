"""The greedy of the XLA compiler: GreedyRemat, the baseline of Kumar et al. 2019, section 4, "Algorithms", (ii).

The ops are gone through in the captured order. While more is held than a limit at an op, another op that has run
already is computed again later, right before its results are next read, so that they need not be held till then: always
the op that lowers the memory held at the present one the most. What it reads must be held till then instead, and counts
against it. Where no op lowers the memory, the next one follows. Ops that are computed again are gone through like the
others.

What differs from the paper, and what it leaves open:

* a node's outputs that are in memory and not in use are given up together. What the caller holds is never given up;
* the limit is the budget, or ``limit_bytes``: the paper does not say how its limit was set. What an op that is computed
  again reads may then be held through ops that were passed already, where the limit is not checked again: the peak may
  exceed it;
* what was computed again must be read before it is given up again: otherwise two values could take turns for ever;
* of two equal gains the earlier op's goes first;
* results that may take the memory of an input have memory of their own in the method's account; the reported peak is
  exact.

Nothing here is optimal: nothing is ever taken back, and chains of ops are computed again only if each link pays for itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Iterable
from operator import attrgetter

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status


@register("greedy_xla")
def greedy_xla(problem: Problem, budget_bytes: int, *, deadline: float, limit_bytes: int | None = None) -> Answer:
    """GreedyRemat at one limit.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        limit_bytes: memory that the greedy aims at; ``None`` for the budget. A lower limit may reach a lower peak.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    limit = budget_bytes if limit_bytes is None else limit_bytes
    sequence = greedy_remat(problem, limit, deadline)
    if sequence is None:
        return Answer(None, Status.TIMEOUT)
    peak = problem.evaluate(sequence).peak_bytes
    note = f"peaks at {peak:,} bytes with a limit of {limit:,} bytes"
    if peak > budget_bytes:
        return Answer(None, Status.INFEASIBLE, notes=(note,))
    return Answer(sequence, Status.FEASIBLE, notes=(note,))


def greedy_remat(problem: PlainProblem, limit_bytes: int, deadline: float) -> NodeSequence | None:
    """GreedyRemat's sequence for a memory limit, which its peak may exceed; ``None`` past the deadline.

    Args:
        problem: the problem.
        limit_bytes: memory that the greedy aims at.
        deadline: `clock` at which to give up.
    """
    return _Greedy(problem, limit_bytes).run(deadline)


@dataclasses.dataclass(eq=False)
class _Event:
    """An evaluation of a node, or the boundary or the end (node -1), where values are needed; ``at`` orders events."""

    node: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    at: int = 0


_SPACE = 1 << 32
"""Distance of the places of two successive events, so that others can be put halfway between, again and again."""

_place = attrgetter("at")


class _Greedy:
    """The events in order, and what is in memory at the one that is gone through."""

    def __init__(self, problem: PlainProblem, limit_bytes: int) -> None:
        self.problem, self.limit = problem, limit_bytes
        held_by_caller = frozenset(problem.forward_outputs)
        self.fixed = held_by_caller | {v for v, node in enumerate(problem.producer) if node < 0}
        nodes = once(problem)
        events = [_Event(node, problem.reads[node], problem.writes[node]) for node in nodes.nodes]
        self.crossing = _Event(-1, (*problem.forward_transient, *problem.forward_outputs), tuple(problem.tangents))
        events.insert(nodes.boundary, self.crossing)
        events.append(_Event(-1, (*problem.finals, *problem.forward_outputs), ()))
        self.events = events
        self._place_anew()
        self.reads: list[list[_Event]] = [[] for _ in problem.nbytes]  # events to come that read each value, in order
        self.writes: list[list[_Event]] = [[] for _ in problem.nbytes]
        for event in events:
            self._enter(event)
        self.alive = bytearray(len(problem.nbytes))
        self.computed = bytearray(len(problem))
        self.unread: set[int] = set()  # computed again, and not read since
        self.held = problem.base_bytes + problem.forward_extra_bytes
        self.queue: list[tuple[int, int]] = []  # candidates, by the bytes gained when they were last looked at

    def run(self, deadline: float) -> NodeSequence | None:
        for event in self.events:  # the list grows behind this event
            if clock() > deadline:
                return None
            used = {*event.reads, *event.writes}
            self.unread.difference_update(event.reads)
            for v in event.writes:
                self.writes[v].remove(event)
                self._set_alive(v, True)
            if event is self.crossing:
                self.held -= self.problem.forward_extra_bytes
            workspace = 0
            if event.node >= 0:
                workspace = self.problem.workspace[event.node]
                self.unread.update(event.writes if self.computed[event.node] else ())
                self.computed[event.node] = True
            self._look(used)
            while self.held + workspace > self.limit and (best := self._best(used)) is not None:
                self._compute_again(best, event)
            for v in event.reads:
                self.reads[v].remove(event)
            for v in used:
                self._set_alive(v, self._is_needed(v))
            self._look(used)
        nodes = [event.node for event in self.events if event.node >= 0]
        boundary = self.events.index(self.crossing)
        return drop_unused(self.problem, NodeSequence(tuple(nodes), boundary))

    def _set_alive(self, value: int, alive: bool) -> None:
        if self.alive[value] != alive:
            self.held += self.problem.nbytes[value] if alive else -self.problem.nbytes[value]
            self.alive[value] = alive

    def _is_needed(self, value: int) -> bool:
        """Whether the copy of ``value`` that exists is read before it is computed again, or held by the caller."""
        reads, writes = self.reads[value], self.writes[value]
        return bool(reads) and (value in self.fixed or not writes or reads[0].at <= writes[0].at)

    def _gain(self, node: int) -> int:
        """Bytes fewer at this moment if ``node`` is computed again right before its outputs are next read."""
        given_up = self._given_up(node)
        if not given_up or not self.problem.recomputable[node]:
            return 0
        again = min([self.reads[v][0].at for v in given_up])
        nbytes = self.problem.nbytes
        longer = [v for v in self.problem.reads[node] if not self.alive[v]]
        longer = [v for v in longer if not (self.writes[v] and self.writes[v][0].at < again)]
        return sum([nbytes[v] for v in given_up]) - sum([nbytes[v] for v in longer])

    def _given_up(self, node: int) -> list[int]:
        alive = [v for v in self.problem.writes[node] if self.alive[v] and self.reads[v]]
        return [v for v in alive if v not in self.fixed and v not in self.unread]

    def _look(self, values: Iterable[int]) -> None:
        """Queue the nodes whose gains depend on ``values``, with their gains now."""
        producer, consumers = self.problem.producer, self.problem.consumers
        for node in {producer[v] for v in values if producer[v] >= 0}.union(*[consumers[v] for v in values]):
            if (gain := self._gain(node)) > 0:
                heapq.heappush(self.queue, (-gain, node))

    def _best(self, used: set[int]) -> int | None:
        """The node that gains the most bytes and has no output in use."""
        in_use: list[tuple[int, int]] = []
        best = None
        while self.queue:
            rank, node = heapq.heappop(self.queue)
            if -rank != self._gain(node):
                continue  # it was looked at again since
            in_use.append((rank, node))
            if not used.intersection(self.problem.writes[node]):
                best = node
                break
        for entry in in_use:
            heapq.heappush(self.queue, entry)
        return best

    def _compute_again(self, node: int, now: _Event) -> None:
        """Give the outputs of ``node`` up now, and compute them again right before they are next read."""
        given_up = self._given_up(node)
        before = min([self.reads[v][0] for v in given_up], key=_place)
        again = _Event(node, self.problem.reads[node], self.problem.writes[node])
        index = bisect.bisect_left(self.events, before.at, key=_place)
        again.at = (self.events[index - 1].at + before.at) // 2
        self.events.insert(index, again)
        if again.at == self.events[index - 1].at:
            self._place_anew()
        self._enter(again)
        changed = (*again.reads, *again.writes)
        for v in changed:
            if v not in now.reads and v not in now.writes:
                self._set_alive(v, self._is_needed(v))
        self._look(changed)

    def _enter(self, event: _Event) -> None:
        for v in event.reads:
            bisect.insort(self.reads[v], event, key=_place)
        for v in event.writes:
            bisect.insort(self.writes[v], event, key=_place)

    def _place_anew(self) -> None:
        for index, event in enumerate(self.events):
            event.at = index * _SPACE
