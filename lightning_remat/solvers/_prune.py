"""Shorter sequences for the same work: what nobody reads is dropped, and what the budget has room for is kept.

Solvers that plan on a coarser problem, or without looking at the budget, repeat more than they must. Both passes here only
take evaluations out, so the order of what remains is theirs. Neither is optimal: `keep_longer` is greedy, the evaluation
that saves the most seconds for what it takes of the budget goes first. What that is may be told in several ways (`CHARGES`):
bytes say nothing of when they are held, and a budget is short at few moments. Which is best differs from graph to graph.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_remat.solvers._problem import NodeSequence, PlainProblem

_GONE = -(2**62)
"""Stands for the memory held at a position that has been taken out."""

_FAR = 64
"""Evaluations that are looked at to tell what one of them would save: a limit, so that long chains stay affordable."""


def drop_unused(problem: PlainProblem, sequence: NodeSequence) -> NodeSequence:
    """The sequence without the evaluations whose outputs nobody reads before they are computed again.

    First evaluations of random nodes, and those of nodes that may run once only, stay: they may have effects.
    """
    outputs = frozenset(problem.forward_outputs)
    first: dict[int, int] = {}
    for position, node in enumerate(sequence.nodes):
        first.setdefault(node, position)
    needed = set(problem.finals)
    kept: list[int] = []
    boundary = 0
    for position in range(len(sequence.nodes) - 1, -1, -1):
        if position == sequence.boundary - 1:
            boundary = len(kept)  # counted from the end so far
            needed |= {*problem.forward_outputs, *problem.forward_transient}
        node = sequence.nodes[position]
        held = outputs if position >= sequence.boundary else frozenset[int]()
        effect = first[node] == position and (problem.random[node] or not problem.recomputable[node])
        if effect or any([v in needed and v not in held for v in problem.writes[node]]):
            kept.append(node)
            needed.difference_update(problem.writes[node])
            needed.update(problem.reads[node])
    if sequence.boundary == 0:
        boundary = len(kept)
    return NodeSequence(tuple(reversed(kept)), len(kept) - boundary)


def once(problem: PlainProblem) -> NodeSequence:
    """No rematerialization: the captured order without the nodes that nothing depends on."""
    return drop_unused(problem, problem.captured)


def required(problem: PlainProblem) -> list[int]:
    """Nodes that every schedule evaluates, in order: something the step hands out, or an effect, depends on each."""
    return list(once(problem).nodes)


Charge = Callable[[int, npt.NDArray[np.int64], int], float]
"""What holding some bytes longer takes: the bytes, what is held without them at each moment meanwhile, the budget."""


def _tight_moments(extra: int, held: npt.NDArray[np.int64], budget_bytes: int) -> float:
    return extra * float(((held[held != _GONE] / budget_bytes) ** 8).sum())


CHARGES: dict[str, Charge | None] = {
    "bytes": None,
    "slack": lambda extra, held, budget_bytes: extra / max(1, budget_bytes - int(held.max())),
    "root_slack": lambda extra, held, budget_bytes: extra / math.sqrt(max(1, budget_bytes - int(held.max()))),
    "tight_moments": _tight_moments,
}
"""The ways of telling: bytes, bytes over what is free at the tightest moment or its root, bytes for each tight moment."""


def keep_longer(
    problem: PlainProblem,
    sequence: NodeSequence,
    budget_bytes: int,
    deadline: float,
    charge: str = "bytes",
    bias: Callable[[], float] | None = None,
) -> NodeSequence:
    """The sequence without the repeated evaluations that the budget has room to avoid.

    Args:
        problem: the problem.
        sequence: a sequence within the budget.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop; the sequence is valid and within the budget at any moment.
        charge: which of `CHARGES` says what an evaluation's results take of the budget.
        bias: a factor for the price of each evaluation, such as a random one; the order is then by the prices at the start.
    """
    lives = _Lives(problem, sequence)
    own = CHARGES[charge]
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        queue = [
            (lives.price(node, i, own, budget_bytes) * (bias() if bias else 1.0), i, node)
            for node, at in enumerate(lives.runs)
            for i in at[1:]
        ]
        heapq.heapify(queue)
        while queue and time.monotonic() < deadline:
            _, position, node = heapq.heappop(queue)
            if lives.is_gone(position):
                continue
            price = lives.price(node, position, own, budget_bytes) if bias is None else -math.inf
            if queue and price > queue[0][0] * (1 + 1e-9):
                heapq.heappush(queue, (price, position, node))
            else:
                changed |= lives.take_out(node, position, budget_bytes)
    return drop_unused(problem, lives.sequence())


class _Lives:
    """When each value is computed and used in one sequence, and the memory held at each position."""

    def __init__(self, problem: PlainProblem, sequence: NodeSequence) -> None:
        self.problem, self.boundary = problem, sequence.boundary
        self.nodes = list(sequence.nodes)
        self.end = len(self.nodes)
        self.memory: npt.NDArray[np.int64] = np.array(problem.memory(sequence), dtype=np.int64)
        self.taken = problem.taken(sequence, problem.last_uses(sequence))
        self.runs: list[list[int]] = [[] for _ in problem.reads]
        self.uses: list[list[int]] = [[] for _ in problem.nbytes]
        self.outputs = frozenset(problem.forward_outputs)
        self.finals = frozenset(problem.finals)
        for position, node in enumerate(self.nodes):
            if position == self.boundary - 1:
                for v in problem.forward_transient:
                    self.uses[v].append(position)
            self.runs[node].append(position)
            for v in problem.reads[node]:
                if not (self.uses[v] and self.uses[v][-1] == position):
                    self.uses[v].append(position)

    def sequence(self) -> NodeSequence:
        left = [position for position in range(self.end) if self.memory[position] != _GONE]
        return NodeSequence(tuple(self.nodes[p] for p in left), sum(p < self.boundary for p in left))

    def last_use(self, value: int, made: int, remade: int) -> int:
        """Last position at which the copy made at ``made`` and replaced at ``remade`` is held."""
        if value in self.outputs and remade >= self.boundary:
            return made if made >= self.boundary else self.end  # a surplus copy, or the caller's
        if remade == self.end and value in self.finals:
            return self.end
        uses = self.uses[value]
        at = bisect_left(uses, remade) - 1
        return max(made, uses[at]) if at >= 0 else made

    def around(self, node: int, position: int) -> tuple[int, int]:
        """Evaluations of ``node`` before and after the one at ``position`` (the sequence's end if there is none)."""
        runs = self.runs[node]
        at = bisect_left(runs, position)
        return runs[at - 1], runs[at + 1] if at + 1 < len(runs) else self.end

    def gaps(self, node: int, position: int) -> list[tuple[int, int]]:
        """Values that must be held longer if the evaluation at ``position`` is taken out, each with its last use before."""
        before, after = self.around(node, position)
        at_crossing = self.problem.forward_transient if position == self.boundary - 1 else ()
        return [
            (v, self.last_use(v, before, position))
            for v in self.problem.writes[node]
            if v in at_crossing or self.last_use(v, position, after) > position
        ]

    def price(self, node: int, position: int, charge: Charge | None = None, budget_bytes: int = 0) -> float:
        """What is taken of the budget (bytes, or by ``charge``) for each second saved if the evaluation is taken out."""
        gaps = self.gaps(node, position)
        extra = 1 + sum([self.problem.nbytes[v] for v, last in gaps if last < position - 1])
        taken = float(extra)
        if charge is not None and extra > 1:
            taken = charge(extra, self.memory[min([last for _, last in gaps]) + 1 : position], budget_bytes)
        return taken / max(self._saved(node, position), 1e-12)

    def _saved(self, node: int, position: int) -> float:
        """Seconds of an evaluation and of the repeated ones that serve nothing else (`_FAR` of them at most)."""
        problem = self.problem
        counted, stack, total = {position}, [(node, position)], 0.0
        while stack:
            reader, at = stack.pop()
            total += problem.seconds[reader]
            for v in problem.reads[reader]:
                producer, made = problem.producer[v], self._made(v, at)
                if made is None or made in counted or len(counted) >= _FAR:
                    continue
                _, after = self.around(producer, made)
                if all(self._only_use(w, made, after, at) for w in problem.writes[producer]):
                    counted.add(made)
                    stack.append((producer, made))
        return total

    def _made(self, value: int, position: int) -> int | None:
        """Where the copy of ``value`` that is read at ``position`` was made, if that was not a first evaluation."""
        producer = self.problem.producer[value]
        if producer < 0:
            return None
        runs = self.runs[producer]
        at = bisect_left(runs, position) - 1
        return runs[at] if at > 0 else None

    def _only_use(self, value: int, made: int, remade: int, position: int) -> bool:
        """Whether the copy of ``value`` made at ``made`` is used at ``position`` or nowhere."""
        uses = self.uses[value]
        at = bisect_left(uses, made)
        if at < len(uses) and uses[at] == position:
            at += 1
        until = self.last_use(value, made, remade)
        return until in (made, position) and (at == len(uses) or uses[at] >= remade)

    def is_gone(self, position: int) -> bool:
        """Whether the evaluation at ``position`` has been taken out."""
        return bool(self.memory[position] == _GONE)

    def take_out(self, node: int, position: int, budget_bytes: int) -> bool:
        """Take the evaluation of ``node`` at ``position`` out if its earlier outputs can be held in the budget instead.

        Repeated evaluations that only served this one go with it.
        """
        problem = self.problem
        gaps = self.gaps(node, position)
        low = min([last + 1 for _, last in gaps], default=position)
        longer = self.memory[low:position].copy()
        for v, last in gaps:
            longer[last + 1 - low :] += problem.nbytes[v]
        longer[self.memory[low:position] == _GONE] = _GONE
        if longer.size and int(longer.max()) > budget_bytes:
            return False
        own = self._no_longer_taken(node, position, gaps)
        for at in own:
            held = int(longer[at - low]) if low <= at < position else int(self.memory[at])
            if held + problem.nbytes[self.taken[at]] > budget_bytes:
                return False
        self.memory[low:position] = longer
        for at in own:
            self.memory[at] += problem.nbytes[self.taken.pop(at)]
        unread = [(node, position)]
        while unread:
            reader, at = unread.pop()
            if self.is_gone(at) and at != position:
                continue
            self.memory[at] = _GONE
            sources = [(problem.producer[v], self._made(v, at)) for v in problem.reads[reader]]
            self.runs[reader].remove(at)
            for v in problem.reads[reader]:
                self._forget_use(v, at)
            unread += [(p, made) for p, made in sources if made is not None and not self._is_read(p, made)]
        return True

    def _no_longer_taken(self, node: int, position: int, gaps: list[tuple[int, int]]) -> list[int]:
        """Where results need memory of their own once the evaluation at ``position`` is taken out.

        A value that is held longer is not taken where it used to die; one that comes from the forward then, not at all.
        """
        before, after = self.around(node, position)
        found = [last for v, last in gaps if self.taken.get(last) == v and not self.is_gone(last)]
        if before < self.boundary <= position:
            for v in self.problem.writes[node]:
                last = self.last_use(v, position, after)
                if self.taken.get(last) == v and not self.is_gone(last):
                    found.append(last)
        return found

    def _is_read(self, node: int, position: int) -> bool:
        """Whether the evaluation at ``position`` must stay (one that is gone need not)."""
        return not self.is_gone(position) and bool(self.gaps(node, position))

    def _forget_use(self, value: int, position: int) -> None:
        """``value`` is no longer read at ``position``: hold it less long if that was its last use."""
        producer = self.problem.producer[value]
        if producer < 0:
            made, remade = self.boundary - 1, self.end
        else:
            runs = self.runs[producer]
            at = bisect_left(runs, position)
            made, remade = runs[at - 1], runs[at] if at < len(runs) else self.end
        before = self.last_use(value, made, remade)
        uses = self.uses[value]
        at = bisect_left(uses, position)
        if position == self.boundary - 1 and value in self.problem.forward_transient:
            return
        del uses[at]
        after = self.last_use(value, made, remade)
        shorter = self.memory[after + 1 : before + 1]
        shorter[shorter != _GONE] -= self.problem.nbytes[value]
