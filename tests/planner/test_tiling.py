"""Which form of a step is planned, where it does not fit as it was captured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planner import Plan, RematConfig, make_plan
from lightning_remat.planner._tiling import AS_CHEAP, DEAR, cheapest
from tests.helpers.graphs import unit_chain


def a_plan(overhead: float, peak_bytes: int = 90, budget_bytes: int = 100) -> Plan:
    plan = make_plan(unit_chain(2), RematConfig(budget=1.0))
    return dataclasses.replace(
        plan,
        baseline_seconds=1.0,
        predicted_seconds=1.0 + overhead,
        predicted_peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
    )


def infeasible(smallest_bytes: int) -> Callable[[], Plan]:
    def make() -> Plan:
        raise InfeasibleBudgetError(100, smallest_bytes, "op", "module")

    return make


def chosen(
    tiled: Callable[[], Plan],
    plain: Callable[[], Plan],
    chains: Callable[[], Plan] | None = None,
    smallest: bool = False,
) -> Plan:
    forms = [(tiled, AS_CHEAP), (plain, DEAR), *([(chains, DEAR)] if chains is not None else [])]
    return cheapest(forms, lambda make, _below: make(), lambda plan: plan, smallest=smallest)


def never() -> Plan:
    raise AssertionError


def test_a_tiled_form_that_costs_next_to_nothing_is_taken_unseen() -> None:
    tiled = a_plan(0.005)
    assert chosen(lambda: tiled, never) is tiled


def test_the_cheaper_form_is_taken() -> None:
    cheap, dear = a_plan(0.2), a_plan(0.3)
    assert chosen(lambda: cheap, lambda: dear) is cheap
    assert chosen(lambda: dear, lambda: cheap) is cheap


def test_a_form_over_the_budget_is_not_taken_for_its_time() -> None:
    """The captured order, which is what runs where the verifier refuses what was found."""
    over, within = a_plan(0.0, peak_bytes=120), a_plan(0.4)
    assert chosen(lambda: over, lambda: within) is within
    assert chosen(lambda: within, lambda: over) is within


def test_the_form_that_is_feasible_is_taken() -> None:
    plan = a_plan(0.5)
    assert chosen(infeasible(110), lambda: plan) is plan
    assert chosen(lambda: plan, infeasible(110)) is plan
    with pytest.raises(InfeasibleBudgetError) as error:
        chosen(infeasible(110), infeasible(130))
    assert error.value.smallest_bytes == 110


def test_with_min_the_tiled_form_has_to_save_bytes() -> None:
    tiled, plain = a_plan(0.5, peak_bytes=995), a_plan(0.1, peak_bytes=1000)
    assert chosen(lambda: tiled, lambda: plain, smallest=True) is plain
    tiled, chains = a_plan(0.9, peak_bytes=900), a_plan(1.2, peak_bytes=899)
    assert chosen(lambda: tiled, lambda: plain, smallest=True) is tiled
    assert chosen(lambda: tiled, lambda: plain, lambda: chains, smallest=True) is tiled
    chains = a_plan(1.2, peak_bytes=800)
    assert chosen(lambda: tiled, lambda: plain, lambda: chains, smallest=True) is chains


def test_only_plans_of_nearly_the_smallest_peak_are_improved() -> None:
    plans = {
        "large": a_plan(0.1, peak_bytes=2000),
        "small": a_plan(0.5, peak_bytes=1000),
        "near": a_plan(0.6, peak_bytes=1005),
    }
    asked = []

    def improved(plan: Plan, below_seconds: float) -> Plan:
        asked.append((plan.predicted_peak_bytes, below_seconds))
        return dataclasses.replace(plan, predicted_seconds=plan.predicted_seconds - plan.predicted_peak_bytes / 4000)

    found = cheapest(
        ((name, DEAR) for name in plans),
        lambda name, _: plans[name],
        lambda plan: plan,
        smallest=True,
        improved=improved,
    )
    assert asked == [(1000, math.inf), (1005, 1.25)]
    assert found.predicted_peak_bytes == 1000 and found.predicted_seconds == 1.25


@pytest.mark.parametrize("overhead", [0.1, 0.5])
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize(("seconds", "planned"), [(1.005, ["tiled"]), (1.02, ["tiled", "whole"])])
def test_what_is_no_faster_as_a_whole_is_not_planned_so(
    seconds: float, planned: list[str], smallest: bool, overhead: float
) -> None:
    plan = a_plan(overhead)
    untiled = plan.graph
    ops = [dataclasses.replace(op, seconds=op.seconds * seconds) for op in untiled.ops]
    tiled = dataclasses.replace(plan, graph=untiled.replace(ops=ops), untiled=untiled)
    made = []

    def make(name: str, _below_seconds: float) -> Plan:
        made.append(name)
        return tiled if name == "tiled" else plan

    forms = [("tiled", AS_CHEAP), ("whole", DEAR), ("chains", DEAR)]
    cheapest(forms, make, lambda plan: plan, smallest=smallest, whole="whole".__eq__)
    assert made == planned + (["chains"] if smallest or overhead > DEAR else [])


@pytest.mark.parametrize("smallest", [False, True])
def test_each_form_is_told_what_the_cheapest_that_fits_takes(smallest: bool) -> None:
    plans = {"over": a_plan(0.1, peak_bytes=120), "dear": a_plan(0.5), "cheap": a_plan(0.3), "last": a_plan(0.4)}
    told = {}

    def make(name: str, below_seconds: float) -> Plan:
        told[name] = below_seconds
        return plans[name]

    cheapest(((name, DEAR) for name in plans), make, lambda plan: plan, smallest=smallest)
    below = [math.inf, math.inf, 1.5, 1.3] if not smallest else [math.inf] * 4
    assert list(told.values()) == below


def test_chains_run_in_slices_only_where_all_else_is_dear() -> None:
    chains, cheap, dear = a_plan(0.1), a_plan(0.15), a_plan(0.3)
    assert chosen(infeasible(110), lambda: cheap, never) is cheap
    assert chosen(lambda: cheap, lambda: dear, never) is cheap
    assert chosen(lambda: dear, lambda: dear, lambda: chains) is chains
    assert chosen(lambda: dear, lambda: dear, lambda: a_plan(0.4)) is dear
    assert chosen(infeasible(110), infeasible(110), lambda: chains) is chains
