"""Rematerialization by tree decomposition: Kumar et al. 2019, "Efficient Rematerialization for Deep Networks", section 3.

The undirected graph of the nodes (an edge where one reads what the other writes) is covered by a tree of bags. A bag that
balances the tree separates the graph, so its nodes are computed one after the other, each from its predecessors in the parts,
recursively, while only the bag's nodes stay in memory (Algorithm 1). With treewidth k and n unit nodes the peak is of the order
of k log n and the length of n^(1 + log(k + 2)) (Theorem 5). Stopping the recursion where fewer than ``limit`` bags are left
gives shorter schedules of higher peaks (section 4.3); the limits are tried in powers of two, and the fastest that fits wins.

What is carried over, beside several targets instead of one final node:

* one more node stands for the boundary: it comes after what the forward hands out, and before every backward node that has no
  backward predecessor. The sequence's boundary is where it first occurs, so a single run of the algorithm covers forward, loss
  and backward. Nodes of the forward that the backward alone asks for may be evaluated first after the boundary;
* random nodes, and nodes that may run once, are first evaluated in the captured order, and in the forward if they are forward
  nodes: where the sequence would break that, those before are evaluated there, each once. Later evaluations of a node that
  may run once are dropped, which keeps its values until their last use;
* inside a part only the nodes that its targets depend on are computed, separators included. Algorithm 1 computes the whole bag;
* frees are not annotated: with the sequence fixed, they follow from last uses (section 2.1). Evaluations that nobody reads
  are dropped, and with a budget left over, repetitions are too (`keep_longer`).

Nothing here is optimal, and the decomposition itself is heuristic: fill-in where the graph is small enough, degree above.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_degree, treewidth_min_fill_in

from lightning_remat.solvers._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers._prune import drop_unused, keep_longer, once
from lightning_remat.solvers._registry import Answer, register
from lightning_remat.solvers._solution import Status

Tree = tuple[tuple[frozenset[int], ...], tuple[tuple[int, ...], ...]]
"""Bags, and the neighbours of each in the tree."""


@register("treewidth")
def treewidth(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    fill_in_up_to: int = 3000,
    longest: float = 30.0,
) -> Answer:
    """The fastest of Algorithm 1's schedules within the budget, over the recursion limits.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        fill_in_up_to: with more nodes than this, the decomposition is by minimum degree instead of minimum fill-in.
        longest: schedules of more evaluations than this many times the nodes are refused.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    graph = _Graph(problem)
    tree = decompose(graph.undirected(), fill_in_up_to)
    width = max(map(len, tree[0]), default=1) - 1
    best: tuple[float, NodeSequence] | None = None
    tried, smallest = 0, -1
    for limit in _limits(len(tree[0])):
        if time.monotonic() > deadline:
            break
        order = remat(graph.predecessors, tree, graph.targets, limit, longest=int(longest * len(problem)))
        if order is None:
            break
        sequence = drop_unused(problem, graph.legal(order))
        evaluation = problem.evaluate(sequence)
        tried, smallest = tried + 1, min(evaluation.peak_bytes, smallest if tried else evaluation.peak_bytes)
        if evaluation.peak_bytes <= budget_bytes:
            sequence = keep_longer(problem, sequence, budget_bytes, deadline)
            seconds = problem.evaluate(sequence).seconds
            if best is None or seconds < best[0]:
                best = (seconds, sequence)
    notes = (f"tree decomposition of width {width}, {len(tree[0])} bags", f"{tried} recursion limits tried")
    if best is not None:
        return Answer(best[1], Status.FEASIBLE, notes=notes)
    status = Status.TIMEOUT if time.monotonic() > deadline else Status.INFEASIBLE
    return Answer(None, status, notes=(*notes, f"smallest peak {smallest:,} bytes") if tried else notes)


def _limits(bags: int) -> Iterator[int]:
    """Recursion limits from no recursion to all of it."""
    limit = 1 << max(0, bags - 1).bit_length()
    while limit >= 1:
        yield limit
        limit //= 2


# -- tree decompositions --------------------------------------------------------------------------------------------------


def decompose(graph: nx.Graph[int], fill_in_up_to: int = 3000) -> Tree:
    """A tree decomposition of ``graph`` of at most as many bags as nodes (Lemma 1)."""
    heuristic = treewidth_min_fill_in if graph.number_of_nodes() <= fill_in_up_to else treewidth_min_degree
    _, bags = heuristic(graph)
    names = list(bags.nodes)
    index = {bag: i for i, bag in enumerate(names)}
    return shrink([frozenset(bag) for bag in names], [(index[a], index[b]) for a, b in bags.edges])


def shrink(bags: list[frozenset[int]], edges: Iterable[tuple[int, int]]) -> Tree:
    """Lemma 1: merge every bag into a neighbour that contains it, in one pass over the edges with a union-find."""
    parent = list(range(len(bags)))
    bags = list(bags)

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    left: list[tuple[int, int]] = []
    for edge in edges:
        small, large = sorted((find(edge[0]), find(edge[1])), key=lambda i: len(bags[i]))
        if bags[small] <= bags[large]:
            parent[small] = large
        else:
            left.append(edge)
    roots = [i for i in range(len(bags)) if parent[i] == i]
    renumbered = {root: i for i, root in enumerate(roots)}
    neighbours: list[list[int]] = [[] for _ in roots]
    for a, b in left:
        i, j = renumbered[find(a)], renumbered[find(b)]
        neighbours[i].append(j)
        neighbours[j].append(i)
    return tuple(bags[root] for root in roots), tuple(tuple(near) for near in neighbours)


def separator(neighbours: tuple[tuple[int, ...], ...], part: Iterable[int]) -> int:
    """Lemma 3: the bag of the subtree ``part`` without which every subtree left has at most half of its bags."""
    members = set(part)
    root = next(iter(members))
    order, above = [root], {root: -1}
    for bag in order:
        for near in neighbours[bag]:
            if near in members and near not in above:
                above[near] = bag
                order.append(near)
    weight = dict.fromkeys(order, 1)
    heaviest = dict.fromkeys(order, 0)
    for bag in reversed(order):
        if 2 * max(heaviest[bag], len(order) - weight[bag]) <= len(order):
            return bag
        if above[bag] >= 0:
            weight[above[bag]] += weight[bag]
            heaviest[above[bag]] = max(heaviest[above[bag]], weight[bag])
    raise AssertionError("a tree has a balanced separator (Jordan)")


# -- Algorithm 1 ----------------------------------------------------------------------------------------------------------


def remat(
    predecessors: list[tuple[int, ...]],
    tree: Tree,
    targets: Iterable[int],
    limit: int = 1,
    longest: int | None = None,
) -> list[int] | None:
    """Algorithm 1, TWRemat(limit): a sequence that evaluates ``targets`` with few values in memory at a time.

    Args:
        predecessors: of each node; nodes are numbered in a topological order.
        tree: a decomposition of the undirected graph.
        targets: S, the nodes to be held at the end.
        limit: the recursion stops where fewer bags than this are left (1: where none are).
        longest: give up on sequences of more evaluations.

    Returns:
        The sequence, or ``None`` when it would have been longer than ``longest``.
    """
    run = _Recursion(predecessors, tree, limit, longest)
    try:
        run.schedule(frozenset(range(len(tree[0]))), frozenset(), frozenset(targets))
    except _TooLong:
        return None
    return run.order


class _TooLong(Exception):
    """The sequence is longer than was asked for."""


class _Recursion:
    """The recursion of Algorithm 1. Its depth is at most log2 of the number of bags (Lemma 3)."""

    def __init__(self, predecessors: list[tuple[int, ...]], tree: Tree, limit: int, longest: int | None) -> None:
        self.predecessors, self.limit, self.longest = predecessors, limit, longest
        self.bags, self.neighbours = tree
        self.order: list[int] = []
        self.splits: dict[frozenset[int], tuple[int, list[frozenset[int]], list[frozenset[int]]]] = {}

    def schedule(self, part: frozenset[int], outside: frozenset[int], targets: frozenset[int]) -> None:
        """Extend the sequence by ``targets``, nodes of the subtree ``part``, given that ``outside`` is in memory."""
        if not targets:
            return
        needed = self._needed(targets, outside)
        if len(part) < max(2, self.limit):  # section 4.3: stop early and compute the rest in a topological order
            self._extend(sorted(needed))
            return
        middle, parts, nodes = self._split(part)
        bag = self.bags[middle] - outside
        inside = outside | bag
        nodes = [members - inside for members in nodes]
        for v in sorted(bag & needed):  # in topological order
            for other, members in zip(parts, nodes, strict=True):
                self.schedule(other, inside, members.intersection(self.predecessors[v]))
            self._extend([v])
        for other, members in zip(parts, nodes, strict=True):
            self.schedule(other, inside, (targets - bag) & members)

    def _split(self, part: frozenset[int]) -> tuple[int, list[frozenset[int]], list[frozenset[int]]]:
        """The balancing bag of a subtree, the subtrees without it, and the nodes of each (found once a subtree)."""
        if part not in self.splits:
            middle = separator(self.neighbours, part)
            left = set(part) - {middle}
            parts: list[frozenset[int]] = []
            for first in self.neighbours[middle]:
                if first in left:
                    left.discard(first)
                    component = [first]
                    for bag in component:
                        fresh = [near for near in self.neighbours[bag] if near in left]
                        left.difference_update(fresh)
                        component.extend(fresh)
                    parts.append(frozenset(component))
            nodes = [frozenset().union(*[self.bags[bag] for bag in component]) for component in parts]
            self.splits[part] = (middle, parts, nodes)
        return self.splits[part]

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
        if self.longest is not None and len(self.order) > self.longest:
            raise _TooLong


# -- to and from the problem ----------------------------------------------------------------------------------------------


class _Graph:
    """The problem's nodes with one more for the boundary, numbered in a topological order: node ``boundary`` is it."""

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
        """The sequence of the problem's nodes, with random nodes and those that may run once where they must be."""
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
