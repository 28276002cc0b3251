"""The framework: partition, options of distinct blocks, recombination; and H-ILP."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Answer, Problem, Status, register, solve
from lightning_remat.solvers.common import _registry
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.hiremate import _partition
from lightning_remat.solvers.hiremate._blocks import Chain, Option, keep_options, link_up
from lightning_remat.solvers.hiremate._h_ilp import data_flow, recombine
from lightning_remat.solvers.hiremate._hiremate import Hierarchy
from lightning_remat.solvers.hiremate._integer_program import solve_phases
from lightning_remat.solvers.hiremate._partition import Block, partitioners, register_partitioner
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


def plain(graph: ComputationGraph) -> ComputationGraph:
    """The same graph, with nothing random and everything recomputable."""
    ops = tuple(dataclasses.replace(op, random=False, recomputable=True) for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


def chain_of(problem: Problem, blocks: int) -> Chain:
    def options_of(_: int, part: PlainProblem) -> list[Option]:
        return keep_options(part, time.monotonic() + 60)

    ends = [round(problem.boundary * i / blocks) for i in range(blocks + 1)]
    return link_up(problem, [range(a, b) for a, b in itertools.pairwise(ends) if a < b], options_of)


# -- hiremate -------------------------------------------------------------------------------------------------------------


def test_every_distinct_block_is_solved_once() -> None:
    problem = Problem(unit_chain(63))
    blocks = tuple(Block(tuple(range(first, first + 4))) for first in range(0, 64, 4))
    solved = []

    class Counting(Hierarchy):
        def solve(self, problem: PlainProblem, parts: tuple[Block, ...]) -> tuple[Option, ...]:
            solved.append(problem)
            return super().solve(problem, parts)

    hierarchy = Counting(("rotor",), ("keep",), 8, 2, 100, 400, time.monotonic() + 60)
    chain = hierarchy.chain(problem, blocks)
    assert hierarchy.blocks == len(chain.links) == 16
    assert len(solved) == len(hierarchy.known) == 2  # the last with the loss, and all others
    assert chain.links[3].options is chain.links[7].options
    pairs = tuple(Block(a.nodes + b.nodes, (a, b)) for a, b in zip(blocks[::2], blocks[1::2], strict=True))
    solved.clear()
    Counting(("rotor",), ("keep",), 8, 2, 100, 400, time.monotonic() + 60).chain(problem, pairs)
    assert len(solved) == 2 + 2  # two distinct pairs, and their parts


def test_a_deep_hierarchy_keeps_the_quality() -> None:
    graph = unit_chain(80)
    shallow = solve(graph, 20, "hiremate", partitioner="h_partition", top_size=40, block_size=10)
    deep = solve(graph, 20, "hiremate", partitioner="h_partition", top_size=4, block_size=4)
    assert shallow.seconds < 1.5 * 161
    assert deep.seconds < 1.1 * shallow.seconds  # figure 6: a slight degradation
    depth = [int(solution.notes[0].split("depth ")[1].split(",")[0]) for solution in (shallow, deep)]
    assert depth[0] < depth[1]


def test_own_partitioners_and_solvers_serve_at_any_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (_registry.METHODS, _partition.PARTITIONERS):
        monkeypatch.setattr(registry, "own", dict(registry.own))
    calls: list[int] = []

    @register("test_keep_nothing")
    def keep_nothing(problem: Problem, budget_bytes: int, *, deadline: float) -> Answer:
        del deadline
        calls.append(len(problem))
        sequence = rollout(problem, ())
        fits = problem.evaluate(sequence).peak_bytes <= budget_bytes
        return Answer(sequence if fits else None, Status.FEASIBLE if fits else Status.INFEASIBLE)

    @register_partitioner("test_halves")
    def halves(problem: PlainProblem, *, top_size: int, block_size: int) -> tuple[Block, ...]:
        del top_size, block_size
        middle, nodes = problem.boundary // 2, tuple(range(problem.boundary))
        parts = (Block(nodes[: middle // 2]), Block(nodes[middle // 2 : middle]))
        return Block(nodes[:middle], parts), Block(nodes[middle:])

    assert "test_halves" in partitioners()
    graph = unit_chain(15)
    names = {"bottom": ("test_keep_nothing", "keep"), "top": ("rotor",)}
    solution = solve(graph, 12, "hiremate", partitioner="test_halves", **names)
    assert solution.schedule is not None
    assert "2 top blocks, depth 3" in solution.notes[0]
    assert solution.notes[1].startswith("4 subgraphs")
    assert calls
    assert max(calls) < len(graph.ops)
    calls.clear()
    names = {"middle": ("test_keep_nothing",), "top": ("treewidth", "rotor")}
    assert solve(graph, 12, "hiremate", partitioner="test_halves", **names).schedule is not None
    assert calls


@pytest.mark.parametrize("bottom", ["greedy", "treewidth", "milp", "h_ilp"])
def test_registered_solvers_at_the_bottom(bottom: str) -> None:
    graph = unit_chain(20)
    levels = {"partitioner": "h_partition", "middle": ("rotor",), "bottom": (bottom,)}
    solution = solve(graph, 9, "hiremate", top_size=5, block_size=4, budgets=2, **levels)
    assert solution.schedule is not None
    assert solution.seconds < 1.8 * 41


@pytest.mark.parametrize("shapes", [(5, 5), (9, 9), (14, 6)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15)
def test_schedules_pass_the_verifier_at_every_budget(shapes: tuple[int, int], seed: int) -> None:
    graph = random_graph(seed, *shapes)
    problem = Problem(graph)
    peak = problem.evaluate(drop_unused(problem, problem.captured)).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -3):
        solution = solve(graph, budget, "hiremate", top_size=3, block_size=3)  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget


def test_the_deadline_is_kept() -> None:
    solution = solve(unit_chain(300), 30, "hiremate", time_limit=0.3)
    assert solution.solve_seconds < 10
    assert solution.status in (Status.FEASIBLE, Status.TIMEOUT)


# -- h_ilp ----------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_h_ilp_is_never_better_than_brute_force_and_accounts_for_what_it_does(seed: int) -> None:
    graph = random_graph(seed, 5, 4, overwriting=False)
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    chain = chain_of(problem, 2)
    for budget in (peak, peak - 3):
        result = recombine(chain, budget, time.monotonic() + 30, total_options=8, gap=0.0)
        if result.sequence is None:
            assert result.status is Status.INFEASIBLE
            continue
        evaluation = problem.evaluate(result.sequence)
        assert evaluation.seconds <= result.seconds + 1e-6  # evaluations that only served a block alone are dropped
        assert evaluation.seconds >= cheapest_of_any_order(problem, budget) - 1e-6
        if all(problem.recomputable):
            assert evaluation.peak_bytes <= budget


def test_correction_terms_admit_schedules_that_need_less_memory() -> None:
    problem = Problem(unit_chain(8))
    chain = chain_of(problem, 3)
    with_terms, without = (
        [
            budget
            for budget in range(3, 12)
            if recombine(chain, budget, time.monotonic() + 30, total_options=12, corrections=flag).sequence is not None
        ]
        for flag in (True, False)
    )
    assert min(with_terms) < min(without)
    for budget in with_terms:
        result = recombine(chain, budget, time.monotonic() + 30, total_options=12)
        assert result.sequence is not None
        assert problem.evaluate(result.sequence).peak_bytes <= budget


def test_phantom_nodes_and_options_of_the_data_flow() -> None:
    problem = Problem(unit_chain(8))
    chain = chain_of(problem, 3)
    flow = data_flow(problem, list(chain.links))
    assert flow.boundary == 3
    assert [len(ways) for ways in flow.ways[:3]] == [len(link.options) + 1 for link in chain.links]  # one keeps nothing
    assert [len(ways) for ways in flow.ways[3:]] == [len(link.options) for link in reversed(chain.links)]
    assert flow.layers[1].phantom_bytes == tuple(option.saved_bytes for option in chain.links[1].options)
    assert len(flow.finals) == 1
    result = solve_phases(flow, 12, gap=0.0, deadline=time.monotonic() + 30)
    assert result.runs is not None
    assert [phase[-1][0] for phase in result.runs] == list(range(6))  # phase t ends with node t


def test_n_o_limits_the_options() -> None:
    problem = Problem(unit_chain(12))
    chain = chain_of(problem, 3)
    few = recombine(chain, 8, time.monotonic() + 30, total_options=3, gap=0.0)
    many = recombine(chain, 8, time.monotonic() + 30, total_options=18, gap=0.0)
    assert many.sequence is not None
    assert few.sequence is None or few.seconds >= many.seconds


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15)
def test_h_ilp_schedules_pass_the_verifier(seed: int) -> None:
    graph = random_graph(seed, 6, 6)
    problem = Problem(graph)
    peak = problem.evaluate(drop_unused(problem, problem.captured)).peak_bytes
    for budget in (peak, max(peak - 3, 1)):
        solution = solve(graph, budget, "h_ilp", blocks=3, total_options=9)  # verifies
        assert solution.peak_bytes <= budget
        assert (solution.schedule is None) == (solution.status in (Status.INFEASIBLE, Status.TIMEOUT))
