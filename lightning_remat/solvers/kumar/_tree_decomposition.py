"""Tree and path decompositions of undirected graphs, by heuristics: finding the optimal width is NP-hard.

A **tree decomposition** covers a graph by bags of nodes, arranged in a tree: each node is in some bag, both ends of each edge
are together in some bag, and the bags that hold a node are connected (Kumar et al. 2019, section 2.2). Its width is the size
of the largest bag, less one. Nodes are eliminated one after the other, the neighbours of each joined to a clique; a node and
its neighbours at that moment make a bag. Which node goes next is the heuristic: the one whose clique lacks the fewest edges
(minimum fill-in, the paper's choice, section 3) or the one with the fewest neighbours (minimum degree).

A **path decomposition** is one whose tree is a path (section 5). Here the nodes are put in a row one after the other;
each has a bag, of itself and of those before it that still have neighbours to come. Two rows are tried: a greedy one,
in which the next node leaves as few such nodes as possible, and the nodes as they occur along a tree decomposition.

The widths found in these ways are upper bounds; nothing here is optimal.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

import networkx as nx

Bags = tuple[frozenset[int], ...]
Tree = tuple[Bags, tuple[tuple[int, ...], ...]]
"""Bags, and the neighbours of each in the tree."""

_HUB = 50
"""Neighbours of a node with more to come than this are not candidates for the next one: nearly all nodes would be."""

Heuristic = Callable[[int, int], tuple[int, ...]]
"""A node's rank from its number of neighbours and that of edges among them: the lowest is eliminated next."""


def fill_in(degree: int, edges: int) -> tuple[int, ...]:
    """Number of edges that eliminating the node would add, then that of its neighbours."""
    return degree * (degree - 1) // 2 - edges, degree


def min_degree(degree: int, _edges: int) -> tuple[int, ...]:
    """Number of neighbours of the node."""
    return (degree,)


def width(bags: Iterable[frozenset[int]]) -> int:
    """Size of the largest bag, less one."""
    return max(map(len, bags), default=0) - 1


def decompose(graph: nx.Graph[int], heuristic: Heuristic = fill_in) -> Tree:
    """A tree decomposition of ``graph`` with at most as many bags as nodes (Lemma 1), by elimination of its nodes.

    With either heuristic 18,000 nodes of width 20 take about three seconds.
    """
    order, bags = _eliminate(graph, heuristic)
    place = {node: i for i, node in enumerate(order)}
    edges, roots = [], []
    for i, node in enumerate(order):
        later = [place[other] for other in bags[i] if other != node]
        if later:
            edges.append((i, min(later)))  # its neighbours are a clique from here on, so that bag holds all the others
        else:
            roots.append(i)
    edges += list(itertools.pairwise(roots))  # one tree, where the graph has several components
    return shrink(bags, edges)


def _eliminate(graph: nx.Graph[int], heuristic: Heuristic) -> tuple[list[int], list[frozenset[int]]]:
    """Nodes in order of elimination, and the bag of each: the node and its neighbours at that moment.

    The edges among each node's neighbours are counted as edges come and go, which is what makes minimum fill-in quick.
    """
    near = {node: set(graph[node]) - {node} for node in graph}
    edges = {node: sum([len(near[node] & near[other]) for other in near[node]]) // 2 for node in near}
    queue = [(heuristic(len(near[node]), edges[node]), node) for node in near]
    heapq.heapify(queue)
    order: list[int] = []
    bags: list[frozenset[int]] = []
    while queue:
        rank, node = heapq.heappop(queue)
        if node not in near or rank != heuristic(len(near[node]), edges[node]):
            continue  # gone, or ranked anew since
        clique = near[node]
        touched = set(clique)
        for a in clique:
            for b in [b for b in clique if b > a and b not in near[a]]:
                common = near[a] & near[b]
                for other in (a, b):
                    edges[other] += len(common)
                for other in common:
                    edges[other] += 1
                touched |= common
                near[a].add(b)
                near[b].add(a)
        del near[node]
        for other in clique:
            near[other].discard(node)
            edges[other] -= len(clique) - 1
        for other in touched - {node}:
            heapq.heappush(queue, (heuristic(len(near[other]), edges[other]), other))
        order.append(node)
        bags.append(frozenset(clique | {node}))
    return order, bags


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
    """Lemma 3: the bag of the subtree ``part`` whose removal leaves subtrees of at most half of its bags each.

    There may be two. The one eliminated earlier is taken: on the unit chain of 400 layers Algorithm 1 then peaks at 12 units
    instead of 17.
    """
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
        if above[bag] >= 0:
            weight[above[bag]] += weight[bag]
            heaviest[above[bag]] = max(heaviest[above[bag]], weight[bag])
    return min(order, key=lambda bag: (max(heaviest[bag], len(order) - weight[bag]), bag))


def decompose_into_path(graph: nx.Graph[int]) -> Bags:
    """A path decomposition of ``graph``: bags in order, none of them within the next or the one before.

    It is the narrower of two: of the greedy row, and of the row along a tree decomposition.
    """
    return min([_row_of_bags(graph, row(graph)) for row in (_greedy_row, _row_along_tree)], key=width)


def _row_of_bags(graph: nx.Graph[int], row: Iterable[int]) -> Bags:
    """The bags of nodes put in a row: each with those before it that have neighbours from it on."""
    to_come = {node: len(graph[node]) for node in graph}
    waiting: set[int] = set()
    bags: list[frozenset[int]] = []
    for node in row:
        waiting.add(node)
        bags.append(frozenset(waiting))
        for other in graph[node]:
            to_come[other] -= 1
        waiting -= {other for other in (node, *graph[node]) if not to_come[other]}
    return thin(bags)


def _greedy_row(graph: nx.Graph[int]) -> list[int]:
    """Next comes the neighbour of nodes in the row that leaves the fewest nodes in it with neighbours to come."""
    to_come = {node: set(graph[node]) for node in graph}
    waiting: dict[int, None] = {}  # in the row, with neighbours to come, the oldest first
    left = dict.fromkeys(sorted(graph, key=lambda node: len(graph[node])))
    row: list[int] = []
    while left:
        few = [node for node in waiting if len(to_come[node]) <= _HUB] or list(waiting)[:1]
        candidates = dict.fromkeys(other for node in few for other in sorted(to_come[node])) or {next(iter(left)): None}
        node = min(
            candidates, key=lambda v: bool(to_come[v]) - sum([len(to_come[p]) == 1 for p in graph[v] if p in waiting])
        )
        del left[node]
        row.append(node)
        if to_come[node]:
            waiting[node] = None
        for other in graph[node]:
            to_come[other].discard(node)
            if not to_come[other]:
                waiting.pop(other, None)
    return row


def _row_along_tree(graph: nx.Graph[int]) -> list[int]:
    """Nodes as they occur along a tree decomposition: its longest path from end to end, shorter branches first."""
    bags, neighbours = decompose(graph)
    order, above = _breadth_first(neighbours, 0)
    order, above = _breadth_first(neighbours, order[-1])
    height = dict.fromkeys(order, 0)
    for bag in reversed(order[1:]):
        height[above[bag]] = max(height[above[bag]], height[bag] + 1)
    row: dict[int, None] = {}
    stack = order[:1]
    while stack:
        bag = stack.pop()
        row.update(dict.fromkeys(sorted(bags[bag])))
        stack += sorted([near for near in neighbours[bag] if near != above[bag]], key=lambda near: -height[near])
    return list(row)


def _breadth_first(neighbours: tuple[tuple[int, ...], ...], root: int) -> tuple[list[int], dict[int, int]]:
    """Bags of a tree from ``root`` on, and the bag before each."""
    order, above = [root], {root: -1}
    for bag in order:
        for near in neighbours[bag]:
            if near != above[bag]:
                above[near] = bag
                order.append(near)
    return order, above


def thin(bags: Iterable[frozenset[int]]) -> Bags:
    """The bags of a path decomposition without those that lie within a neighbour (Lemma 1 on a path)."""
    found: list[frozenset[int]] = []
    for bag in bags:
        while found and found[-1] <= bag:
            found.pop()
        if not (found and bag <= found[-1]):
            found.append(bag)
    return tuple(found)
