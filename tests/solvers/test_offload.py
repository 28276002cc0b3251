"""Host memory as a third choice: schedules with copies are right, no cheaper than brute force's, and seldom dearer."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.errors import SolverError
from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.schedule import Copy, simulate, verify
from lightning_remat.solvers import Problem, Status, find_smallest, offloaded, solve
from lightning_remat.solvers.offload._fetching import fetching_early
from lightning_remat.solvers.offload._placing import place
from lightning_remat.solvers.offload._program import OffloadProgram, copyable_values
from lightning_remat.solvers.offload._rewriting import rewrite
from lightning_remat.solvers.offload._sending import sending
from tests.helpers.brute_force import cheapest_of_any_order, cheapest_with_copies
from tests.helpers.graphs import random_graph, recomputing_sequence, unit_chain


def with_host(seed: int) -> ComputationGraph:
    """A random graph of 3 to 6 ops, and a random host."""
    rng = random.Random(seed)
    forward = rng.randint(2, 4)
    graph = random_graph(seed, forward, rng.randint(1, 6 - forward), overwriting=False)
    speeds = rng.choice([2, 4, 8]), rng.choice([2, 4, 8])
    return graph.replace(host=Host(rng.choice([4, 12]), *speeds, rng.choice([0, 0.5])))


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_copies_are_placed_within_the_memory_of_the_rewritten_schedule(seed: int, other: int) -> None:
    rng = random.Random(other)
    speeds = rng.choice([0.5, 1, 2, 8]), rng.choice([0.5, 1, 2, 8])
    graph = random_graph(seed, rng.randint(1, 7), rng.randint(1, 7)).replace(
        host=Host(100, *speeds, rng.choice([0, 0.5]))
    )
    may = [t for t, one in enumerate(graph.copyable) if one and graph.producer[t] < graph.boundary]
    rewritten = rewrite(graph, {t for t in may if rng.random() < 0.6}, 0.1)
    problem = Problem(rewritten.graph)
    for sequence in (problem.captured, recomputing_sequence(problem, other)):
        peak = problem.evaluate(sequence).peak_bytes
        waiting = sending(rewritten, problem.expand(sequence), peak)
        assert verify(graph, waiting, peak) == simulate(graph, waiting).peak_bytes
        budget = peak + rng.choice([0, 2, 5])
        early = fetching_early(graph, waiting, budget)
        assert verify(graph, early, budget) == simulate(graph, early).peak_bytes
        placed = place(rewritten, problem.expand(sequence), budget)
        assert placed is not None
        assert placed.seconds <= min(simulate(graph, one).seconds for one in (waiting, early)) + 1e-9


def compare(seeds: range) -> tuple[int, int, int, int]:
    """How many budgets were compared with brute force, in how many its optimum is found, in how many copies save time, and
    in how many there is no schedule without them."""
    compared = equal = cheaper = needed = 0
    for seed in seeds:
        graph = with_host(seed)
        assert graph.host is not None
        problem = Problem(graph)
        values = frozenset(copyable_values(graph, problem))
        peak = problem.evaluate(problem.captured).peak_bytes
        low = next((b for b in range(1, peak + 1) if cheapest_of_any_order(problem, b) < math.inf), peak)
        for budget in sorted({max(1, low - 1), low, (low + peak) // 2, peak - 1}):
            found = solve(graph, budget, offload="host")
            least = cheapest_with_copies(problem, budget, graph.host, values, found.seconds - 1e-9)
            assert (
                least == math.inf or found.lower_bound_seconds <= least + 1e-6
            )  # nothing is cheaper than what is proven
            without = cheapest_of_any_order(problem, budget)
            compared += 1
            equal += least == math.inf
            if found.schedule is not None:
                assert verify(graph, found.schedule, budget) <= budget
                timeline = simulate(graph, found.schedule)
                assert timeline.seconds == pytest.approx(found.seconds)
                assert timeline.host_bytes <= graph.host.bytes
                assert found.lower_bound_seconds <= found.seconds * (1 + 1e-9)
                full = cheapest_with_copies(problem, budget, graph.host, values, found.seconds + 1e-9)
                assert full <= found.seconds + 1e-9  # brute force has what is found, too
                copies = bool(offloaded(found.schedule))
                cheaper += copies and found.seconds < without - 1e-9
                needed += copies and without == math.inf
    return compared, equal, cheaper, needed


def test_brute_force_is_never_beaten_and_mostly_equalled() -> None:
    compared, equal, _, _ = compare(range(15, 19))
    assert compared >= 8 and equal >= 0.8 * compared


@pytest.mark.slow
def test_brute_force_is_mostly_equalled_with_copies_that_matter() -> None:
    compared, equal, cheaper, needed = compare(range(100))
    assert equal >= 0.9 * compared
    assert cheaper >= 12 and needed >= 3


def long_chain(to_host: float = 4.0, to_device: float = 4.0, nbytes: int = 100) -> ComputationGraph:
    """A unit chain whose ops take a second each; a value is copied in a fraction of one."""
    return unit_chain(8).replace(host=Host(nbytes, to_host, to_device))


def test_fast_copies_make_recomputation_needless() -> None:
    graph = long_chain()
    without = solve(graph, 6)
    found = solve(graph, 6, offload="host")
    assert without.seconds == 21
    assert found.seconds == 17 and found.status is Status.OPTIMAL and found.method.endswith("+host")
    assert found.schedule is not None and offloaded(found.schedule)
    assert any("wait on the host" in note for note in found.notes)


def test_slow_copies_are_not_made() -> None:
    graph = long_chain(to_host=0.01, to_device=0.01)
    found = solve(graph, 6, offload="host")
    assert found.seconds == 21 and found.schedule is not None and not offloaded(found.schedule)
    assert found.lower_bound_seconds <= 21


def test_what_lies_on_the_host_is_limited() -> None:
    found = solve(long_chain(nbytes=2), 6, offload="host")
    assert found.schedule is not None
    assert simulate(long_chain(nbytes=2), found.schedule).host_bytes <= 2
    assert 17 <= found.seconds <= 21


def test_a_budget_may_be_kept_with_copies_only() -> None:
    graph = with_host(0)
    assert solve(graph, 26).schedule is None
    found = solve(graph, 26, offload="host")
    assert found.schedule is not None
    assert verify(graph, found.schedule, 26) <= 26


@pytest.mark.parametrize(("graph", "peak", "seconds"), [(with_host(0), 24, 26.0), (long_chain(), 4, 19.0)])
def test_the_smallest_peak_is_smaller_or_cheaper_with_copies(
    graph: ComputationGraph, peak: int, seconds: float
) -> None:
    without, found = find_smallest(graph), find_smallest(graph, offload="host")
    assert found.schedule is not None and offloaded(found.schedule)
    assert verify(graph, found.schedule, found.peak_bytes) == found.peak_bytes <= peak <= without.peak_bytes
    assert found.lower_bound_seconds <= found.seconds <= seconds
    again = solve(graph, found.peak_bytes, offload="host", known=found)
    assert again.schedule is not None and again.seconds <= found.seconds


def test_the_smallest_peak_without_copies_is_kept_where_they_do_not_help() -> None:
    graph = long_chain(to_host=0.01, to_device=0.01).replace(host=Host(0, 1.0, 1.0))
    found = find_smallest(graph, offload="host")
    assert found.schedule is not None and not offloaded(found.schedule)
    assert found.peak_bytes == find_smallest(graph).peak_bytes
    with pytest.raises(SolverError, match="host memory"):
        find_smallest(unit_chain(4), offload="host")


def test_off_is_as_without_a_host() -> None:
    graph = long_chain()
    with_it, without = solve(graph, 6, work_limit=2.0), solve(graph.replace(host=None), 6, work_limit=2.0)
    assert with_it.schedule == without.schedule and with_it.lower_bound_seconds == without.lower_bound_seconds


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(SolverError, match="host memory: set `ComputationGraph.host`"):
        solve(unit_chain(4), 6, offload="host")
    with pytest.raises(SolverError, match="offload='disk': choose one of 'off', 'host'"):
        solve(long_chain(), 6, offload="disk")
    with pytest.raises(SolverError, match="no option 'x'"):
        solve(long_chain(), 6, offload="host", x=1)


def test_a_known_solution_with_copies_is_never_left_for_a_dearer_one() -> None:
    graph = long_chain()
    known = solve(graph, 6, offload="host")
    again = solve(graph, 6, "no_remat", offload="host", known=known)
    assert again.seconds <= known.seconds
    assert solve(graph, 6, known=known).seconds == 21  # nothing is copied where that is off


def test_work_that_is_counted_ends_at_the_same_place() -> None:
    graph = with_host(18)
    budget = find_smallest(graph).peak_bytes
    one, other = (solve(graph, budget, work_limit=2.0, time_limit=60, offload="host") for _ in range(2))
    assert one.schedule == other.schedule


@pytest.mark.parametrize("seed", range(40, 52))
def test_the_program_bounds_schedules_with_copies(seed: int) -> None:
    graph = with_host(seed)
    assert graph.host is not None
    problem = Problem(graph)
    peak = problem.evaluate(problem.captured).peak_bytes
    values = frozenset(copyable_values(graph, problem))
    program = OffloadProgram(graph, problem)
    try:
        for budget in (peak - 1, peak - 3):
            bound = program.bound(budget)
            if bound is not None:
                assert cheapest_with_copies(problem, budget, graph.host, values, bound - 1e-6) == math.inf
    finally:
        program.close()


def test_no_copy_is_made_in_vain() -> None:
    for seed in (3, 7, 18):
        graph = with_host(seed)
        budget = find_smallest(graph).peak_bytes
        found = solve(graph, budget, offload="host")
        assert found.schedule is not None
        steps = [step for step in found.schedule.steps if isinstance(step, Copy)]
        assert {step.tensor for step in steps if step.to_device} == offloaded(found.schedule)
