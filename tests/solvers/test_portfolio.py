"""The block-wise greedy, the portfolio, and the search for the smallest peak."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.errors import BudgetError, SolverError
from lightning_remat.schedule import simulate, verify
from lightning_remat.solvers import (
    INTERRUPTED,
    OF_NO_USE,
    Answer,
    Problem,
    Status,
    available,
    find_smallest,
    options_of,
    register,
    solve,
)
from lightning_remat.solvers.bounds import _binding_moments
from lightning_remat.solvers.bounds._binding_moments import CLOSED_GAP
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence
from lightning_remat.solvers.portfolio import _auto
from tests.helpers.brute_force import cheapest_of_any_order
from tests.helpers.graphs import random_graph, unit_chain


@pytest.mark.long
@given(st.integers(0, 10_000), st.floats(0.3, 1.0))
@settings(max_examples=10)
def test_every_method_returns_what_it_says(seed: int, share: float) -> None:
    graph = random_graph(seed, 6, 6)
    problem = Problem(graph)
    top = problem.evaluate(problem.captured).peak_bytes
    budget = max(1, round(share * top))
    smallest = find_smallest(graph, 2.0)
    assert smallest.schedule is not None
    assert smallest.peak_bytes <= top
    assert simulate(graph, smallest.schedule).peak_bytes == smallest.peak_bytes
    found = {}
    for method in available():
        solution = found[method] = solve(graph, budget, method, 5.0)
        if solution.schedule is None:
            assert solution.status in (Status.INFEASIBLE, Status.TIMEOUT, Status.REFUSED)
            assert solution.gap == float("inf")
            assert budget < top, f"{method} found nothing although no rematerialization is needed"
        else:
            assert verify(graph, solution.schedule, budget) == solution.peak_bytes <= budget
            assert solution.seconds >= solution.lower_bound_seconds * (1 - 1e-9)
            assert solution.status is Status.OPTIMAL or solution.gap > 1e-9
            assert solution.status is Status.FEASIBLE or solution.gap <= 1e-3
        assert solution.bound_scope
        assert solution.status.sentence
    cheapest = min(found, key=lambda method: found[method].seconds)
    assert found["auto"].seconds <= found[cheapest].seconds * (1 + 1e-9), cheapest


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_auto_is_as_cheap_as_any_part_of_it_and_never_below_the_optimum(seed: int) -> None:
    graph = random_graph(seed, 4, 4, overwriting=False)
    problem = Problem(graph)
    budget = max(1, problem.evaluate(problem.captured).peak_bytes - 2)
    best = solve(graph, budget, "auto", 10.0)
    for method in ("greedy", "chen_sqrt", "milp"):
        assert best.seconds <= solve(graph, budget, method, 10.0).seconds + 1e-9
    optimum = cheapest_of_any_order(problem, budget)
    if best.schedule is not None:
        assert best.seconds >= optimum - 1e-9


def test_greedy_fills_the_budget_of_a_chain() -> None:
    chain = unit_chain(16)
    seconds = [solve(chain, budget, "greedy").seconds for budget in (8, 10, 12, 14, 16, 18)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 33  # nothing twice
    assert seconds[0] <= 46  # Checkmate's program: 43


def test_auto_says_what_happened() -> None:
    solution = solve(unit_chain(30), 12, "auto", 20.0)
    assert solution.method.removeprefix("auto:") in available()
    assert any(note.startswith("no_remat: infeasible") for note in solution.notes)
    assert any("milp: not tried" in note for note in solution.notes)
    assert any(note.startswith("chose ") for note in solution.notes)


def test_auto_improves_several_schedules_and_the_best_of_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_auto, "CLOSED_GAP", -1.0)  # as if nothing were proven
    graph = unit_chain(48)
    best = solve(graph, 14, "auto", 20.0, seconds=2.0)
    others = [solve(graph, 14, method, 20.0) for method in ("crossing", "rotor", "descent")]
    assert best.seconds <= min(other.seconds for other in others)
    improved = [note.split()[1] for note in best.notes if note.startswith("improved ")]
    assert len(set(improved)) > 1
    assert max(improved.count(method) for method in improved) > 1


@pytest.mark.parametrize("budget", [40, 100])
def test_auto_tries_no_more_on_a_larger_graph_once_a_bound_is_near(budget: int) -> None:
    graph = unit_chain(120).replace(forward_outputs=(120,))
    best = solve(graph, budget, "auto")
    tried = {note.split(":")[0] for note in best.notes if ":" in note}
    assert {"crossing", "moments"} <= tried and not tried & {"rotor", "descent", "hiremate"}
    assert best.gap < CLOSED_GAP
    assert best.seconds <= solve(graph, budget, "rotor").seconds


def test_auto_tries_the_others_on_a_larger_graph_where_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_auto, "CLOSED_GAP", -1.0)
    solution = solve(unit_chain(110).replace(forward_outputs=(110,)), 40, "auto", seconds=2.0)
    assert any(note.startswith("rotor:") for note in solution.notes)


@pytest.mark.parametrize("layers", [24, 120])
def test_auto_ends_once_no_schedule_can_be_cheap_enough(layers: int) -> None:
    graph = unit_chain(layers).replace(forward_outputs=(layers,))
    budget = layers // 2
    best = solve(graph, budget, "auto")
    early = solve(graph, budget, "auto", below_seconds=best.seconds - 2)
    assert OF_NO_USE in early.notes and early.lower_bound_seconds >= best.seconds - 2
    assert not any(note.startswith(("rotor", "improved")) for note in early.notes)
    assert early.schedule is not None and verify(graph, early.schedule, budget) <= budget
    whole = solve(graph, budget, "auto", below_seconds=best.seconds + 1)
    assert OF_NO_USE not in whole.notes and whole.seconds == best.seconds
    assert "below_seconds" not in whole.options


def improving_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that each call of `improve` has from then on; none of them finds anything."""
    seconds: list[float] = []

    def unchanged(problem: Problem, sequence: NodeSequence, budget: int, deadline: float, seed: int) -> Any:
        seconds.append(deadline - clock())
        return sequence, 1

    monkeypatch.setattr(_auto, "improve", unchanged)
    return seconds


@pytest.mark.parametrize("budget", [40, 70])
def test_where_the_gap_is_closed_the_time_for_improving_is_in_proportion_to_it(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = unit_chain(120).replace(forward_outputs=(120,))
    gap = solve(graph, budget, "crossing").gap
    monkeypatch.setattr(_auto, "LEAST_GAP", gap / 2)
    monkeypatch.setattr(_auto, "CLOSED_GAP", 4 * gap)
    monkeypatch.setattr(_binding_moments, "likely", lambda _problem, _budget: [])  # no better bound
    seconds = improving_seconds(monkeypatch)
    assert solve(graph, budget, "auto").gap == pytest.approx(gap, rel=1e-3)
    assert len(seconds) == 1 and seconds[0] <= _auto.LAST_SECONDS / 4
    seconds.clear()
    monkeypatch.setattr(_auto, "LEAST_GAP", 2 * gap)
    solve(graph, budget, "auto")
    assert not seconds


def test_just_over_the_closed_gap_the_search_takes_little_longer_than_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(120).replace(forward_outputs=(120,))
    gap = solve(graph, 40, "crossing").gap
    monkeypatch.setattr(_binding_moments, "likely", lambda _problem, _budget: [])  # no better bound
    monkeypatch.setattr(_binding_moments, "branch", lambda *_args: 0.0)
    seconds = improving_seconds(monkeypatch)
    for module in (_auto, _binding_moments):
        monkeypatch.setattr(module, "CLOSED_GAP", gap / 1.01)
        monkeypatch.setattr(module, "OPEN_GAP", 3 * gap)
    monkeypatch.setattr(_auto, "IMPROVING_GAP", 1e3)  # what is in proportion to the gap itself is tested elsewhere
    solution = solve(graph, 40, "auto", 60.0, seconds=40.0)
    assert solution.gap == pytest.approx(gap, rel=1e-3)
    assert any(note.startswith("rotor:") for note in solution.notes)
    assert seconds and max(seconds) <= _auto.LAST_SECONDS
    seconds.clear()
    for module in (_auto, _binding_moments):
        monkeypatch.setattr(module, "OPEN_GAP", gap / 1.005)
    solve(graph, 40, "auto", 60.0, seconds=40.0)
    assert max(seconds) > 4 * _auto.LAST_SECONDS


def test_effort_grows_with_the_gap() -> None:
    closed, wide = _binding_moments.CLOSED_GAP, _binding_moments.OPEN_GAP
    gaps = [0.0, closed, (closed + wide) / 2, wide, math.inf]
    assert [_binding_moments.effort(gap) for gap in gaps] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])


@pytest.mark.long
def test_auto_falls_back_to_treewidth_where_the_others_find_nothing() -> None:
    solution = solve(unit_chain(40), 5, "auto", 30.0)
    if solution.schedule is None:
        assert any(note.startswith("treewidth:") for note in solution.notes)
    else:
        assert solution.peak_bytes <= 5


def test_unknown_methods_options_and_budgets_say_what_is_accepted() -> None:
    chain = unit_chain(2)
    with pytest.raises(SolverError, match="unknown solver 'gurobi': choose one of ap_greedy, "):
        solve(chain, 5, "gurobi")
    with pytest.raises(SolverError, match=r"'greedy' has no option 'gap'; it takes: attempts"):
        solve(chain, 5, "greedy", gap=0.1)
    for budget in (0, -1, 2.5, True):
        with pytest.raises(BudgetError, match="positive whole number of bytes"):
            solve(chain, budget, "greedy")  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="positive number of seconds"):
        solve(chain, 5, "greedy", 0.0)
    with pytest.raises(SolverError, match="registered already"):
        register("greedy")(lambda problem, budget, *, deadline: None)  # type: ignore[arg-type, return-value]
    assert options_of("auto")["exact_seconds"] == 5.0


def interrupting(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while ``auto`` runs ``method``."""
    run = _auto.run_algorithm

    def interrupted(name: str, *args: object, **options: object) -> Answer:
        if name == method:
            raise KeyboardInterrupt
        return run(name, *args, **options)

    monkeypatch.setattr(_auto, "run_algorithm", interrupted)


def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting("milp", monkeypatch)
    solution = solve(unit_chain(8), 5, "auto")
    assert solution.schedule is not None and solution.peak_bytes <= 5
    assert INTERRUPTED in solution.notes
    assert not any(note.startswith("improved") for note in solution.notes)


def test_an_interrupt_before_anything_was_found_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting("no_remat", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        solve(unit_chain(8), 5, "auto")


@pytest.mark.long
def test_an_interrupt_while_improving_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_auto, "improve", interrupted)
    monkeypatch.setattr(_auto, "CLOSED_GAP", -1.0)
    solution = solve(unit_chain(24), 8, "auto", exact_up_to=0, seconds=0.5)
    assert solution.schedule is not None and INTERRUPTED in solution.notes


def test_a_known_schedule_leaves_most_of_the_time_for_improving_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(30)
    known = find_smallest(graph, 2.0)
    begun, limits = time.monotonic(), []

    def nothing(method: str, problem: Problem, budget_bytes: int, deadline: float) -> Answer:
        if method != "no_remat":
            limits.append(deadline - begun)
        return Answer(None, Status.INFEASIBLE)

    def unchanged(problem: Problem, sequence: NodeSequence, budget: int, deadline: float, seed: int) -> Any:
        assert deadline - begun == pytest.approx(1000.0, abs=50.0)
        return sequence, 1

    monkeypatch.setattr(_auto, "run_algorithm", nothing)
    monkeypatch.setattr(_auto, "improve", unchanged)
    solution = solve(graph, known.peak_bytes, time_limit=1000.0, known=known, seconds=1000.0)
    assert any(note.startswith("improved known") for note in solution.notes)
    assert max(limits) == pytest.approx(400.0, abs=50.0)


@pytest.mark.parametrize("method", ["auto", "no_remat"])
def test_a_known_solution_is_gone_on_from_and_kept_where_nothing_is_cheaper(method: str) -> None:
    graph = unit_chain(60)
    known = solve(graph, 24, "rotor")
    assert known.schedule is not None
    found = solve(graph, 24, method, known=known)
    assert found.schedule is not None and found.seconds <= known.seconds
    assert verify(graph, found.schedule, 24) <= 24
    assert "known" not in found.options
    if method == "no_remat":
        assert found.schedule == known.schedule and found.status is Status.FEASIBLE
