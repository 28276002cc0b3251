"""Tree decompositions, and the schedules that Kumar et al.'s Algorithm 1 makes of them."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.kumar._tree_decomposition import (
    Heuristic,
    _eliminate,
    decompose,
    fill_in,
    min_degree,
    separator,
    shrink,
    width,
)
from lightning_remat.solvers.kumar._treewidth import NodeGraph, remat
from tests.helpers.decompositions import (
    check_decomposition,
    random_predecessors,
    random_undirected,
    undirected_of,
    unit_peak,
)
from tests.helpers.graphs import figure_1, random_graph, unit_chain

heuristics = pytest.mark.parametrize("heuristic", [fill_in, min_degree])


@heuristics
@given(seed=st.integers(0, 10_000))
def test_the_three_properties_and_the_size_of_lemma_1(heuristic: Heuristic, seed: int) -> None:
    graph = random_undirected(seed)
    tree = decompose(graph, heuristic)
    check_decomposition(graph, tree)
    assert len(tree[0]) <= graph.number_of_nodes()


@heuristics
@given(seed=st.integers(0, 10_000))
def test_the_node_of_the_lowest_rank_is_eliminated_next(heuristic: Heuristic, seed: int) -> None:
    left = random_undirected(seed).copy()
    order, bags = _eliminate(left, heuristic)

    def rank(node: int) -> int:
        return heuristic(left.degree(node), left.subgraph(left[node]).number_of_edges())

    for node, bag in zip(order, bags, strict=True):
        assert rank(node) == min(map(rank, left))
        assert bag == {node, *left[node]}
        left.add_edges_from((a, b) for a in left[node] for b in left[node] if a < b)
        left.remove_node(node)


@heuristics
@pytest.mark.parametrize(
    ("graph", "treewidth"),
    [
        (nx.path_graph(20), 1),
        (nx.balanced_tree(3, 3), 1),
        (nx.cycle_graph(15), 2),
        (nx.ladder_graph(12), 2),
        (nx.complete_graph(7), 6),
        (nx.complete_bipartite_graph(3, 9), 3),
        (nx.empty_graph(4), 0),
    ],
)
def test_widths_that_are_known(heuristic: Heuristic, graph: nx.Graph[int], treewidth: int) -> None:
    assert width(decompose(graph, heuristic)[0]) == treewidth


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
    problem = Problem(figure_1())
    assert problem.evaluate(problem.captured).peak_bytes == 4
    assert solve(figure_1(), 3, "no_remat").status is solve(figure_1(), 3, "checkpoint_all").status is Status.INFEASIBLE
    assert solve(figure_1(), 4, "no_remat").peak_bytes == solve(figure_1(), 4, "checkpoint_all").peak_bytes == 4
    solution = solve(figure_1(), 3, "treewidth")
    assert solution.peak_bytes == 3
    assert solution.seconds == 6
    assert isinstance(solution.schedule, Schedule)
    assert solution.schedule.evaluations[0] == 2  # A is computed again
    assert solve(figure_1(), 2, "treewidth").status is Status.INFEASIBLE


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 100]))
def test_algorithm_1_evaluates_nothing_before_its_predecessors(seed: int, limit: int) -> None:
    predecessors = random_predecessors(seed)
    tree = decompose(undirected_of(predecessors))
    targets = random.Random(seed).sample(range(len(predecessors)), min(len(predecessors), 3))
    order = remat(predecessors, tree, targets, limit)
    assert order is not None
    done: set[int] = set()
    for node in order:
        assert done.issuperset(predecessors[node])
        done.add(node)
    assert done.issuperset(targets)
    assert remat(predecessors, tree, targets, limit, longest=len(order) - 1) is None
    assert remat(predecessors, tree, targets, limit, deadline=0.0) is None


@given(st.integers(0, 10_000))
def test_memory_and_length_are_within_the_bounds_of_theorem_5(seed: int) -> None:
    """With the constants of its proof: a level holds a bag and the inputs of one node, and calls each part k + 2 times."""
    predecessors = random_predecessors(seed)
    tree = decompose(undirected_of(predecessors))
    targets = {node for node in range(len(predecessors)) if not any(node in before for before in predecessors)}
    order = remat(predecessors, tree, targets)
    assert order is not None
    levels, bag = len(tree[0]).bit_length(), width(tree[0]) + 1
    inputs = max(map(len, predecessors))
    assert unit_peak(predecessors, order, targets) <= levels * (bag + inputs) + len(targets)
    assert max(order.count(node) for node in set(order)) <= (bag + 1) ** (levels - 1)


@pytest.mark.parametrize("layers", [10, 100, 400])
def test_memory_of_a_unit_chain_is_within_the_bound_of_theorem_5(layers: int) -> None:
    graph = NodeGraph(Problem(unit_chain(layers)))
    tree = decompose(graph.undirected())
    order = remat(graph.predecessors, tree, graph.targets)
    assert order is not None
    assert width(tree[0]) <= 3
    assert unit_peak(graph.predecessors, order, set(graph.targets)) <= 7 * len(tree[0]).bit_length()


def test_peak_of_a_unit_chain_grows_with_the_logarithm() -> None:
    for layers, budget in [(25, 9), (100, 11), (400, 14)]:  # 27, 102 and 402 without rematerialization
        solution = solve(unit_chain(layers), budget, "treewidth")
        assert solution.status is Status.FEASIBLE
        assert solution.seconds < 5 * len(unit_chain(layers).ops)


def test_a_wider_budget_buys_a_faster_schedule() -> None:
    seconds = [solve(unit_chain(50), budget, "treewidth").seconds for budget in (9, 16, 27, 51)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] > 101


def test_the_recursion_limit_trades_memory_for_length() -> None:
    graph = unit_chain(100)
    found = [
        solve(graph, 1000, "treewidth", recursion_limit=limit, spend_budget=False) for limit in (1, 4, 16, 64, 1000)
    ]
    peaks, seconds = [one.peak_bytes for one in found], [one.seconds for one in found]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert peaks[0] < 15 and peaks[-1] == 102  # TWRemat(n) is NoRemat
    assert seconds[-1] == 201 and found[-1].status is Status.OPTIMAL
    assert solve(graph, 1000, "treewidth", recursion_limit=1).seconds == 201  # the budget has room for everything
    too_low = solve(graph, 20, "treewidth", recursion_limit=64)
    assert too_low.status is Status.INFEASIBLE
    assert "smallest peak" in too_low.notes[-1]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SolverError, match="recursion limit of 0"):
        solve(unit_chain(4), 5, "treewidth", recursion_limit=0)
    with pytest.raises(SolverError, match="fill_in, min_degree"):
        solve(unit_chain(4), 5, "treewidth", heuristic="width")


def test_a_schedule_that_is_too_long_is_refused_with_the_figure() -> None:
    solution = solve(unit_chain(40), 5, "treewidth", recursion_limit=1, longest=1.0)
    assert solution.status is Status.INFEASIBLE
    assert any("TWRemat(1) evaluates more than 1 times" in note for note in solution.notes)


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
