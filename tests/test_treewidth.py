"""Tree decompositions, and the schedules that Kumar et al.'s Algorithm 1 makes of them."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph, Op, Tensor
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers._treewidth import Tree, decompose, remat, separator, shrink
from tests.helpers.graphs import random_graph, unit_chain


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


@given(st.integers(0, 10_000), st.booleans())
def test_the_three_properties_and_the_size_of_lemma_1(seed: int, by_fill_in: bool) -> None:
    graph = random_undirected(seed)
    tree = decompose(graph, fill_in_up_to=10**9 if by_fill_in else 0)
    check_decomposition(graph, tree)
    assert len(tree[0]) <= graph.number_of_nodes()


@given(st.integers(0, 10_000))
def test_lemma_1_shrinks_a_decomposition_full_of_redundant_bags(seed: int) -> None:
    graph, rng = random_undirected(seed), random.Random(seed)
    bags, neighbours = decompose(graph)
    padded = list(bags)
    edges = []
    for a, around in enumerate(neighbours):
        for b in around:
            if a < b:  # a chain of subsets between the two, which all hold what the two have in common
                chain = [a]
                for _ in range(rng.randint(0, 3)):
                    surplus = [v for v in padded[chain[-1]] - bags[b] if rng.random() < 0.5]
                    padded.append(frozenset(surplus) | (bags[a] & bags[b]))
                    chain.append(len(padded) - 1)
                edges += list(zip(chain, [*chain[1:], b], strict=True))
    rng.shuffle(edges)
    tree = shrink(padded, edges)
    check_decomposition(graph, tree)
    assert len(tree[0]) <= graph.number_of_nodes()
    assert max(map(len, tree[0])) == max(map(len, bags))  # the width stays
    for bag, around in zip(*tree, strict=True):
        assert not any(bag <= tree[0][near] for near in around)


@given(st.integers(0, 10_000))
def test_lemma_3_leaves_parts_of_at_most_half_the_bags(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    skeleton: nx.Graph[int] = nx.Graph()
    skeleton.add_nodes_from(range(count))
    skeleton.add_edges_from((i, rng.randrange(max(0, i - 3), i)) for i in range(1, count))
    neighbours = tuple(tuple(skeleton.neighbors(i)) for i in range(count))
    root = rng.randrange(count)
    part = set(list(nx.bfs_tree(skeleton, root))[: rng.randint(1, count)])
    middle = separator(neighbours, part)
    assert middle in part
    left = skeleton.subgraph(part - {middle})
    assert all(2 * len(component) <= len(part) for component in nx.connected_components(left))


def test_figure_1_needs_four_units_without_and_three_with_rematerialization() -> None:
    names = "ABCDE"
    reads = {"A": "", "B": "A", "C": "B", "D": "BC", "E": "AD"}
    ops = tuple(Op(n, n, tuple(names.index(r) for r in reads[n]), (i,), seconds=1.0) for i, n in enumerate(names))
    graph = ComputationGraph(
        ops, tuple(Tensor(f"{n}_out", i) for i, n in enumerate(names)), (1,) * 5, forward_outputs=(4,)
    )
    problem = Problem(graph)
    assert problem.evaluate(problem.captured).peak_bytes == 4
    solution = solve(graph, 3, "treewidth")
    assert solution.peak_bytes == 3
    assert solution.seconds == 6
    assert isinstance(solution.schedule, Schedule)
    assert solution.schedule.evaluations[0] == 2  # A is computed again
    assert solve(graph, 2, "treewidth").status is Status.INFEASIBLE


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 100]))
def test_algorithm_1_evaluates_nothing_before_its_predecessors(seed: int, limit: int) -> None:
    undirected = random_undirected(seed)
    count = undirected.number_of_nodes()
    predecessors = [tuple(p for p in undirected.neighbors(node) if p < node) for node in range(count)]
    targets = random.Random(seed).sample(range(count), min(count, 3))
    order = remat(predecessors, decompose(undirected), targets, limit)
    assert order is not None
    done: set[int] = set()
    for node in order:
        assert done.issuperset(predecessors[node])
        done.add(node)
    assert done.issuperset(targets)
    assert remat(predecessors, decompose(undirected), targets, limit, longest=len(order) - 1) is None


def test_peak_of_a_unit_chain_grows_with_the_logarithm() -> None:
    for layers, budget in [(25, 9), (100, 11), (400, 14)]:  # 27, 102 and 402 without rematerialization
        solution = solve(unit_chain(layers), budget, "treewidth")
        assert solution.status is Status.FEASIBLE
        assert solution.seconds < 5 * len(unit_chain(layers).ops)


def test_a_wider_budget_buys_a_faster_schedule() -> None:
    seconds = [solve(unit_chain(50), budget, "treewidth").seconds for budget in (9, 16, 27, 51)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] > 101


@pytest.mark.parametrize("shapes", [(5, 5), (9, 9), (12, 3)])
@given(seed=st.integers(0, 10_000))
def test_schedules_pass_the_verifier_at_every_budget(shapes: tuple[int, int], seed: int) -> None:
    graph = random_graph(seed, *shapes)
    baseline = Problem(graph)
    peak = baseline.evaluate(baseline.captured).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -2):
        solution = solve(graph, budget, "treewidth")  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget
