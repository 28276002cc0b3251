"""Path decompositions, spines, and the schedules that Kumar et al.'s Algorithms 2 and 3 make of them."""

from __future__ import annotations

import itertools
import math
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.kumar import _pathwidth  # noqa: F401 # registers the method
from lightning_remat.solvers.kumar._pathwidth import PathRemat, Sketch, _GiveUp, _join, add_spine
from lightning_remat.solvers.kumar._tree_decomposition import Bags, decompose_into_path, thin, width
from lightning_remat.solvers.kumar._treewidth import NodeGraph
from tests.helpers.decompositions import (
    check_decomposition,
    random_predecessors,
    random_undirected,
    undirected_of,
    unit_peak,
)
from tests.helpers.graphs import figure_1, random_graph, unit_chain


def check_path(graph: nx.Graph[int], bags: Bags) -> None:
    """A path decomposition is a tree decomposition whose tree is a path."""
    last = len(bags) - 1
    neighbours = tuple(tuple(j for j in (i - 1, i + 1) if 0 <= j <= last) for i in range(len(bags)))
    check_decomposition(graph, (bags, neighbours))


@given(st.integers(0, 10_000))
def test_the_three_properties_and_no_bag_within_the_next(seed: int) -> None:
    graph = random_undirected(seed)
    bags = decompose_into_path(graph)
    check_path(graph, bags)
    assert not any(a <= b or b <= a for a, b in itertools.pairwise(bags))
    assert len(bags) <= graph.number_of_nodes()


@pytest.mark.parametrize(
    ("graph", "pathwidth"),
    [
        (nx.path_graph(20), 1),
        (nx.star_graph(9), 1),
        (nx.star_graph(90), 1),
        (nx.cycle_graph(15), 2),
        (nx.ladder_graph(12), 2),
        (nx.complete_graph(7), 6),
        (nx.empty_graph(4), 0),
    ],
)
def test_widths_that_are_known(graph: nx.Graph[int], pathwidth: int) -> None:
    assert width(decompose_into_path(graph)) == pathwidth


def test_bags_within_a_neighbour_go() -> None:
    assert thin([frozenset({1}), frozenset({1, 2}), frozenset({2}), frozenset(), frozenset({2, 3})]) == ({1, 2}, {2, 3})


@given(st.integers(0, 10_000))
def test_algorithm_2_adds_a_spine_and_keeps_the_bags_small(seed: int) -> None:
    predecessors = random_predecessors(seed)
    graph = undirected_of(predecessors)
    bags = decompose_into_path(graph)
    spine, wider = add_spine(predecessors, bags)
    place = {node: i for i, node in enumerate(spine)}
    assert sorted(spine) == list(range(len(predecessors)))
    assert all(place[p] < place[node] for node, before in enumerate(predecessors) for p in before)
    graph.add_edges_from(itertools.pairwise(spine))
    check_path(graph, wider)
    assert width(wider) + 1 <= 2 * width(bags) + 3  # Theorem 8


def test_a_node_meets_its_successor_on_the_spine_to_the_left_too() -> None:
    """A subtree that ends far to the right of its siblings: the text's extension to the right alone would not meet them."""
    predecessors: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (0,)]
    bags = tuple(map(frozenset, [{0, 1, 4}, {1, 2, 4}, {2, 4}, {2, 3}, {3}]))
    spine, wider = add_spine(predecessors, bags)
    graph = undirected_of(predecessors)
    graph.add_edges_from(itertools.pairwise(spine))
    check_path(graph, wider)


def test_a_graph_with_a_spine_is_left_as_it_is() -> None:
    predecessors = [tuple({max(0, i - 1), max(0, i - 3)} - {i}) for i in range(20)]
    bags = decompose_into_path(undirected_of(predecessors))
    assert add_spine(predecessors, bags) == (list(range(20)), bags)


def plan_of(predecessors: list[tuple[int, ...]], calls: float = math.inf) -> tuple[PathRemat, list[int], Bags]:
    spine, bags = add_spine(predecessors, decompose_into_path(undirected_of(predecessors)))
    return PathRemat(predecessors, spine, bags, calls), spine, bags


def sparse_predecessors(seed: int) -> list[tuple[int, ...]]:
    """A random directed acyclic graph of small pathwidth."""
    rng = random.Random(seed)
    return [
        tuple(sorted({max(0, i - rng.randint(1, 3)) for _ in range(rng.randint(1, 2))} - {i}))
        for i in range(rng.randint(1, 24))
    ]


@given(st.integers(0, 10_000))
def test_algorithm_3_evaluates_every_node_after_its_predecessors(seed: int) -> None:
    predecessors = sparse_predecessors(seed)
    plan, spine, _ = plan_of(predecessors)
    schedule = plan.schedule()
    order = [spine[place] for place in schedule.flat()]
    assert len(order) == schedule.length  # the prediction
    done: set[int] = set()
    for node in order:
        assert done.issuperset(predecessors[node])
        done.add(node)
    assert len(done) == len(predecessors)


def bounds(size: int, bags: int, inputs: int) -> tuple[float, float]:
    """S(p, b) and T(p, b) of the proof of Theorem 22, by its recurrences, for unit nodes."""
    unit = 1 + inputs

    def interleaved(p: int, b: int) -> tuple[float, float]:
        if p <= 2 or b <= 1:
            return (p + inputs, p * max(1, b))
        memory, length = interleaved(p, b // 2)
        inner_memory, inner_length = interleaved(p - 1, b // 2)
        return memory + 2 * inner_memory + 3 * p * unit, 2 * length + (2 * p) ** 2 * inner_length

    memory, length = interleaved(size, bags)
    return 2 * memory, 2 * length + size


@given(st.integers(0, 10_000))
def test_memory_and_length_are_within_the_recurrences_of_theorem_22(seed: int) -> None:
    predecessors = sparse_predecessors(seed)
    plan, spine, bags = plan_of(predecessors)
    order = [spine[place] for place in plan.schedule().flat()]
    memory, length = bounds(width(bags) + 1, len(bags), max(map(len, predecessors)))
    assert unit_peak(predecessors, order, {spine[-1]}) <= memory
    assert len(order) <= length


@pytest.mark.parametrize("layers", [16, 64, 256])
def test_memory_of_a_unit_chain_grows_with_the_logarithm(layers: int) -> None:
    """Theorem 7 allows powers of it."""
    graph = NodeGraph(Problem(unit_chain(layers)))
    plan, spine, bags = plan_of(graph.predecessors)
    assert width(bags) <= 4
    order = [spine[place] for place in plan.schedule().flat()]
    assert unit_peak(graph.predecessors, order, set(graph.targets)) <= math.log2(layers) + 5
    solution = solve(unit_chain(layers), round(math.log2(layers)) + 3, "pathwidth")
    assert solution.status is Status.FEASIBLE
    assert solution.seconds < 5 * len(unit_chain(layers).ops)


def test_figure_1_is_too_small_for_it() -> None:
    """A lies in a bag with the final node E, so it is held all along: only smaller bags are computed again."""
    solution = solve(figure_1(), 3, "pathwidth")
    assert solution.status is Status.INFEASIBLE
    assert solution.notes[-1] == "it peaks at 4 bytes"


def test_what_is_too_long_is_refused_with_the_figure() -> None:
    graph = unit_chain(64)
    solution = solve(graph, 40, "pathwidth", longest=1.5)
    assert solution.status is Status.REFUSED
    assert any("evaluations, " in note and "times the nodes" in note for note in solution.notes)
    assert "refused: more than 1.5 times" in solution.notes
    beyond = solve(graph, 40, "pathwidth", calls=10)
    assert beyond.status is Status.REFUSED
    assert "refused: its length is not known after 10 calls of Algorithm 3" in beyond.notes
    with pytest.raises(_GiveUp):
        plan_of(NodeGraph(Problem(graph)).predecessors, calls=10)[0].schedule()


def test_lengths_are_known_without_writing_schedules_down() -> None:
    sketch = Sketch((7,), 1)
    for _ in range(60):
        sketch = _join([sketch, sketch, Sketch()])
    assert sketch.length == 2**60
    assert _join([_join([Sketch((1,), 1), 2]), Sketch(), 3]).flat() == [1, 2, 3]


@pytest.mark.parametrize("shapes", [(5, 5), (9, 9)])
@given(seed=st.integers(0, 10_000))
def test_schedules_pass_the_verifier_at_every_budget(shapes: tuple[int, int], seed: int) -> None:
    graph = random_graph(seed, *shapes)
    problem = Problem(graph)
    peak = problem.evaluate(once(problem)).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -2):
        solution = solve(graph, budget, "pathwidth", longest=200.0, calls=2000)  # verifies
        assert (solution.schedule is None) == (solution.status in (Status.INFEASIBLE, Status.REFUSED))
        assert solution.peak_bytes <= budget
    assert (
        solve(graph, 10 * peak, "pathwidth", spend_budget=False, longest=1e6, calls=2000).status is not Status.TIMEOUT
    )
