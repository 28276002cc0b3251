"""Dynamic programming over a chain of blocks with options."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Status, solve
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.hiremate._blocks import (
    Chain,
    Option,
    keep_options,
    link_up,
    measure,
    select,
    undominated,
)
from lightning_remat.solvers.hiremate._rotor import Table
from tests.helpers.graphs import random_graph, unit_chain


def options_of(_: int, part: PlainProblem) -> list[Option]:
    return keep_options(part, time.monotonic() + 60)


def chain_of(problem: Problem, blocks: int) -> Chain:
    ends = [round(problem.boundary * i / blocks) for i in range(blocks + 1)]
    groups = [range(a, b) for a, b in itertools.pairwise(ends) if a < b]
    return link_up(problem, groups, options_of)


def schedules(chain: Chain, s: int, t: int, gap: int) -> list[tuple[float, int]]:
    """Seconds and least bytes of every schedule of the blocks s to t, written out one by one."""
    last = len(chain.links) - 1
    beside = chain.problem.forward_extra_bytes if t == last else chain.incoming[t]
    found = []
    for option in chain.links[s].options:
        own = max(beside + option.forward_peak, chain.beside[s] + option.backward_peak)
        if s == t:
            found.append((option.seconds, max(own, gap + option.saved_bytes) if t == last else own))
        else:
            kept = option.saved_bytes + chain.crossing[s][s + 1]
            found += [(option.seconds + c, max(own, kept + m)) for c, m in schedules(chain, s + 1, t, gap)]
    for middle in range(s + 1, t + 1):
        bare = [chain.links[k].bare for k in range(s, middle)]
        own = max(beside + b.forward_peak + chain.crossing[s][k] for k, b in enumerate(bare, s))
        seconds = sum(b.forward_seconds for b in bare)
        left, right = schedules(chain, s, middle - 1, gap), schedules(chain, middle, t, gap)
        kept = chain.crossing[s][middle]
        found += [(seconds + a + b, max(own, m, kept + n)) for a, m in left for b, n in right]
    return found


@given(st.integers(0, 10_000), st.integers(0, 3))
@settings(max_examples=40)
def test_the_recurrence_equals_the_best_of_all_its_schedules(seed: int, gap: int) -> None:
    problem = Problem(random_graph(seed, 7, 7))
    chain = chain_of(problem, 3)
    limit = sum(problem.nbytes) + 20
    table = Table(chain, limit, slots=10_000, gap_bytes=gap)
    every = schedules(chain, 0, len(chain.links) - 1, gap)
    for m in range(limit + 1):
        best = min([seconds for seconds, needed in every if needed <= m], default=float("inf"))
        assert table.cost[0, len(chain.links) - 1][int(m // table.unit)] == pytest.approx(best) or m % table.unit


@pytest.mark.parametrize("blocks", [3, 5, 9])
def test_a_schedule_of_a_unit_chain_needs_no_more_than_its_slots_and_costs_what_the_table_says(blocks: int) -> None:
    problem = Problem(unit_chain(17))
    chain = chain_of(problem, blocks)
    table = Table(chain, 40, slots=400)
    assert table.unit == 1
    seen = set()
    for m in table.levels():
        sequence = chain.sequence(table.runs(m))
        evaluation = problem.evaluate(sequence)
        assert evaluation.peak_bytes <= m
        assert evaluation.seconds <= table.cost[0, len(chain.links) - 1][m]
        seen.add(evaluation.seconds)
    assert len(seen) >= 3
    assert min(seen) == len(problem)  # with room enough nothing is repeated


def test_options_are_measured_selected_and_never_dominated() -> None:
    problem = Problem(unit_chain(8))
    option = measure(problem, problem.captured)
    # f1..f8 wait for the backward, and the loss, which b8 reads.
    assert (option.saved_bytes, option.seconds, option.forward_peak, option.backward_peak) == (9, 17.0, 9, 10)
    found = keep_options(problem, time.monotonic() + 60)
    assert found == undominated(found)
    assert found[0].saved_bytes < found[-1].saved_bytes
    assert found[0].seconds > found[-1].seconds == 17
    chosen = select(found, 3)
    assert len(chosen) == 3
    assert {chosen[0].saved_bytes, chosen[-1].saved_bytes} == {found[0].saved_bytes, found[-1].saved_bytes}
    assert select(found, 1)[0].saved_bytes == found[-1].saved_bytes
    assert select(found, 1000) == tuple(found)


def test_a_wider_budget_buys_a_faster_schedule_and_a_tiny_one_none() -> None:
    graph = unit_chain(60)
    solutions = [solve(graph, budget, "rotor") for budget in (9, 12, 20, 40, 62)]
    seconds = [solution.seconds for solution in solutions]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 121
    assert seconds[0] < 2 * 121
    assert isinstance(solutions[0].schedule, Schedule)
    assert max(solutions[0].schedule.evaluations.values()) > 2  # deeper than one level of checkpoints
    assert solve(graph, 3, "rotor").status is Status.INFEASIBLE


@pytest.mark.parametrize(("budget", "optimum"), [(5, 24), (6, 21)])
def test_a_small_unit_chain_is_near_the_optimum(budget: int, optimum: int) -> None:
    assert optimum <= solve(unit_chain(8), budget, "rotor", blocks=9).seconds <= optimum + 2


@pytest.mark.parametrize("shapes", [(5, 5), (9, 9), (12, 3)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_schedules_pass_the_verifier_at_every_budget(shapes: tuple[int, int], seed: int) -> None:
    graph = random_graph(seed, *shapes)
    problem = Problem(graph)
    peak = problem.evaluate(drop_unused(problem, problem.captured)).peak_bytes
    for budget in range(peak, max(peak - 8, 0), -3):
        solution = solve(graph, budget, "rotor", blocks=(3, 5))  # verifies
        assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
        assert solution.peak_bytes <= budget


def test_the_deadline_is_kept() -> None:
    graph = unit_chain(200)
    solution = solve(graph, 20, "rotor", time_limit=0.2)
    assert solution.solve_seconds < 10
    assert solution.status in (Status.FEASIBLE, Status.TIMEOUT)
