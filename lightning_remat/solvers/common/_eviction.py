"""A schedule's peak lowered moment by moment: idle values are given up, and computed again for their next use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import LONGEST
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.common._rollout import computed_again

Gap = tuple[int, int, int]
"""A value, the position of one use or of its making, and that of the next use."""

SINGLE = 60
"""How many values, the largest first, are tried one by one at one moment."""


def gaps(problem: PlainProblem, sequence: NodeSequence) -> list[Gap]:
    """Stretches of two evaluations or more in which a forward value that may run again is only held for a later use."""
    may = [
        0 <= made < problem.boundary and problem.recomputable[made] and problem.nbytes[v] > 0
        for v, made in enumerate(problem.producer)
    ]
    for v in problem.forward_outputs:
        may[v] = False
    last: dict[int, int] = {}
    found: list[Gap] = []
    for position, node in enumerate(sequence.nodes):
        for v in problem.reads[node]:
            if may[v]:
                if position > last[v] + 2:
                    found.append((v, last[v], position))
                last[v] = position
        for v in problem.writes[node]:
            last[v] = position
    return found


class Moments:
    """What a sequence holds at each of its positions.

    Attributes:
        sequence: the sequence.
        frees: its `PlainProblem.last_uses`.
        nbytes: bytes that are held while the node at each position runs.
        height: the peak of these, and how often it occurs.
    """

    def __init__(self, problem: PlainProblem, sequence: NodeSequence) -> None:
        self._problem, self.sequence = problem, sequence
        self.frees = problem.last_uses(sequence)
        self.nbytes = problem.memory(sequence, self.frees)
        peak = max(self.nbytes, default=0)
        self.height = peak, self.nbytes.count(peak)

    @cached_property
    def _held(self) -> list[tuple[int, bytes]]:
        """By position, the bytes that are held before, and whether each value is; nothing where `evict` would add something."""
        problem, sequence = self._problem, self.sequence
        found: list[tuple[int, bytes]] = []
        nbytes, held = problem.at_start_bytes, bytearray(len(problem.nbytes))
        for v in problem.tangents:
            held[v] = 1
        for position, node in enumerate(sequence.nodes):
            if position == sequence.boundary:
                nbytes += problem.tangent_bytes - problem.forward_extra_bytes
            if not all([held[v] for v in problem.reads[node]]):  # the caller holds it, and a copy of it is gone
                return []
            found.append((nbytes, bytes(held)))
            for v in problem.writes[node]:
                held[v] = 1
                nbytes += problem.nbytes[v]
            for v in self.frees[position + 1]:
                held[v] = 0
                nbytes -= problem.nbytes[v]
        return found

    def lowers_nothing(self, gap: Gap) -> bool:
        """Whether it is certain that giving up one value (`evict`) gives no peak up to this one.

        So it is where what computes it again takes more, or must not run. (Of a sequence of which `drop_unused` drops nothing:
        it drops nothing behind the gap's beginning then either.)
        """
        problem, (v, _, position) = self._problem, gap
        if not self._held:
            return False
        nbytes, flags = self._held[position]
        node = self.sequence.nodes[position]
        held = bytearray(flags)
        held[v] = 0
        again = computed_again(problem, held, node)
        if again is None or len(self.sequence.nodes) + len(again) > LONGEST * len(problem):
            return True
        made = [w for one in again for w in problem.writes[one]]
        if len(set(made)) < len(made) or any([flags[w] for w in made if w != v]):
            return False  # copies of what is held: others go as well
        return self._most_bytes(again, node, nbytes - problem.nbytes[v]) > self.height[0]

    def _most_bytes(self, again: list[int], node: int, nbytes: int) -> int:
        """The most bytes, at least, while nodes run for the one behind them, with ``nbytes`` before."""
        problem, most = self._problem, 0
        last = {v: at for at, one in enumerate((*again, node)) for v in problem.reads[one]}
        made: set[int] = set()
        for at, one in enumerate(again):
            writes = problem.writes[one]
            made.update(writes)
            nbytes += sum([problem.nbytes[v] for v in writes])
            over = max([problem.nbytes[v] for v in problem.overwrites[one]], default=0) if problem.overwrites else 0
            most = max(most, nbytes + problem.workspace[one] - over)
            for v in {v for v in (*problem.reads[one], *writes) if v in made and last.get(v, -1) <= at}:
                nbytes -= problem.nbytes[v]
        return most


def evict(
    problem: PlainProblem, sequence: NodeSequence, given_up: Iterable[Gap], frees: list[list[int]] | None = None
) -> NodeSequence | None:
    """The sequence with values given up in some of its `gaps`, and computed again just in time for the next use.

    What is computed again reads what the sequence holds at that moment; what is missing there is computed again too,
    for this one use. ``None`` where a node would have to run again that may not, or the sequence would grow beyond
    `LONGEST`.

    Args:
        problem: the problem.
        sequence: the sequence.
        given_up: the gaps.
        frees: the sequence's `PlainProblem.last_uses`, where they are known.
    """
    reads, writes, longest = problem.reads, problem.writes, LONGEST * len(problem)
    frees = problem.last_uses(sequence) if frees is None else frees
    given: dict[int, list[int]] = {}
    for v, position, _ in given_up:
        given.setdefault(position, []).append(v)
    held = bytearray(len(problem.nbytes))
    for v in problem.tangents:
        held[v] = 1
    nodes: list[int] = []
    boundary = -1
    for position, node in enumerate(sequence.nodes):
        if position == sequence.boundary:
            boundary = len(nodes)
        for v in reads[node]:
            if not held[v]:
                again = computed_again(problem, held, node)
                break
        else:
            again = []
        if again is None:
            return None
        nodes += again
        nodes.append(node)
        if len(nodes) > longest:
            return None
        for one in again:  # for this node only
            for v in writes[one]:
                if v not in reads[node]:
                    held[v] = 0
        for v in writes[node]:
            held[v] = 1
        for v in frees[position + 1]:
            held[v] = 0
        for v in given.get(position, ()):
            held[v] = 0
    if boundary < 0:
        boundary = len(nodes)
    return drop_unused(problem, NodeSequence(tuple(nodes), boundary))


def lower_peak(problem: PlainProblem, sequence: NodeSequence, target_bytes: int, deadline: float) -> NodeSequence:
    """The sequence with its peak lowered step by step, to ``target_bytes`` or as far as single steps go.

    A step gives up what is idle at the first moment of the peak (`evict`): all of it, or else the largest value whose
    loss lowers the peak or makes it occur less often. It evaluates up to `SINGLE` + 1 sequences.

    Args:
        problem: the problem.
        sequence: the sequence to begin with.
        target_bytes: the peak at which to stop.
        deadline: `clock` at which to stop.
    """
    now = Moments(problem, sequence)
    pruned = drop_unused(problem, sequence).nodes == sequence.nodes
    while now.height[0] > target_bytes and clock() < deadline:
        moment = now.nbytes.index(now.height[0])
        node = now.sequence.nodes[moment]
        busy = {*problem.reads[node], *problem.writes[node]}
        idle = [gap for gap in gaps(problem, now.sequence) if gap[1] < moment < gap[2] and gap[0] not in busy]
        idle.sort(key=lambda gap: -problem.nbytes[gap[0]])
        for given_up in (idle, *([gap] for gap in idle[:SINGLE])) if idle else ():
            if pruned and len(given_up) == 1 and now.lowers_nothing(given_up[0]):
                continue
            other = evict(problem, now.sequence, given_up, now.frees)
            if other is not None and (then := Moments(problem, other)).height < now.height:
                now, pruned = then, True
                break
        else:
            break
    return now.sequence


def lower_all(
    problem: PlainProblem, sequences: Sequence[NodeSequence], budget_bytes: int, deadline: float, enough: int = 4
) -> list[NodeSequence]:
    """Those of some sequences that `lower_peak` brings within a budget, the cheapest first, at most ``enough``."""
    found: list[NodeSequence] = []
    distinct = {sequence.nodes: sequence for sequence in sequences}
    ranked = sorted(distinct.values(), key=lambda sequence: problem.evaluate(sequence).seconds)
    for index, sequence in enumerate(ranked):
        left = deadline - clock()
        if len(found) >= enough or left <= 0:
            break
        until = clock() + 2 * left / (len(ranked) - index + 1)
        lowered = lower_peak(problem, sequence, budget_bytes, until)
        if problem.evaluate(lowered).peak_bytes <= budget_bytes:
            found.append(lowered)
    return found
