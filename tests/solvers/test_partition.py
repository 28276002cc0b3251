"""H-Partition, backward blocks, and the recognition of identical blocks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.hiremate._isomorphism import canonical_form, subproblem
from lightning_remat.solvers.hiremate._partition import (
    Block,
    backward_blocks,
    h_partition,
    partition,
    partitioners,
    register_partitioner,
    sequences_of,
)
from tests.helpers.graphs import random_graph, unit_chain


def every_block(blocks: tuple[Block, ...]) -> Iterator[Block]:
    for block in blocks:
        yield block
        yield from every_block(block.parts)


def forward_graph(problem: PlainProblem) -> nx.DiGraph[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(problem.boundary))
    graph.add_edges_from((p, n) for n in range(problem.boundary) for p in problem.predecessors[n])
    return graph


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(2, 8))
def test_blocks_of_every_level_are_convex_small_and_in_order(seed: int, top_size: int, block_size: int) -> None:
    problem = Problem(random_graph(seed, 20, 3))
    blocks = partition("h_partition", problem, top_size=top_size, block_size=block_size)  # checks cover and order
    graph = forward_graph(problem)
    for block in every_block(blocks):
        assert len(block.parts or block.nodes) <= block_size
        inside = set(block.nodes)
        for node in set(graph) - inside:  # definition A.1
            assert not (inside & nx.ancestors(graph, node) and inside & nx.descendants(graph, node))


def test_a_chain_is_wrapped_down_to_the_top_size() -> None:
    blocks = h_partition(Problem(unit_chain(63)), top_size=5, block_size=4)
    assert len(blocks) <= 5
    assert max(block.depth for block in blocks) >= 2  # 64 nodes, at most 4 of them or of their blocks in one
    assert all(len(part.nodes) <= 4 for block in blocks for part in block.parts)


def test_alpha_changes_the_score() -> None:
    problem = Problem(random_graph(5, 40, 3))
    found = {h_partition(problem, top_size=6, block_size=8, alpha=alpha) for alpha in (0.0, 0.5, 4.0)}
    assert len(found) > 1


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_sequences_wrap_consecutive_blocks(seed: int, count: int) -> None:
    problem = Problem(random_graph(seed, 20, 3))
    blocks = h_partition(problem, top_size=8, block_size=4)
    for wrapped in sequences_of(problem, blocks, count):
        flat = [part for block in wrapped for part in (block.parts if block not in blocks else (block,))]
        assert [n for part in flat for n in part.nodes] == [n for block in blocks for n in block.nodes] or any(
            not block.parts
            for block in wrapped  # single nodes of one block are its lowest level
        )
        place = {node: index for index, block in enumerate(wrapped) for node in block.nodes}
        assert len(place) == problem.boundary
        assert all(place[p] <= place[n] for n in range(problem.boundary) for p in problem.predecessors[n])


def test_sequences_are_cut_where_few_bytes_cross() -> None:
    graph = unit_chain(11)
    sizes = [1 if i in (3, 7) or i > 11 else 5 for i in range(len(graph.storages))]
    problem = Problem(dataclasses.replace(graph, storages=tuple(sizes)))
    blocks = tuple(Block((node,)) for node in range(problem.boundary))
    for wrapped in sequences_of(problem, blocks, 3):
        assert [block.nodes[-1] for block in wrapped] == [3, 7, 11]


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_the_backward_of_the_groups_in_reverse_order_is_legal(seed: int, count: int) -> None:
    problem = Problem(random_graph(seed, 9, 12))
    cuts = sorted(random.Random(seed).sample(range(1, 9), min(count, 8)))
    cuts = [cut for cut in cuts if cut < problem.boundary]
    groups = [range(a, b) for a, b in zip([0, *cuts], [*cuts, problem.boundary], strict=True)]
    order = [node for nodes in reversed(backward_blocks(problem, groups)) for node in nodes]
    assert sorted(order) == list(range(problem.boundary, len(problem)))
    place = {node: at for at, node in enumerate(order)}
    for node in order:
        assert all(place[p] < place[node] for p in problem.predecessors[node] if p >= problem.boundary)
    for kind in (problem.random, [not flag for flag in problem.recomputable]):
        fixed = [node for node in order if kind[node]]
        assert fixed == sorted(fixed)


def test_the_backward_of_a_chain_mirrors_its_forward() -> None:
    problem = Problem(unit_chain(6))  # f1..f6, loss, b6..b1
    assert backward_blocks(problem, [range(3), range(3, 7)]) == [[10, 11, 12], [7, 8, 9]]


def blocks_of(graph: ComputationGraph, groups: list[range]) -> list[object]:
    problem = Problem(graph)
    backward = backward_blocks(problem, groups)
    return [canonical_form(subproblem(problem, f, b).problem) for f, b in zip(groups, backward, strict=True)]


def test_identical_blocks_have_one_form_and_others_do_not() -> None:
    graph = unit_chain(12)
    groups = [range(3), range(3, 6), range(6, 9), range(9, 13)]
    first, second, third, last = blocks_of(graph, groups)
    assert second == third
    assert hash(second) == hash(third)
    assert first == second  # that it has no input is nothing to its own schedules
    assert last != second  # it has the loss
    sizes = list(graph.storages)
    sizes[7] = 2
    _, second, third, _ = blocks_of(dataclasses.replace(graph, storages=tuple(sizes)), groups)
    assert second != third
    slower = tuple(dataclasses.replace(op, seconds=2.0) if op.name == "f8" else op for op in graph.ops)
    _, second, third, _ = blocks_of(dataclasses.replace(graph, ops=slower), groups)
    assert second != third


@given(st.integers(0, 10_000))
def test_all_of_a_problem_is_a_part_of_the_same_cost(seed: int) -> None:
    problem = Problem(random_graph(seed, 7, 7, overwriting=False))
    forward, backward = range(problem.boundary), range(problem.boundary, len(problem))
    part = subproblem(problem, forward, backward)
    whole, own = problem.memory(problem.captured), part.problem.memory(part.problem.captured)
    # A part of its own has nothing beside it, and hands over what must exist at the boundary for good.
    for node in range(problem.boundary):
        assert own[node] >= whole[node] - problem.base_bytes - problem.forward_extra_bytes
    for node in backward:
        assert own[node] >= whole[node] - problem.base_bytes
    assert canonical_form(part.problem) == canonical_form(subproblem(part.problem, forward, backward).problem)


def test_partitioners_are_found_by_name_and_checked() -> None:
    assert {"chain", "h_partition"} <= set(partitioners())
    problem = Problem(unit_chain(4))
    name = "test_pairs"
    if name not in partitioners():

        @register_partitioner(name)
        def pairs(problem: PlainProblem, *, top_size: int, block_size: int) -> tuple[Block, ...]:
            nodes = list(range(problem.boundary))
            if top_size == 1:
                nodes.reverse()
            starts = range(0, len(nodes), 2) if top_size < 99 else range(0, 2, 2)
            return tuple(Block(tuple(sorted(nodes[i : i + 2]))) for i in starts)

    assert [block.nodes for block in partition(name, problem, top_size=3, block_size=2)] == [(0, 1), (2, 3), (4,)]
    with pytest.raises(SolverError, match="registered already"):
        register_partitioner(name)(h_partition)
    with pytest.raises(SolverError, match="comes before"):
        partition(name, problem, top_size=1, block_size=2)
    with pytest.raises(SolverError, match="every forward node"):
        partition(name, problem, top_size=99, block_size=2)
    with pytest.raises(SolverError, match="choose one of"):
        partition("no such partitioner", problem, top_size=3, block_size=2)
