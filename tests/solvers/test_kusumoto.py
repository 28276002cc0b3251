"""Lower sets and the dynamic programs over them, in the paper's own model and on joint graphs."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.kusumoto import _dynamic_programming  # noqa: F401  registers the methods
from lightning_remat.solvers.kusumoto._dynamic_programming import LowerSetProgram
from lightning_remat.solvers.kusumoto._lower_sets import (
    ForwardGraph,
    canonical,
    count_lower_sets,
    forward_graph,
    lower_sets,
    peak_without_liveness,
    pruned_family,
)
from tests.helpers.graphs import random_graph, unit_chain

VARIANTS = list(itertools.product(("exact_dp", "approx_dp"), ("time", "memory"), (True, False)))


def random_forward(seed: int, most: int = 6, pinned: bool = False) -> ForwardGraph:
    rng = random.Random(seed)
    count, density = rng.randint(1, most), rng.random()
    predecessors = tuple(tuple(p for p in range(node) if rng.random() < density) for node in range(count))
    sizes = tuple(rng.randint(0, 9) for _ in range(count))
    times = tuple(rng.choice([0, 1, 1, 10]) for _ in range(count))
    return ForwardGraph(predecessors, times, sizes, rng.getrandbits(count) if pinned else 0)


class Oracle:
    """Sections 2 and 3 by their definitions, on Python sets, with none of the solver's code."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.nodes = frozenset(range(len(graph)))
        self.edges = [(p, node) for node, before in enumerate(graph.predecessors) for p in before]
        subsets = [frozenset(c) for size in range(len(graph) + 1) for c in itertools.combinations(self.nodes, size)]
        self.lower_sets = [s for s in subsets if self.minus(s) <= s]

    def plus(self, nodes: frozenset[int]) -> frozenset[int]:
        return frozenset(w for v, w in self.edges if v in nodes)

    def minus(self, nodes: frozenset[int]) -> frozenset[int]:
        return frozenset(v for v, w in self.edges if w in nodes)

    def boundary(self, nodes: frozenset[int]) -> frozenset[int]:
        pinned = frozenset(v for v in nodes if self.graph.pinned >> v & 1)
        return self.minus(self.nodes - nodes) & nodes | pinned

    def bytes(self, nodes: frozenset[int]) -> int:
        return sum(self.graph.sizes[v] for v in nodes)

    def costs(self, strategy: Sequence[frozenset[int]]) -> tuple[int, int]:
        """Eq. 1, and the largest of eq. 2."""
        overhead, peak = 0, 0
        cached: frozenset[int] = frozenset()
        inside: frozenset[int] = frozenset()
        for lower in strategy:
            segment = lower - inside
            overhead += sum(self.graph.times[v] for v in segment - self.boundary(lower))
            across = self.bytes(self.plus(lower) - lower) + self.bytes(self.minus(self.plus(lower)) - lower)
            peak = max(peak, self.bytes(cached) + 2 * self.bytes(segment) + across)
            cached, inside = cached | self.boundary(lower), lower
        return overhead, peak

    def strategies(self, last: frozenset[int], family: Sequence[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
        """Every increasing sequence of members of the family after ``last`` that ends with all nodes (section 4.1)."""
        if last == self.nodes:
            yield []
            return
        for lower in family:
            if last < lower:
                for rest in self.strategies(lower, family):
                    yield [lower, *rest]


def as_set(nodes: int) -> frozenset[int]:
    return frozenset(v for v in range(nodes.bit_length()) if nodes >> v & 1)


class TestLowerSets:
    @given(st.integers(0, 10_000))
    def test_all_of_them_are_listed_once_and_counted(self, seed: int) -> None:
        graph = random_forward(seed, 8)
        found = lower_sets(graph)
        assert len(found) == len(set(found)) == count_lower_sets(graph)
        assert {as_set(nodes) for nodes in found} == set(Oracle(graph).lower_sets)

    @given(st.integers(0, 10_000))
    def test_the_pruned_family_is_one_lower_set_a_node(self, seed: int) -> None:
        graph = random_forward(seed, 8)
        family = pruned_family(graph)
        assert len(family) == len(graph)
        assert set(family) <= set(lower_sets(graph))
        assert all(nodes >> v & 1 and nodes.bit_length() == v + 1 for v, nodes in enumerate(family))

    def test_wide_graphs_are_counted_without_being_listed(self) -> None:
        wide = ForwardGraph(((),) * 100, (1,) * 100, (1,) * 100)
        assert count_lower_sets(wide) == 2**100
        # Ten blocks in a row, each of four branches of three nodes and a node that joins them.
        before: list[tuple[int, ...]] = [()]
        for _ in range(10):
            join, ends = len(before) - 1, []
            for _ in range(4):
                before += [(join,), (len(before),), (len(before) + 1,)]
                ends.append(len(before) - 1)
            before.append(tuple(ends))
        assert count_lower_sets(ForwardGraph(tuple(before), (1,) * 131, (1,) * 131)) == 2 + 10 * 4**4
        assert count_lower_sets(ForwardGraph(tuple(before), (1,) * 131, (1,) * 131), patience=3) is None


class TestTheModel:
    """Against exhaustive search over canonical strategies, section 4.1."""

    @settings(max_examples=60)
    @given(st.integers(0, 10_000), st.booleans(), st.booleans())
    def test_the_programs_equal_exhaustive_search(self, seed: int, exact: bool, pinned: bool) -> None:
        graph = random_forward(seed, 5, pinned)
        oracle = Oracle(graph)
        sets = lower_sets(graph) if exact else pruned_family(graph)
        family = sorted({as_set(s) for s in sets} | {oracle.nodes}, key=len)
        costs = [oracle.costs(s) for s in oracle.strategies(frozenset(), family)]
        program = LowerSetProgram(graph, sets)
        least = min(peak for _, peak in costs)
        assert program.smallest_budget() == least
        assert program.largest_budget == max(peak for _, peak in costs)
        assert program.solve(least - 1) is None and not program.feasible(least - 1)
        for budget in {least, least + 1, (least + program.largest_budget) // 2, program.largest_budget}:
            within = [overhead for overhead, peak in costs if peak <= budget]
            for objective, best in (("time", min(within)), ("memory", max(within))):
                strategy = program.solve(budget, objective)
                assert strategy is not None
                overhead, peak = oracle.costs([as_set(s) for s in strategy])
                assert overhead == best and peak <= budget

    @given(st.integers(0, 10_000))
    def test_the_pruned_family_is_never_better(self, seed: int) -> None:
        graph = random_forward(seed, 7)
        exact, approximate = LowerSetProgram(graph, lower_sets(graph)), LowerSetProgram(graph, pruned_family(graph))
        budget = approximate.smallest_budget()
        assert exact.smallest_budget() <= budget
        oracle = Oracle(graph)
        overheads = []
        for program in (exact, approximate):
            strategy = program.solve(budget)
            assert strategy is not None
            overheads.append(oracle.costs([as_set(s) for s in strategy])[0])
        assert overheads[0] <= overheads[1]

    def test_a_chain_needs_about_its_root(self) -> None:
        chain = ForwardGraph(tuple((i - 1,) if i else () for i in range(100)), (1,) * 100, (1,) * 100)
        program = LowerSetProgram(chain, pruned_family(chain))
        # Segments of about √(2n) nodes of which two copies are held, and as many ends: within 2√(2n) and what lies across.
        assert program.smallest_budget() <= 2 * math.sqrt(2 * 100) + 3

    def test_time_that_is_up_is_no_answer(self) -> None:
        program = LowerSetProgram(random_forward(1), [])
        assert program.solve(10**9, deadline=time.monotonic() - 1) is None
        assert program.smallest_budget(time.monotonic() - 1) == program.largest_budget


class TestJointGraphs:
    @given(st.integers(0, 10_000))
    def test_every_strategy_is_a_schedule(self, seed: int) -> None:
        problem = Problem(random_graph(seed, 7, 7))
        graph = forward_graph(problem)
        rng = random.Random(seed)
        chain = [graph.everything]
        for nodes in sorted(lower_sets(graph), key=int.bit_count, reverse=True):
            if nodes and nodes & chain[0] == nodes != chain[0] and rng.random() < 0.3:
                chain.insert(0, nodes)
        found = canonical(problem, graph, chain)
        problem.expand(found.sequence)
        assert drop_unused(problem, found.sequence) == found.sequence
        assert len(found.blocks) == len(found.sequence.nodes)
        assert list(found.blocks[found.sequence.boundary :]) == sorted(found.blocks[found.sequence.boundary :])
        assert problem.evaluate(found.sequence).peak_bytes <= peak_without_liveness(problem, found)
        assert max(found.sequence.nodes.count(n) for n in range(len(problem))) <= 2

    @settings(max_examples=25)
    @given(st.integers(0, 10_000))
    def test_schedules_pass_the_verifier_at_the_budget(self, seed: int) -> None:
        graph = random_graph(seed, 7, 7)
        problem = Problem(graph)
        baseline = problem.evaluate(once(problem)).peak_bytes
        for method, objective, liveness in VARIANTS:
            for budget in (baseline - 1, baseline * 3 // 4):
                if budget > 0:
                    solution = solve(graph, budget, method, objective=objective, liveness=liveness)  # verifies
                    assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
                    assert solution.schedule is None or solution.peak_bytes <= budget

    @pytest.mark.parametrize(("method", "objective", "liveness"), VARIANTS)
    def test_a_chain_fits_its_root(self, method: str, objective: str, liveness: bool) -> None:
        graph = unit_chain(64)
        solution = solve(graph, 32, method, objective=objective, liveness=liveness)
        assert solution.status is Status.FEASIBLE and solution.peak_bytes <= 32
        assert solution.seconds <= 129 + 64

    def test_a_larger_budget_is_not_slower(self) -> None:
        graph = unit_chain(48)
        seconds = [solve(graph, budget, "approx_dp").seconds for budget in (24, 30, 36, 44)]
        assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]

    def test_wide_graphs_are_refused_with_the_figure(self) -> None:
        graph = unit_chain(64)
        solution = solve(graph, 32, "exact_dp", limit=10)
        assert solution.status is Status.REFUSED
        assert any("66 lower sets" in note and "limit is 10" in note for note in solution.notes)

    def test_an_unknown_objective_is_said(self) -> None:
        with pytest.raises(SolverError, match="unknown objective 'speed'"):
            solve(unit_chain(16), 12, "approx_dp", objective="speed")

    def test_a_resolution_of_nothing_is_said(self) -> None:
        with pytest.raises(SolverError, match="resolution=0: give the number of units"):
            solve(unit_chain(16), 12, "exact_dp", resolution=0)
