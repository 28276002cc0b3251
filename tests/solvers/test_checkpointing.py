"""Chen's greedy segments, and checkpoints on articulation points and on the linearized forward."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.checkmate._generalized_chen import articulation_points, recomputations, root_ends
from lightning_remat.solvers.common._prune import drop_unused, required
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._segments import crossing, greedy_ends, greedy_segmentations
from lightning_remat.solvers.common._stages import from_stages, to_stages
from tests.helpers.brute_force import cheapest_in_stages
from tests.helpers.graphs import random_graph, unit_chain

METHODS = ["chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy"]


def residual_chain(blocks: int) -> ComputationGraph:
    """Blocks of two ops and an addition of the block's input, a loss, and a backward op for each op; all costs and sizes 1."""
    reads: list[tuple[int, ...]] = [()]
    for _ in range(blocks):
        entry = len(reads) - 1
        reads += [(entry,), (entry + 1,), (entry + 2, entry)]
    forward = len(reads)
    backward_of = {}
    for node in reversed(range(forward)):
        users = [backward_of[user] for user in range(node + 1, forward) if node in reads[user]]
        backward_of[node] = len(reads)
        reads.append(tuple(dict.fromkeys([*users, node, *reads[node]])))
    ops = tuple(
        Op(f"op{i}", "op", values, (i,), Phase.FORWARD if i < forward else Phase.BACKWARD, seconds=1.0)
        for i, values in enumerate(reads)
    )
    return ComputationGraph(
        ops, tuple(Tensor(f"t{i}", i) for i in range(len(ops))), (1,) * len(ops), backward_outputs=(len(ops) - 1,)
    )


@pytest.mark.parametrize("method", ["ap_sqrt", "linearized_sqrt", "chen_greedy", "ap_greedy", "linearized_greedy"])
@pytest.mark.parametrize("layers", [16, 64, 100])
def test_memory_of_a_unit_chain_grows_with_the_root(method: str, layers: int) -> None:
    graph = unit_chain(layers)
    root = math.isqrt(layers)
    solution = solve(graph, 2 * root + 4, method)
    assert solution.status is Status.FEASIBLE
    assert len(graph.ops) < solution.seconds <= len(graph.ops) + layers


@given(st.integers(3, 60))
def test_on_a_chain_they_are_the_plain_methods(layers: int) -> None:
    problem = Problem(unit_chain(layers))
    assert articulation_points(problem) == list(range(problem.boundary))
    for nodes in (root_ends(range(problem.boundary)), *greedy_segmentations(problem, range(problem.boundary), 10)):
        plain = drop_unused(problem, rollout(problem, crossing(problem, nodes)))
        assert recomputations(problem, nodes).nodes == plain.nodes


def test_articulation_points_are_the_ends_of_residual_blocks() -> None:
    problem = Problem(residual_chain(4))
    assert articulation_points(problem) == [0, 3, 6, 9, 12]
    assert root_ends(articulation_points(problem)) == [3]  # two segments of the five


@given(st.integers(0, 10_000))
def test_an_articulation_point_disconnects_the_forward(seed: int) -> None:
    problem = Problem(random_graph(seed, 12, 2))
    edges = [(p, node) for node in range(problem.boundary) for p in problem.predecessors[node]]
    whole: nx.Graph[int] = nx.Graph(edges)
    whole.add_nodes_from(range(problem.boundary))
    points = set(articulation_points(problem)) - {0, problem.boundary - 1}
    for node in set(range(problem.boundary)) - {0, problem.boundary - 1}:
        parts = nx.number_connected_components(whole.subgraph(set(whole) - {node}))
        neighbours = whole.degree(node)
        assert (node in points) == (parts > nx.number_connected_components(whole) - (neighbours == 0))


def test_algorithm_3_ends_segments_by_bytes() -> None:
    graph = unit_chain(6).replace(storages=(4, 1, 1, 1, 5, 1, *(1,) * 7))
    problem = Problem(graph)
    assert greedy_ends(problem, range(7), 3) == [0, 4]
    assert greedy_ends(problem, range(7), 0) == list(range(6))
    assert greedy_ends(problem, [1, 3, 5, 6], 5) == [3, 5]
    fine, *_, coarse = greedy_segmentations(problem, range(7), 64)
    assert fine == list(range(6))
    assert len(coarse) <= 1


def test_wider_budgets_buy_faster_schedules() -> None:
    graph = residual_chain(16)
    for method in ("chen_greedy", "ap_greedy", "linearized_greedy"):
        seconds = [solve(graph, budget, method).seconds for budget in (16, 20, 26, 34, 44)]
        assert all(slower >= faster for slower, faster in pairwise(seconds)), method
        assert seconds[0] > seconds[-1]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_never_dearer_than_the_plain_rollout_at_the_same_checkpoints(seed: int, checkpoint_seed: int) -> None:
    problem = Problem(random_graph(seed, 12, 12, overwriting=False))
    nodes = random.Random(checkpoint_seed).sample(range(problem.boundary), problem.boundary // 3)
    keep = {v for node in nodes for v in problem.writes[node]}
    held, forgotten = recomputations(problem, nodes), recomputations(problem, nodes, hold=False)
    plain = problem.evaluate(drop_unused(problem, rollout(problem, keep))).seconds
    assert problem.evaluate(held).seconds <= plain <= problem.evaluate(forgotten).seconds + 1e-9
    # Rerunning every segment whole, as the plain procedure is stated for chains, takes no less than that.
    checkpointed = {*nodes, *[node for node in range(problem.boundary) if not problem.recomputable[node]]}
    whole = [node for node in range(problem.boundary) if node not in checkpointed]
    once = sum(problem.seconds[node] for node in required(problem))
    assert problem.evaluate(held).seconds <= once + sum(problem.seconds[node] for node in whole) + 1e-9


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_never_cheaper_than_checkmates_program(seed: int, checkpoint_seed: int) -> None:
    problem = Problem(random_graph(seed, 4, 4, overwriting=False))
    if not problem.boundary:
        return
    nodes = random.Random(checkpoint_seed).sample(range(problem.boundary), problem.boundary // 2)
    keep = {v for node in nodes for v in problem.writes[node]}
    staged = from_stages(problem, to_stages(problem, rollout(problem, keep)))
    evaluation = problem.evaluate(staged)
    assert cheapest_in_stages(problem, evaluation.peak_bytes) <= evaluation.seconds
    assert problem.evaluate(recomputations(problem, nodes)).seconds <= evaluation.seconds


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10_000))
def test_schedules_pass_the_verifier_at_every_budget(method: str, seed: int) -> None:
    graph = random_graph(seed, 9, 9)
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -2):
        solution = solve(graph, budget, method)  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget
