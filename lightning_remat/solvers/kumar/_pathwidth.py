"""Rematerialization by path decomposition: Kumar et al. 2019, section 5 and appendix A.

With bags in a row instead of a tree, and a directed path through all nodes (a **spine**), the last node of a bag rises
along the row up to the bag of the final node and falls behind it (Lemma 10). Splitting the row there leaves parts whose
bags are smaller by a node (Lemma 11), so the recursion ends after as many levels as a bag has nodes. Where the graph
has no spine, one is added first, at the price of bags about twice as large (Algorithm 2). With unit nodes and b bags of
at most p nodes, the peak is of the order of 2^p p log^(p-2) b, and the length of 2^p (p!)^2 b log^(p-2) b (Theorem 22):
logarithms instead of powers of the size, but exponential in the width. At the widths of real networks the schedules
explode, so their lengths are predicted before any is written down (a schedule is a tree of shared parts, each with its
length), and what is too long is refused with the figure.

What differs from the paper:

* the graph is that of the treewidth method (`NodeGraph`): one node stands for the boundary, and the order is repaired
  where nodes are random or may run only once. The final node is the last of the spine: everything else comes before it;
* in Algorithm 2 a node is put into further bags only until it meets its successor on the spine, to the right or to the
  left. The text goes on to the right until r_u, also where the successor lies to the left: then the two never meet;
* in Algorithm 3 the loop "for i = 1 to k" runs over the j nodes u_i, and a node that is known is not evaluated again,
  though the text's schedules may list it (Definition 12). What is known outside of the loop stays known in it;
* evaluations that nobody reads are dropped, and with a budget left over repetitions are too (`keep_longer`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.kumar._tree_decomposition import Bags, decompose_into_path, thin, width
from lightning_remat.solvers.kumar._treewidth import NodeGraph


@register("pathwidth")
def pathwidth(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    spend_budget: bool = True,
    longest: float = 200.0,
    calls: int = 100_000,
) -> Answer:
    """Algorithm 3's schedule, on a greedy path decomposition with a spine from Algorithm 2.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        spend_budget: whether repetitions that the budget has room to avoid are taken out.
        longest: a schedule of more evaluations than this many times the nodes is refused. Most evaluations are read by
            nobody: for a ResNet of 18 layers, of 187 times the nodes 4.5 times are left when these are dropped.
        calls: calls of Algorithm 3 after which its length is taken to be out of reach.
    """
    if spend_budget and problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    graph = NodeGraph(problem)
    bags = decompose_into_path(graph.undirected())
    spine, spined = add_spine(graph.predecessors, bags)
    notes = [
        (
            f"path decomposition of width {width(bags)}, {width(spined)} with a spine, {len(spined)} bags: a bound of "
            f"{length_bound(width(spined) + 1, len(spined)):.1e} evaluations (Theorem 22)"
        )
    ]
    plan = PathRemat(graph.predecessors, spine, spined, calls, deadline)
    try:
        schedule = plan.schedule()
    except _GiveUp as reason:
        notes.append(str(reason))
        return Answer(None, Status.TIMEOUT if clock() > deadline else Status.REFUSED, notes=tuple(notes))
    times = schedule.length / len(spine)
    notes.append(f"the schedule has {schedule.length:,} evaluations, {times:.1f} times the nodes")
    if times > longest:
        return Answer(None, Status.REFUSED, notes=(*notes, f"refused: more than {longest:g} times"))
    sequence = drop_unused(problem, graph.legal([spine[place] for place in schedule.flat()]))
    peak = problem.evaluate(sequence).peak_bytes
    notes.append(f"it peaks at {peak:,} bytes")
    if peak > budget_bytes:
        return Answer(None, Status.INFEASIBLE, notes=tuple(notes))
    if spend_budget:
        sequence = keep_longer(problem, sequence, budget_bytes, deadline)
    return Answer(sequence, Status.FEASIBLE, notes=tuple(notes))


def length_bound(size: int, count: int) -> float:
    """Theorem 22: evaluations for ``count`` bags of at most ``size`` nodes, its constant taken to be 1."""
    size, log = max(size, 2), max(1.0, math.log2(max(2, count)))
    exponent = size * math.log10(2) + 2 * math.lgamma(size + 1) / math.log(10) + (size - 2) * math.log10(log)
    return math.pow(10.0, min(300.0, exponent + math.log10(max(1, count))))


def add_spine(predecessors: Sequence[Sequence[int]], bags: Bags) -> tuple[list[int], Bags]:
    """Algorithm 2: a topological order whose successive nodes share a bag, and the path decomposition made so.

    Args:
        predecessors: of each node; nodes are numbered in a topological order.
        bags: a path decomposition of the undirected graph.

    Returns:
        The spine, and the bags. A graph that has a spine keeps its bags.
    """
    if all(node - 1 in before for node, before in enumerate(predecessors) if node):
        return list(range(len(predecessors))), bags
    left, right = _intervals(bags)
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, before in enumerate(predecessors):
        for p in before:
            successors[p].append(node)
    unexplored = [len(before) for before in predecessors]
    spine: list[int] = []
    stack = sorted([v for v in left if not unexplored[v]], key=lambda v: right[v], reverse=True)
    while stack:  # ProcessNode, without its recursion: the successors that are ready, by increasing right end
        node = stack.pop()
        spine.append(node)
        for v in successors[node]:
            unexplored[v] -= 1
        ready = [v for v in successors[node] if not unexplored[v]]
        stack += sorted(ready, key=lambda v: right[v], reverse=True)
    for node, following in itertools.pairwise(spine):
        right[node] = max(right[node], left[following])
        left[node] = min(left[node], right[following])
    wider: list[set[int]] = [set() for _ in bags]
    for node in spine:
        for bag in wider[left[node] : right[node] + 1]:
            bag.add(node)
    return spine, thin(map(frozenset, wider))


def _intervals(bags: Bags) -> tuple[dict[int, int], dict[int, int]]:
    """INTERVAL(u) of each node: the first and the last bag that holds it."""
    right = {node: i for i, bag in enumerate(bags) for node in bag}
    left = {node: len(bags) - 1 - i for i, bag in enumerate(reversed(bags)) for node in bag}
    return left, right


@dataclasses.dataclass(frozen=True, eq=False)
class Sketch:
    """A schedule as a tree of parts that others may share: its length is known before it is written down."""

    parts: tuple[Sketch | int, ...] = ()
    length: int = 0

    def flat(self) -> list[int]:
        """The nodes, in order."""
        nodes: list[int] = []
        stack: list[Sketch | int] = [self]
        while stack:
            part = stack.pop()
            if isinstance(part, int):
                nodes.append(part)
            else:
                stack.extend(reversed(part.parts))
        return nodes


def _join(parts: Sequence[Sketch | int]) -> Sketch:
    """The concatenation, written as a circle in the text."""
    filled = tuple([part for part in parts if isinstance(part, int) or part.length])
    return Sketch(filled, sum([1 if isinstance(part, int) else part.length for part in filled]))


class _GiveUp(Exception):
    """Too many calls were made, or the deadline has passed; the message says which."""


Interleaved: TypeAlias = dict[int, Sketch]
"""Definition 15, after Merge: the schedule before each node of a set; a node without an entry has an empty one."""


class PathRemat:
    """Algorithm 3. Nodes are numbered along the spine from here on; a part is a range of bags up to a node."""

    def __init__(
        self,
        predecessors: Sequence[Sequence[int]],
        spine: Sequence[int],
        bags: Bags,
        calls: float = math.inf,
        deadline: float = math.inf,
    ) -> None:
        place = {node: i for i, node in enumerate(spine)}
        self.bags = [sorted(place[node] for node in bag) for bag in bags]
        self.left, self.right = _intervals(tuple(map(frozenset, self.bags)))
        self.inputs = [{place[p] for p in predecessors[node]} | {i - 1} for i, node in enumerate(spine)]
        self.inputs[0].discard(-1)
        self.limit, self.deadline, self.calls = calls, deadline, 0
        self.known: dict[tuple[range, int, frozenset[int]], Sketch] = {}

    def schedule(self) -> Sketch:
        """The schedule that computes the last node of the spine, and so every node.

        Raises:
            _GiveUp: when that takes too many calls or too long.
        """
        return self.compute(range(len(self.bags)), len(self.inputs) - 1, frozenset())

    def compute(self, part: range, u: int, known: frozenset[int]) -> Sketch:
        """PWRemat(X, u, W): a schedule that computes ``u`` in the bags of ``part``, given W and all nodes of other bags."""
        if u in known or not self._within(u, part):
            return Sketch()
        inside = frozenset([w for w in known if w < u and self._within(w, part)])
        if all([v in inside or not self._within(v, part) for v in self.inputs[u]]):
            return Sketch((u,), 1)
        key = (part, u, inside)
        if key not in self.known:
            self._count()
            self.known[key] = self._compute(part, u, inside)
        return self.known[key]

    def _compute(self, part: range, u: int, known: frozenset[int]) -> Sketch:
        if all([len(self._bag(i, u)) <= 2 for i in part]):  # a path: no rematerialization
            needed, stack = {u}, [u]
            while stack:
                fresh = [v for v in self.inputs[stack.pop()] if self._within(v, part) and v not in known | needed]
                needed.update(fresh)
                stack += fresh
            return Sketch(tuple(sorted(needed)), len(needed))
        middle = (max(self.left[u], part[0]) + min(self.right[u], part[-1])) // 2
        bag = self._bag(middle, u)
        sides = [
            self.interleaved(bag, range(middle - 1, part[0] - 1, -1), u, known),
            self.interleaved(bag, range(middle + 1, part[-1] + 1), u, known),
        ]
        parts: list[Sketch | int] = []  # Flatten
        for x in sorted(bag):
            parts += [side[x] for side in sides if x in side]
            if x not in known:
                parts.append(x)
        return _join(parts)

    def interleaved(self, bag: frozenset[int], path: range, top: int, known: frozenset[int]) -> Interleaved:
        """InterleavedSchedule(X, X, W): what to compute before each node of ``bag`` in the bags of ``path``.

        Args:
            bag: X, a bag beside the path, or some of its nodes.
            path: numbers of bags, the nearest to X first.
            top: nodes after this one have been removed.
            known: W, the nodes whose values are known.
        """
        if bag <= known or not path:
            return {}
        self._count()
        half = len(path) // 2
        inner, middle, outer = path[:half], self._bag(path[half], top), path[half + 1 :]
        upper = frozenset([x for x in bag if x < max(middle, default=-1)])  # X'
        found: dict[int, list[Sketch]] = {x: [] for x in sorted(bag | middle)}
        chain: list[Sketch | int] = []
        before = known
        for u in sorted(upper | middle):  # I_inner
            chain.append(self.compute(range(min(inner), max(inner) + 1) if inner else inner, u - 1, before))
            found[u].append(_join(chain))
            if u not in known:
                chain.append(u)
            before = before | {u}
        others = [  # I_outer and I_lower
            self.interleaved(middle, outer, top, known),
            self.interleaved(bag - upper, inner, top, known | upper | middle),
        ]
        for one in others:
            for x, schedule in one.items():
                found[x].append(schedule)
        return self._condense(bag, found, known)

    def _condense(self, bag: frozenset[int], found: dict[int, list[Sketch]], known: frozenset[int]) -> Interleaved:
        """Condense(X, I): what comes before the nodes outside X, and these nodes, go to the next node of X."""
        condensed: Interleaved = {}
        pending: list[Sketch | int] = []
        for x, schedules in found.items():
            pending += schedules
            if x in bag:
                condensed[x] = _join(pending)
                pending = []
            elif x not in known:
                pending.append(x)
        return condensed

    def _within(self, node: int, part: range) -> bool:
        return node >= 0 and bool(part) and self.left[node] <= part[-1] and self.right[node] >= part[0]

    def _bag(self, index: int, top: int) -> frozenset[int]:
        return frozenset([node for node in self.bags[index] if node <= top])

    def _count(self) -> None:
        self.calls += 1
        if self.calls > self.limit:
            raise _GiveUp(f"refused: its length is not known after {self.calls - 1:,} calls of Algorithm 3")
        if clock() > self.deadline:
            raise _GiveUp(f"its length is not known after {self.calls:,} calls of Algorithm 3")
