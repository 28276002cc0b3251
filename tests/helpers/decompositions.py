"""Random graphs to decompose, and what must hold of a decomposition and of a schedule by the letter of Kumar et al."""

from __future__ import annotations

import random

import networkx as nx

from lightning_remat.solvers.kumar._tree_decomposition import Tree


def random_undirected(seed: int) -> nx.Graph[int]:
    rng = random.Random(seed)
    return nx.gnp_random_graph(rng.randint(1, 16), rng.choice([0.0, 0.1, 0.2, 0.4, 1.0]), seed=seed)


def check_decomposition(graph: nx.Graph[int], tree: Tree) -> None:
    bags, neighbours = tree
    skeleton: nx.Graph[int] = nx.Graph()
    skeleton.add_nodes_from(range(len(bags)))
    skeleton.add_edges_from((bag, near) for bag, around in enumerate(neighbours) for near in around)
    assert nx.is_tree(skeleton)
    assert set().union(*bags) == set(graph.nodes)  # each node is in some bag
    for u, v in graph.edges:  # each edge has both its ends in some bag
        assert any({u, v} <= bag for bag in bags)
    for node in graph.nodes:  # the bags of each node are connected
        assert nx.is_connected(skeleton.subgraph([i for i, bag in enumerate(bags) if node in bag]))


def random_predecessors(seed: int) -> list[tuple[int, ...]]:
    """A random directed acyclic graph, nodes in a topological order."""
    undirected = random_undirected(seed)
    return [tuple(sorted(p for p in undirected[node] if p < node)) for node in range(undirected.number_of_nodes())]


def undirected_of(predecessors: list[tuple[int, ...]]) -> nx.Graph[int]:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(predecessors)))
    graph.add_edges_from((p, node) for node, before in enumerate(predecessors) for p in before)
    return graph


def unit_peak(predecessors: list[tuple[int, ...]], order: list[int], targets: set[int]) -> int:
    """M(sigma) of section 2.1 with unit sizes: U_i is read literally, from prev(u', j)."""
    held: list[set[int]] = [{node, *predecessors[node]} for node in order]
    previous: dict[int, int] = {}
    for j, node in enumerate(order):
        for p in predecessors[node]:
            for i in range(previous[p], j):
                held[i].add(p)
        previous[node] = j
    for target in targets:
        for i in range(previous[target], len(order)):
            held[i].add(target)
    return max(map(len, held))
