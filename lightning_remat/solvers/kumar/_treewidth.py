"""Rematerialization by tree decomposition: Kumar et al. 2019, "Efficient Rematerialization for Deep Networks", section 3.

The undirected graph of the nodes (an edge where one reads what the other writes) is covered by a tree of bags. A bag
that balances the tree separates the graph, so its nodes are computed one after the other, each from its predecessors in
the parts, recursively, while only the bag's nodes stay in memory (Algorithm 1). With n unit nodes of at most d inputs
and a decomposition of width k, the peak is of the order of (d + k) log n and the length of k n^(1 + log(k + 2))
(Theorem 5). Stopping the recursion where fewer than ``limit`` bags are left gives shorter schedules of higher peaks
(section 4.3); the limits are tried in powers of two, and the fastest schedule that fits wins.

What differs from the paper, beside several targets instead of one final node:

* one more node stands for the boundary: it comes after what the forward hands out, and before every backward node that
  reads a tangent or has no backward predecessor. The sequence's boundary is where it first occurs, so a single run of
  the algorithm covers forward, loss and backward. Nodes of the forward that only the backward needs may be evaluated
  for the first time after the boundary;
* random nodes, and nodes that may run only once, are first evaluated in the captured order, and in the forward if they
  are forward nodes: where the sequence would break that, the missing ones are evaluated there, each once. Later
  evaluations of a node that may run only once are dropped, so that its values stay until their last use;
* inside a part only the nodes that its targets depend on are computed, separators included. Algorithm 1 computes the whole bag;
* frees are not annotated: with the sequence fixed, they follow from last uses (section 2.1). Evaluations that nobody reads
  are dropped, and with a budget left over, repetitions are too (`keep_longer`).

Nothing here is optimal, and the decomposition itself is heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import networkx as nx

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.kumar._tree_decomposition import (
    Heuristic,
    Tree,
    decompose,
    fill_in,
    min_degree,
    separator,
    width,
)

_HEURISTICS: Mapping[str, Heuristic] = {"fill_in": fill_in, "min_degree": min_degree}


@register("treewidth")
def treewidth(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    recursion_limit: int | None = None,
    spend_budget: bool = True,
    heuristic: str = "fill_in",
    longest: float = 30.0,
) -> Answer:
    """The fastest of Algorithm 1's schedules within the budget, over the recursion limits of section 4.3.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        recursion_limit: k of TWRemat(k), section 4.3: from 1, the whole recursion, to any number above that of the
            bags, no recursion. ``None``: powers of two are tried, from about the number of bags down.
        spend_budget: whether repetitions that the budget has room to avoid are taken out. Without, the schedules are those of
            the paper, less the evaluations that nobody reads.
        heuristic: of the decomposition: ``"fill_in"`` or ``"min_degree"``.
        longest: schedules of more evaluations than this many times the nodes are refused.

    Raises:
        SolverError: for an unknown heuristic, or a recursion limit below 1.
    """
    if heuristic not in _HEURISTICS:
        raise SolverError(f"no heuristic {heuristic!r} for tree decompositions: choose one of {', '.join(_HEURISTICS)}")
    if recursion_limit is not None and recursion_limit < 1:
        raise SolverError(f"a recursion limit of {recursion_limit}: TWRemat(k) takes k from 1")
    if spend_budget and problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    graph = NodeGraph(problem)
    tree = decompose(graph.undirected(), _HEURISTICS[heuristic])
    limits = _limits(len(tree[0])) if recursion_limit is None else [recursion_limit]
    best: tuple[float, NodeSequence] | None = None
    notes = [f"tree decomposition of width {width(tree[0])}, {len(tree[0])} bags"]
    peaks: list[int] = []
    for limit in limits:
        if clock() > deadline:
            break
        order = remat(graph.predecessors, tree, graph.targets, limit, int(longest * len(problem)), deadline)
        if order is None:
            notes.append(f"TWRemat({limit}) evaluates more than {longest:g} times the nodes, or takes too long")
            break
        sequence = drop_unused(problem, graph.legal(order))
        evaluation = problem.evaluate(sequence)
        peaks.append(evaluation.peak_bytes)
        if evaluation.peak_bytes <= budget_bytes:
            if spend_budget:
                sequence = keep_longer(problem, sequence, budget_bytes, deadline)
            seconds = problem.evaluate(sequence).seconds
            if best is None or seconds < best[0]:
                best = (seconds, sequence)
    notes.append(f"{len(peaks)} recursion limits tried")
    if best is not None:
        return Answer(best[1], Status.FEASIBLE, notes=tuple(notes))
    if peaks:
        notes.append(f"smallest peak {min(peaks):,} bytes")
    return Answer(None, Status.TIMEOUT if clock() > deadline else Status.INFEASIBLE, notes=tuple(notes))


def _limits(bags: int) -> Iterator[int]:
    """Recursion limits: powers of two, from the first that is not below the number of bags down to 1."""
    limit = 1 << max(0, bags - 1).bit_length()
    while limit >= 1:
        yield limit
        limit //= 2


# -- Algorithm 1 ----------------------------------------------------------------------------------------------------------


def remat(
    predecessors: list[tuple[int, ...]],
    tree: Tree,
    targets: Iterable[int],
    limit: int = 1,
    longest: float = math.inf,
    deadline: float = math.inf,
) -> list[int] | None:
    """Algorithm 1, TWRemat(limit): a sequence that evaluates ``targets`` with few values in memory at a time.

    Args:
        predecessors: of each node; nodes are numbered in a topological order.
        tree: a decomposition of the undirected graph.
        targets: S, the nodes to be held at the end.
        limit: the recursion stops where fewer bags than this are left; at 1, as at 2, where a single one is.
        longest: give up on sequences of more evaluations than this.
        deadline: `clock` at which to give up.

    Returns:
        The sequence, or ``None`` when it would have been longer than ``longest``, or late.
    """
    run = _Recursion(predecessors, tree, limit, longest, deadline)
    try:
        run.schedule(frozenset(range(len(tree[0]))), frozenset(), frozenset(targets))
    except _GiveUp:
        return None
    return run.order


class _GiveUp(Exception):
    """The sequence is longer than was asked for, or late."""


_Split = tuple[frozenset[int], frozenset[int], list[tuple[frozenset[int], frozenset[int]]]]
"""A subtree's balancing bag X*, all nodes in memory once its nodes are, and each subtree left with its nodes."""


class _Recursion:
    """The recursion of Algorithm 1. Its depth is at most log2 of the number of bags (Lemma 3)."""

    def __init__(
        self, predecessors: list[tuple[int, ...]], tree: Tree, limit: int, longest: float, deadline: float
    ) -> None:
        self.predecessors, self.limit, self.longest, self.deadline = predecessors, limit, longest, deadline
        self.bags, self.neighbours = tree
        self.order: list[int] = []
        self.splits: dict[frozenset[int], _Split] = {}

    def schedule(self, part: frozenset[int], outside: frozenset[int], targets: frozenset[int]) -> None:
        """Extend the sequence by ``targets``, nodes of the subtree ``part``, given that ``outside`` is in memory."""
        if not targets:
            return
        needed = self._needed(targets, outside)
        if len(part) < max(2, self.limit):  # section 4.3: stop early and compute the rest in a topological order
            self._extend(sorted(needed))
            return
        if part not in self.splits:
            self.splits[part] = self._split(part, outside)
        bag, inside, parts = self.splits[part]
        for v in sorted(bag & needed):  # in topological order
            for other, members in parts:
                self.schedule(other, inside, members.intersection(self.predecessors[v]))
            self._extend([v])
        for other, members in parts:
            self.schedule(other, inside, (targets - bag) & members)

    def _split(self, part: frozenset[int], outside: frozenset[int]) -> _Split:
        """Lemma 3 on a subtree. What is outside depends on the subtree alone, so a split is computed once and kept."""
        middle = separator(self.neighbours, part)
        left = set(part) - {middle}
        inside = outside | self.bags[middle]
        parts: list[tuple[frozenset[int], frozenset[int]]] = []
        for first in self.neighbours[middle]:
            if first in left:
                left.discard(first)
                component = [first]
                for bag in component:
                    fresh = [near for near in self.neighbours[bag] if near in left]
                    left.difference_update(fresh)
                    component.extend(fresh)
                parts.append((frozenset(component), frozenset().union(*[self.bags[bag] for bag in component]) - inside))
        return self.bags[middle] - outside, inside, parts

    def _needed(self, targets: Iterable[int], outside: frozenset[int]) -> set[int]:
        """Nodes that must be evaluated for ``targets`` when ``outside`` is in memory."""
        found = set(targets)
        stack = list(found)
        while stack:
            fresh = [p for p in self.predecessors[stack.pop()] if p not in outside and p not in found]
            found.update(fresh)
            stack.extend(fresh)
        return found

    def _extend(self, nodes: list[int]) -> None:
        self.order.extend(nodes)
        if len(self.order) > self.longest or clock() > self.deadline:
            raise _GiveUp


# -- to and from the problem ----------------------------------------------------------------------------------------------


class NodeGraph:
    """The problem's nodes and one more, numbered ``boundary``, that stands for the boundary, in a topological order.

    Attributes:
        predecessors: of each node.
        targets: the nodes whose values must exist at the end, and the boundary.
    """

    def __init__(self, problem: PlainProblem) -> None:
        self.problem = problem
        self.boundary = problem.boundary
        handed_out = [problem.producer[v] for v in (*problem.forward_outputs, *problem.forward_transient)]
        self.predecessors: list[tuple[int, ...]] = []
        for node in range(len(problem)):
            if node == self.boundary:
                self.predecessors.append(tuple(dict.fromkeys(handed_out)))
            before = [self._number(p) for p in problem.predecessors[node]]
            reads_tangent = any(problem.producer[v] < 0 for v in problem.reads[node])
            if problem.is_backward[node] and (reads_tangent or not any(p > self.boundary for p in before)):
                before.append(self.boundary)
            self.predecessors.append(tuple(before))
        if self.boundary == len(problem):
            self.predecessors.append(tuple(dict.fromkeys(handed_out)))
        finals = [self._number(problem.producer[v]) for v in problem.finals if problem.producer[v] >= 0]
        self.targets = frozenset([*finals, self.boundary])

    def _number(self, node: int) -> int:
        return node + (node >= self.boundary)

    def undirected(self) -> nx.Graph[int]:
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(len(self.predecessors)))
        graph.add_edges_from((p, node) for node, before in enumerate(self.predecessors) for p in before)
        return graph

    def legal(self, order: list[int]) -> NodeSequence:
        """The problem's sequence for an order of this graph's nodes, repaired so that effects come where they must."""
        problem = self.problem
        done: set[int] = set()
        nodes: list[int] = []
        flags = (problem.random, [not flag for flag in problem.recomputable])
        fixed = [[node for node in range(len(problem)) if kind[node]] for kind in flags]
        reached = [0, 0]

        def ensure(node: int) -> None:
            """Evaluate ``node`` unless it has been, after what it reads and the fixed nodes before it."""
            stack = [node]
            while stack:
                top = stack[-1]
                if top in done:
                    stack.pop()
                    continue
                waiting = [p for p in problem.predecessors[top] if p not in done]
                waiting += [b for b in (before(kind, top) for kind in (0, 1)) if b is not None]
                if waiting:
                    stack.append(min(waiting))
                    continue
                stack.pop()
                done.add(top)
                nodes.append(top)

        def before(kind: int, node: int) -> int | None:
            """The first fixed node of a kind that must run before ``node``, one of that kind."""
            if not flags[kind][node]:
                return None
            while reached[kind] < len(fixed[kind]) and fixed[kind][reached[kind]] in done:
                reached[kind] += 1
            first = fixed[kind][reached[kind]]
            return first if first < node else None

        boundary = -1
        for number in order:
            if number == self.boundary:
                if boundary < 0:
                    for node in sorted({*fixed[0], *fixed[1]}):
                        if node < problem.boundary:
                            ensure(node)
                    boundary = len(nodes)
                continue
            node = number - (number > self.boundary)
            if node not in done:
                ensure(node)
            elif problem.recomputable[node]:
                nodes.append(node)
        for node in sorted({*fixed[0], *fixed[1]}):
            ensure(node)
        return NodeSequence(tuple(nodes), boundary)
