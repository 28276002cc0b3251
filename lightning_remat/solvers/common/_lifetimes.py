"""A schedule under local changes: the liveness intervals of its values, and the memory held, kept up to date.

Evaluations have keys: numbers that give their order, and stay the same while other evaluations come and go. So a change
of the intervals costs as much as it touches, not as much as the schedule is long. All changes since `Lives.mark` can be
undone.
"""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem

Span = tuple[int, float, float]
"""A value, the key of its evaluation or of one of its uses, and that of the next use: the interval between."""

Charge = Callable[[int, npt.NDArray[np.int64], int], float]
"""The price of holding bytes longer, from the bytes, the memory held beside them at each moment, and the budget."""

LONGEST = 6
"""Schedules of more evaluations than this many times the nodes are not considered."""

_CLOSE = 1e-6
"""Difference of two keys below which no further key is put between them."""

_FAR = 64
"""The most evaluations looked at to tell what dropping one of them would save: a limit for long chains."""


class Lives:
    """The evaluations of a sequence with the memory held while each runs, under additions and removals of evaluations.

    It is one class because each change of an evaluation changes all of its lists, and each question reads several.

    Attributes:
        keys, nodes, memory: of the evaluations, in order; memory in bytes.
        crossing: the key of the boundary, which lies between two evaluations.
        runs: keys of the evaluations of each node.
        uses: keys at which each value is used; ``crossing`` is one for what must exist at the boundary.
        taken: the value whose memory a result takes, by key (see `PlainProblem.taken`).
        repeated: nodes that run more than once.
        added: nodes and keys of what the last `evict` computes again.
        freed: the first and the last key between which memory was given back since `fill` last looked for room.
    """

    def __init__(self, problem: PlainProblem, sequence: NodeSequence) -> None:
        self.problem = problem
        self.crossing = sequence.boundary - 0.5
        self.keys: list[float] = [float(position) for position in range(len(sequence.nodes))]
        self.nodes = list(sequence.nodes)
        self.runs: list[list[float]] = [[] for _ in problem.reads]
        self.uses: list[list[float]] = [[] for _ in problem.nbytes]
        self.outputs = frozenset(problem.forward_outputs)
        self.finals = frozenset(problem.finals)
        frees = problem.last_uses(sequence)
        taken = problem.taken(sequence, frees)
        self.taken: dict[float, int] = {float(position): v for position, v in taken.items()}
        self.memory: npt.NDArray[np.int64] = np.array(problem.memory(sequence, frees, taken), dtype=np.int64)
        for key, node in zip(self.keys, self.nodes, strict=True):
            self.runs[node].append(key)
            for v in problem.reads[node]:
                self.uses[v].append(key)
        for v in (*problem.forward_outputs, *problem.forward_transient):
            self.uses[v].insert(bisect_left(self.uses[v], self.crossing), self.crossing)
        self.repeated = {node for node, at in enumerate(self.runs) if len(at) > 1}
        self._once_only = problem.once_only
        # By node and key: the moment at which dropping an evaluation did not fit when last tried, and the bytes needed.
        self._blocked: dict[int, dict[float, tuple[float, int]]] = {}
        self.mark()
        self.freed = (-math.inf, math.inf)

    def sequence(self) -> NodeSequence:
        """The evaluations as they are now."""
        return NodeSequence(tuple(self.nodes), bisect_left(self.keys, self.crossing))

    @property
    def seconds(self) -> float:
        """Time of all evaluations."""
        return sum([self.problem.seconds[node] for node in self.nodes])

    def peak(self) -> int:
        """The most memory that is held."""
        return int(self.memory.max(initial=0))

    # -- taking back --------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember the state that `undo` goes back to."""
        self.added: list[tuple[int, float]] = []
        self.freed = (math.inf, -math.inf)
        self._before = (self.keys.copy(), self.nodes.copy(), self.memory.copy(), self.taken.copy())
        self._old_runs: dict[int, list[float]] = {}
        self._old_uses: dict[int, list[float]] = {}

    def undo(self) -> None:
        """Take all changes since the last `mark` back."""
        self.keys, self.nodes, self.memory, self.taken = self._before
        for v, uses in self._old_uses.items():
            self.uses[v] = uses
            self._unblock(self.problem.producer[v])
        for node, runs in self._old_runs.items():
            self._unblock(node)
            self.runs[node] = runs
            self._note(node)
        self.mark()

    def _unblock(self, node: int) -> None:
        """Forget where evaluations of the node could not be dropped: what would be missing without them has changed."""
        self._blocked.pop(node, None)

    def _runs(self, node: int) -> list[float]:
        """The runs of a node, about to be changed: a copy is kept for `undo`."""
        self._unblock(node)
        if node not in self._old_runs:
            self._old_runs[node] = self.runs[node].copy()
        return self.runs[node]

    def _uses(self, value: int) -> list[float]:
        """The uses of a value, about to be changed: a copy is kept for `undo`."""
        self._unblock(self.problem.producer[value])
        if value not in self._old_uses:
            self._old_uses[value] = self.uses[value].copy()
        return self.uses[value]

    def _note(self, node: int) -> None:
        (self.repeated.add if len(self.runs[node]) > 1 else self.repeated.discard)(node)

    # -- lives of values ----------------------------------------------------------------------------------------------

    def copy_at(self, value: int, key: float) -> tuple[float, float]:
        """Keys at which the copy of a value that is read at ``key`` was made, and at which the next copy is made."""
        producer = self.problem.producer[value]
        if producer < 0:
            return self.crossing, math.inf
        runs = self.runs[producer]
        at = bisect_left(runs, key)
        return runs[at - 1] if at else -math.inf, runs[at] if at < len(runs) else math.inf

    def last_use(self, value: int, made: float, remade: float) -> float:
        """The key up to which the copy made at ``made`` and replaced at ``remade`` is held; infinity: to the end."""
        if value in self.outputs and remade > self.crossing:
            return made if made > self.crossing else math.inf  # a surplus copy, or the caller's
        if remade == math.inf and value in self.finals:
            return math.inf
        uses = self.uses[value]
        at = bisect_left(uses, remade) - 1
        return uses[at] if at >= 0 and uses[at] > made else made

    def around(self, node: int, key: float) -> tuple[float, float]:
        """Keys of the evaluations of ``node`` before and after the one at ``key``; minus and plus infinity for none."""
        runs = self.runs[node]
        at = bisect_left(runs, key)
        return runs[at - 1] if at else -math.inf, runs[at + 1] if at + 1 < len(runs) else math.inf

    def missing(self, node: int, key: float) -> list[tuple[int, float]]:
        """Values that must be held longer if the evaluation at ``key`` is dropped, each with its last use before."""
        before, after = self.around(node, key)
        return [
            (v, self.last_use(v, before, key)) for v in self.problem.writes[node] if self.last_use(v, key, after) > key
        ]

    def is_read(self, node: int, key: float) -> bool:
        """Whether the evaluation at ``key`` must stay: it is read, or the first of a node that may have an effect."""
        before, after = self.around(node, key)
        if before == -math.inf and self._once_only[node]:
            return True
        return any([self.last_use(v, key, after) > key for v in self.problem.writes[node]])

    def saved(self, node: int, key: float) -> float:
        """Seconds of an evaluation and of the repeated ones that serve nothing else (`_FAR` evaluations at most)."""
        problem = self.problem
        counted, stack, total = {key}, [(node, key)], 0.0
        while stack:
            reader, at = stack.pop()
            total += problem.seconds[reader]
            for producer in problem.predecessors[reader]:
                if producer not in self.repeated:
                    continue
                runs = self.runs[producer]
                index = bisect_left(runs, at) - 1
                if index <= 0 or runs[index] in counted or len(counted) >= _FAR:
                    continue
                made, after = runs[index], runs[index + 1] if index + 1 < len(runs) else math.inf
                if all([self._only_use(w, made, after, at) for w in problem.writes[producer]]):
                    counted.add(made)
                    stack.append((producer, made))
        return total

    def _only_use(self, value: int, made: float, remade: float, key: float) -> bool:
        """Whether the copy of ``value`` made at ``made`` is used at ``key`` or nowhere."""
        until = self.last_use(value, made, remade)
        if until == made:
            return True
        uses = self.uses[value]
        return until == key and uses[bisect_right(uses, made)] == key

    # -- changes ------------------------------------------------------------------------------------------------------

    def _hold(self, after: float, until: float, nbytes: int) -> None:
        """Count bytes at the evaluations behind ``after``, up to ``until``."""
        if until > after:
            self.memory[bisect_right(self.keys, after) : bisect_right(self.keys, until)] += nbytes
            if nbytes < 0:
                self._free(after, until)

    def _free(self, begin: float, end: float) -> None:
        """Note that there may be new room between these keys."""
        self.freed = (min(self.freed[0], begin), max(self.freed[1], end))

    def _take(self, keys: Iterable[float]) -> None:
        """Determine anew whose memory the results at these keys take (see `PlainProblem.taken`)."""
        problem = self.problem
        if not problem.overwrites:
            return
        for key in keys:
            at = bisect_left(self.keys, key)
            if at == len(self.keys) or self.keys[at] != key:
                continue
            found = -1
            for v in problem.overwrites[self.nodes[at]]:
                made, remade = self.copy_at(v, key)
                since = self.crossing if key > self.crossing else -1.0
                if made >= since and problem.producer[v] >= 0 and self.last_use(v, made, remade) == key:
                    found = v
                    break
            before = self.taken.pop(key, -1)
            self.memory[at] += (problem.nbytes[before] if before >= 0 else 0) - (
                problem.nbytes[found] if found >= 0 else 0
            )
            if found >= 0:
                self.taken[key] = found
                self._free(key, key)

    def _add(self, node: int, key: float) -> None:
        """Evaluate a node once more, at a key where its inputs are held."""
        problem, nbytes = self.problem, self.problem.nbytes
        at = bisect_left(self.keys, key)
        beside = self.nodes[at]
        held = int(self.memory[at]) - problem.workspace[beside] - sum([nbytes[v] for v in problem.writes[beside]])
        taken = self.taken.get(self.keys[at], -1)
        held += problem.workspace[node] + (nbytes[taken] if taken >= 0 else 0)
        before, after = self.copy_at(problem.writes[node][0], key)
        ends = [key]
        self.keys.insert(at, key)
        self.nodes.insert(at, node)
        self.memory = np.concatenate((self.memory[:at], [held], self.memory[at:]))
        old = [self.last_use(v, before, after) for v in problem.writes[node]]
        runs = self._runs(node)
        runs.insert(bisect_left(runs, key), key)
        self._note(node)
        for v in problem.reads[node]:
            made, remade = self.copy_at(v, key)
            was = self.last_use(v, made, remade)
            uses = self._uses(v)
            uses.insert(bisect_left(uses, key), key)
            self._hold(was, self.last_use(v, made, remade), nbytes[v])
            ends.append(was)
        for v, was in zip(problem.writes[node], old, strict=True):
            end = self.last_use(v, before, key)
            self._hold(end, was, -nbytes[v])
            self.memory[at] += nbytes[v]
            self._hold(key, self.last_use(v, key, after), nbytes[v])
            ends += (end, was)
        self._take(ends)

    def drop(self, node: int, key: float) -> None:
        """Drop the evaluation at ``key``, and those that only served it."""
        problem, nbytes = self.problem, self.problem.nbytes
        ends: set[float] = set()
        unread = [(node, key)]
        while unread:
            node, key = unread.pop()
            if key not in self.runs[node]:
                continue  # two readers let it go
            before, after = self.around(node, key)
            old = [(self.last_use(v, before, key), self.last_use(v, key, after)) for v in problem.writes[node]]
            self._runs(node).remove(key)
            self._note(node)
            for v, (was, end) in zip(problem.writes[node], old, strict=True):
                until = self.last_use(v, before, after) if before > -math.inf else -math.inf
                self._hold(was, until, nbytes[v])
                self._hold(key, end, -nbytes[v])
                ends.update((was, until, end))
            at = bisect_left(self.keys, key)
            del self.keys[at], self.nodes[at]
            self.memory = np.concatenate((self.memory[:at], self.memory[at + 1 :]))
            self._free(key, key)
            self.taken.pop(key, None)
            for v in problem.reads[node]:
                made, remade = self.copy_at(v, key)
                was = self.last_use(v, made, remade)
                self._uses(v).remove(key)
                now = self.last_use(v, made, remade)
                self._hold(now, was, -nbytes[v])
                ends.update((was, now))
            for producer in problem.predecessors[node]:
                made = self.around(producer, key)[0]
                if made > -math.inf and not self.is_read(producer, made):
                    unread.append((producer, made))
        self._take(ends)

    def evict(self, spans: Iterable[Span], share: float = 0.0) -> bool:
        """Give values up in some spans and compute them again just in time for the use at the end of each.

        What is computed again reads what is held at that moment; what is missing there is computed again too. It serves
        this one use, and those that follow within a difference of keys of ``share``. The memory may be above a budget
        afterwards.

        Returns:
            ``False`` where a node would have to run again that may not, or too many would: the caller must `undo` then.
        """
        given: dict[int, list[tuple[float, float]]] = {}
        readers: dict[float, list[int]] = {}
        for v, begin, end in spans:
            given.setdefault(v, []).append((begin, end))
            readers.setdefault(end, []).append(v)
        added = self.added = []
        for end in sorted(readers):
            fresh = {key for _, key in added if end - key <= share} if share else set()
            chain = self._chain(readers[end], end, given, fresh)
            at = bisect_left(self.keys, end)
            since = self.keys[at - 1] if at else end - 1.0
            if end > self.crossing:
                since = max(since, self.crossing)
            if chain is None or len(self.keys) + len(chain) > LONGEST * len(self.problem):
                return False
            step = (end - since) / (len(chain) + 1)
            if step < _CLOSE:
                return False
            for index, node in enumerate(chain, 1):
                added.append((node, since + index * step))
                self._add(*added[-1])
        for node, key in added:
            before = self.around(node, key)[0]
            if before > -math.inf and not self.is_read(node, before):
                self.drop(node, before)
        return True

    def seconds_again(self, span: Span) -> float:
        """Seconds of what `evict` would compute again for one span; infinity where it cannot."""
        value, begin, end = span
        chain = self._chain([value], end, {value: [(begin, end)]}, set())
        return math.inf if chain is None else sum([self.problem.seconds[node] for node in chain])

    def _chain(
        self, values: list[int], key: float, given: dict[int, list[tuple[float, float]]], fresh: set[float]
    ) -> list[int] | None:
        """Nodes to evaluate, in order, just before ``key`` for values to be there; ``None`` if one may not run again.

        Args:
            values: what must be there.
            key: of their use.
            given: intervals in which values are given up.
            fresh: keys of evaluations that were added before, whose results are still held.
        """
        problem, producer = self.problem, self.problem.producer
        here: set[int] = set()

        def is_held(v: int) -> bool:
            if v in here or producer[v] < 0:
                return True
            made, remade = self.copy_at(v, key)
            given_up = any([begin < key <= end for begin, end in given.get(v, ())])
            return made in fresh or (not given_up and self.last_use(v, made, remade) >= key)

        chain: list[int] = []
        stack = [producer[v] for v in values if not is_held(v)]
        while stack:
            node = stack[-1]
            if not problem.recomputable[node] or len(stack) > len(problem):
                return None
            absent = [producer[v] for v in problem.reads[node] if not is_held(v)]
            if absent:
                stack.extend(absent)
                continue
            stack.pop()
            if not here.issuperset(problem.writes[node]):
                chain.append(node)
                here.update(problem.writes[node])
        return chain

    # -- what could be changed ----------------------------------------------------------------------------------------

    @functools.cached_property
    def movable(self) -> list[int]:
        """Values that may be given up and computed again, in the order of their producers.

        Values of the backward are among them: where one is not used before, it is computed later instead, at no cost.
        """
        problem = self.problem
        found = [
            (made, v)
            for v, made in enumerate(problem.producer)
            if made >= 0 and problem.recomputable[made] and problem.nbytes[v] > 0
        ]
        return [v for _, v in sorted(found) if v not in self.outputs]

    def span_at(self, value: int, key: float) -> Span | None:
        """The interval around ``key`` in which a value is only held for a later use; ``None`` if it is too short."""
        made, remade = self.copy_at(value, key)
        uses = self.uses[value]
        at = bisect_left(uses, key)
        if made == -math.inf or at == len(uses) or uses[at] > remade or uses[at] == self.crossing:
            return None
        begin = max(made, uses[at - 1]) if at else made
        if bisect_left(self.keys, uses[at]) - bisect_right(self.keys, begin) < 2:
            return None
        return value, begin, uses[at]

    def spans(self, value: int) -> list[Span]:
        """All intervals in which a value is held for a later use only."""
        return [span for key in self.uses[value] if (span := self.span_at(value, key))]

    # -- filling up ---------------------------------------------------------------------------------------------------

    def fits(self, node: int, key: float, budget_bytes: int, until: float = math.inf) -> bool:
        """Whether the evaluation at ``key`` can be dropped, the copies before it being held longer, within a budget.

        ``False`` without a closer look where these end after ``until``: no memory was given back there.
        """
        nbytes, keys = self.problem.nbytes, self.keys
        blocked = self._blocked.setdefault(node, {})
        if key in blocked:
            where, more = blocked[key]
            at = bisect_left(keys, where)
            if at < len(keys) and keys[at] == where and self.memory[at] + more > budget_bytes:
                return False
        missing = self.missing(node, key)
        if not missing:
            return True
        if min([last for _, last in missing]) > until:
            return False
        ends = [bisect_right(keys, last) for _, last in missing]
        low, at = min(ends), bisect_left(keys, key)
        if low < at:
            held = self.memory[low:at]
            extra = nbytes[missing[0][0]]
            if len(missing) > 1:
                held, extra = held.copy(), 0
                for (v, _), begin in zip(missing, ends, strict=True):
                    held[begin - low :] += nbytes[v]
            tight = int(held.argmax())
            if held[tight] + extra > budget_bytes:
                blocked[key] = (keys[low + tight], int(held[tight] - self.memory[low + tight]) + extra)
                return False
        else:
            held, extra = self.memory[:0], 0
        for last, v in self._no_longer_taken(node, key, missing):
            end = bisect_left(keys, last)
            now = int(held[end - low]) + extra if low <= end < at else int(self.memory[end])
            if now + nbytes[v] > budget_bytes:
                return False
        return True

    def _no_longer_taken(self, node: int, key: float, missing: list[tuple[int, float]]) -> list[tuple[float, int]]:
        """Keys at which results need memory of their own once the evaluation at ``key`` is dropped, and the values.

        A value that is held longer cannot be overwritten where it used to die, and in the backward a copy that was made
        in the forward cannot be overwritten at all.
        """
        if not self.taken:
            return []
        found = [(last, v) for v, last in missing if self.taken.get(last) == v]
        before, after = self.around(node, key)
        if before < self.crossing < key:
            for v in self.problem.writes[node]:
                last = self.last_use(v, key, after)
                if self.taken.get(last) == v:
                    found.append((last, v))
        return found

    def price(self, node: int, key: float, charge: Charge | None = None, budget_bytes: int = 0) -> float:
        """What dropping the evaluation at ``key`` takes of the budget (bytes, or as ``charge`` says) a second saved."""
        missing = self.missing(node, key)
        at = bisect_left(self.keys, key)
        begins = [(v, bisect_right(self.keys, last)) for v, last in missing]
        extra = 1 + sum([self.problem.nbytes[v] for v, begin in begins if begin < at])
        taken = float(extra)
        if charge is not None and extra > 1:
            taken = charge(extra, self.memory[min([begin for _, begin in begins]) : at], budget_bytes)
        return taken / max(self.saved(node, key), 1e-12)

    def fill(
        self,
        budget_bytes: int,
        deadline: float,
        charge: Charge | None = None,
        bias: Callable[[float], float] | None = None,
    ) -> None:
        """Drop repeated evaluations while the budget has room to hold their results longer (see `_prune.keep_longer`).

        Only where memory was given back since the last look (or `mark`, or the beginning) can there be new room.

        Args:
            budget_bytes: the most that may be held at any moment.
            deadline: `clock` at which to stop.
            charge: the price of held bytes; ``None`` for the bytes themselves.
            bias: a factor for the price of an evaluation, by its key; prices are then not updated on the way.
        """
        changed = True
        while changed and clock() < deadline:
            changed = False
            since, until = self.freed
            self.freed = (math.inf, -math.inf)
            queue = [
                (self.price(node, key, charge, budget_bytes) * (bias(key) if bias else 1.0), key, node)
                for node in sorted(self.repeated)
                for key in self.runs[node][1:]
                if key > since and self.fits(node, key, budget_bytes, until)
            ]
            heapq.heapify(queue)
            while queue and clock() < deadline:
                _, key, node = heapq.heappop(queue)
                if key not in self.runs[node][1:]:
                    continue
                if not self.fits(node, key, budget_bytes):
                    continue
                price = self.price(node, key, charge, budget_bytes) if bias is None else -math.inf
                if queue and price > queue[0][0] * (1 + 1e-9):
                    heapq.heappush(queue, (price, key, node))
                else:
                    self.drop(node, key)
                    changed = True
