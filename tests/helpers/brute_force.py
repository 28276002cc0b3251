"""Exact answers for tiny problems by Dijkstra's algorithm over what is in memory: the oracles for the solvers' tests.

The searches share one rule book and none of the solvers' code: a node runs where its reads are present and everything held
beside its outputs and workspace fits the budget; a value may be dropped at any moment, at no cost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from lightning_remat.graph import Host
from lightning_remat.solvers import Problem


class Moves(Protocol):
    def __call__(self, state: Any) -> Iterator[tuple[float, Any]]: ...


def _cheapest(start: Any, moves: Moves, below: float = math.inf) -> float:
    """Cost of the cheapest way from ``start`` to a state that equals ``()``; infinity without one that costs less than
    ``below``."""
    best: dict[Hashable, float] = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if not state:
            return cost
        for extra, following in moves(state):
            if cost + extra < min(below, best.get(following, math.inf)):
                best[following] = cost + extra
                heapq.heappush(queue, (cost + extra, following))
    return math.inf


def _mask(indices: object) -> int:
    return sum(1 << i for i in set(indices))  # type: ignore[call-overload]


class _Rules:
    """Bit masks of one problem, and the memory that a node needs."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.reads = [_mask(values) for values in problem.reads]
        self.writes = [_mask(values) for values in problem.writes]
        self.outputs = _mask(problem.forward_outputs)
        self.crossing = self.outputs | _mask(problem.forward_transient)
        self.tangents = _mask(problem.tangents)
        self.finals = _mask(problem.finals)
        self.size: dict[int, int] = {0: 0}

    def required(self) -> int:
        """Nodes that something handed out depends on, and those that draw random numbers."""
        problem = self.problem
        nodes = _mask([node for node in range(len(problem)) if problem.random[node] or not problem.recomputable[node]])
        values = self.crossing | self.finals
        for node in range(len(problem) - 1, -1, -1):
            if nodes >> node & 1 or self.writes[node] & values:
                nodes |= 1 << node
                values |= self.reads[node]
        return nodes

    def bytes(self, mask: int) -> int:
        if mask not in self.size:
            low = mask & -mask
            self.size[mask] = self.problem.nbytes[low.bit_length() - 1] + self.bytes(mask ^ low)
        return self.size[mask]

    def runs(self, node: int, present: int, in_backward: bool) -> bool:
        problem = self.problem
        if self.reads[node] & ~present:
            return False
        held = problem.base_bytes + (0 if in_backward else problem.forward_extra_bytes) + self.bytes(present)
        return held + self.bytes(self.writes[node]) + problem.workspace[node] <= self.budget

    def drops(self, present: int, in_backward: bool) -> Iterator[int]:
        free = present & ~self.outputs if in_backward else present
        while free:
            low = free & -free
            yield present ^ low
            free ^= low

    def starts(self) -> bool:
        return self.problem.base_bytes + self.problem.forward_extra_bytes <= self.budget


def cheapest_of_any_order(problem: Problem, budget: int) -> float:
    """Seconds of the cheapest schedule of all: any order, any number of evaluations. Infinity where none fits."""
    rules = _Rules(problem, budget)
    once = [not problem.recomputable[node] for node in range(len(problem))]
    draws = [node for node in range(len(problem)) if problem.random[node]]
    tracked = _mask([node for node in range(len(problem)) if once[node]] + draws)
    before = _mask([n for n in range(problem.boundary) if problem.random[n]])  # all random ops run in the forward

    def moves(state: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        present, done, crossed = state
        if not crossed and not rules.crossing & ~present and not before & ~done:
            yield 0.0, (present | rules.tangents, done, 1)
        if crossed and not rules.finals & ~present and not tracked & ~done:  # which may have effects
            yield 0.0, ()
        for node in range(len(problem) if crossed else problem.boundary):
            if once[node] and done >> node & 1:
                continue
            if problem.random[node] and not done >> node & 1 and any(not done >> d & 1 for d in draws if d < node):
                continue
            if rules.runs(node, present, bool(crossed)):
                yield problem.seconds[node], (present | rules.writes[node], done | (tracked & 1 << node), crossed)
        for fewer in rules.drops(present, bool(crossed)):
            yield 0.0, (fewer, done, crossed)

    return _cheapest((0, 0, 0), moves) if rules.starts() else math.inf


def cheapest_in_stages(problem: Problem, budget: int) -> float:
    """Seconds of the cheapest schedule that Checkmate's eq. 9 can express: stage t runs any of the nodes before t, in the
    captured order and each at most once, and then node t for the first time (unless nothing depends on it). Infinity where
    none fits."""
    rules = _Rules(problem, budget)
    count, required = len(problem), rules.required()

    def moves(state: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        stage, position, present = state
        backward = stage >= problem.boundary
        if position > stage:  # the stage is over
            if stage + 1 == problem.boundary:
                if rules.crossing & ~present:
                    return
                present |= rules.tangents
            if stage + 1 == count:
                if not rules.finals & ~present:
                    yield 0.0, ()
                return
            yield 0.0, (stage + 1, 0, present)
            return
        if (position == stage or problem.recomputable[position]) and rules.runs(position, present, backward):
            yield problem.seconds[position], (stage, position + 1, present | rules.writes[position])
        if position < stage or not required >> stage & 1:
            yield 0.0, (stage, position + 1, present)
        for fewer in rules.drops(present, backward):
            yield 0.0, (stage, position, fewer)

    start = (0, 0, 0 if problem.boundary else rules.tangents)
    return _cheapest(start, moves) if rules.starts() else math.inf


def interesting_budgets(problem: Problem) -> list[int]:
    """The smallest budget with a schedule in stages, one less, and some up to the captured peak."""
    peak = problem.evaluate(problem.captured).peak_bytes
    low = next(b for b in range(1, peak + 1) if cheapest_in_stages(problem, b) < math.inf)
    return sorted({max(1, low - 1), low, low + 1, (low + peak) // 2, peak - 1, peak} - {0})


def cheapest_with_copies(
    problem: Problem, budget: int, host: Host, copyable: frozenset[int], below: float = math.inf
) -> float:
    """Seconds of the cheapest schedule of all, of which values may wait on the host too; infinity where none fits.

    A state knows in how many seconds of the ops the copies that are under way will have ended. What has ended counts as such
    at once, and values are dropped where their room is needed: neither costs anything.

    Args:
        problem: the problem.
        budget: the most that may be held at any moment.
        host: how fast copies are, and how much lies there.
        copyable: values that may be copied.
        below: schedules of more seconds are not looked for.
    """
    rules = _Rules(problem, budget)
    once = [not problem.recomputable[node] for node in range(len(problem))]
    draws = [node for node in range(len(problem)) if problem.random[node]]
    tracked = _mask([node for node in range(len(problem)) if once[node]] + draws)
    before = _mask([n for n in range(problem.boundary) if problem.random[n]])

    def after(state: Any, seconds: float) -> Any:
        """The state so many seconds later, without the copies that have ended by then."""
        present, done, crossed, there, sending, fetching = state
        there |= _mask([v for v, left in sending if left <= seconds])
        present |= _mask([v for v, left in fetching if left <= seconds])
        sending = tuple((v, left - seconds) for v, left in sending if left > seconds)
        fetching = tuple((v, left - seconds) for v, left in fetching if left > seconds)
        return present, done, crossed, there, sending, fetching

    def with_room(state: Any, nbytes: int, needed: int) -> Iterator[Any]:
        """The state with as few values dropped as it takes for so many more bytes."""
        present, done, crossed, there, sending, fetching = state
        base = problem.base_bytes + (0 if crossed else problem.forward_extra_bytes)
        held = base + rules.bytes(present | _mask([v for v, _ in fetching]))
        over = held + nbytes - budget
        fixed = needed | _mask([v for v, _ in sending]) | (rules.outputs if crossed else 0)
        free = [v for v in range(len(problem.nbytes)) if present & ~fixed & 1 << v and problem.nbytes[v]]
        for count in range(len(free) + 1):
            for chosen in itertools.combinations(free, count):
                sizes = [problem.nbytes[v] for v in chosen]
                if sum(sizes) >= over and all(sum(sizes) - one < over for one in sizes):
                    yield present & ~_mask(chosen), done, crossed, there, sending, fetching

    def moves(state: Any) -> Iterator[tuple[float, Any]]:
        present, done, crossed, there, sending, fetching = state
        idle = not sending and not fetching
        if not crossed and idle and not rules.crossing & ~present and not before & ~done:
            yield 0.0, (present | rules.tangents, done, 1, there, (), ())
        if crossed and idle and not rules.finals & ~present and not tracked & ~done:
            yield 0.0, ()
        on_the_way = _mask([v for v, _ in fetching])
        for node in range(len(problem) if crossed else problem.boundary):
            if (once[node] and done >> node & 1) or rules.writes[node] & on_the_way or rules.reads[node] & ~present:
                continue
            if problem.random[node] and not done >> node & 1 and any(not done >> d & 1 for d in draws if d < node):
                continue
            if not rules.writes[node] & ~present and not tracked & ~done & 1 << node:
                continue
            more = rules.bytes(rules.writes[node]) + problem.workspace[node]
            for held, *others in with_room(state, more, rules.reads[node]):
                ran = (held | rules.writes[node], others[0] | (tracked & 1 << node), *others[1:])
                yield problem.seconds[node], after(ran, problem.seconds[node])
        for v in copyable:
            bit = 1 << v
            under = there | bit | _mask([other for other, _ in sending])
            sends = present & bit and not there & bit and all(v != other for other, _ in sending)
            if sends and rules.bytes(under) <= host.bytes:
                end = max([left for _, left in sending], default=0.0)
                end += host.seconds(problem.nbytes[v], to_device=False)
                yield 0.0, after((present, done, crossed, there, tuple(sorted([*sending, (v, end)])), fetching), 0.0)
            if there & bit and not (present | on_the_way) & bit:
                end = max([left for _, left in fetching], default=0.0)
                end += host.seconds(problem.nbytes[v], to_device=True)
                for *others, to_device in with_room(state, problem.nbytes[v], 0):
                    yield 0.0, after((*others, tuple(sorted([*to_device, (v, end)]))), 0.0)
        for _, left in (*sending, *fetching):
            yield left, after(state, left)

    return _cheapest((0, 0, 0, 0, (), ()), moves, below) if rules.starts() else math.inf
