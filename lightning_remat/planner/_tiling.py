"""Which form of a step is planned: as it was captured, or with what can be computed in slices of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from lightning_remat.capture import CapturedGraph
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planner._plan import Plan
from lightning_remat.solvers import Problem, Status

AS_CHEAP = 0.01
"""A plan of the tiled form is taken unseen if it costs no more than this share over the step without rematerialization."""

WORTH_IT = 0.01
"""What the other form must save of the smallest peak to be taken with the budget ``"min"``, as a share."""

_Made = TypeVar("_Made")


def cheaper(
    plain: Callable[[], _Made],
    tiled: Callable[[], _Made],
    plan: Callable[[_Made], Plan],
    *,
    smallest: bool,
) -> _Made:
    """A plan for a step that does not fit as it is: that of the form in which it costs less.

    Args:
        plain: plans the step as it was captured.
        tiled: plans its tiled form, within the same bytes.
        plan: the plan of what these return.
        smallest: whether the smaller peak is wanted, and not the shorter step.

    Raises:
        InfeasibleBudgetError: where neither is found within the budget; it names the smaller of the two smallest budgets.
    """
    found: list[_Made] = []
    errors: list[InfeasibleBudgetError] = []
    for make in (tiled, plain):
        try:
            found.append(make())
        except InfeasibleBudgetError as error:
            errors.append(error)
            continue
        if not smallest and not over(plan(found[-1])) and plan(found[-1]).overhead <= AS_CHEAP:
            return found[-1]
    if not found:
        raise min(errors, key=lambda error: error.smallest_bytes)
    if smallest:
        return min(found, key=lambda made: plan(made).predicted_peak_bytes * (1 + WORTH_IT * (made is not found[-1])))
    return min(found, key=lambda made: (over(plan(made)), plan(made).predicted_seconds))


def over(plan: Plan) -> int:
    """Bytes by which a plan is over its budget: one of captured order is, where the verifier refuses what was found."""
    return max(0, plan.predicted_peak_bytes - plan.budget_bytes)


def beside_untiled(plan: Plan, captured: CapturedGraph) -> Plan:
    """The plan of a tiled form, with peak and time of the step without rematerialization as it was captured.

    Its lower bound is no higher than that: a schedule of the step as it was captured may be as fast.
    """
    if captured.untiled is None:
        return plan
    graph = captured.untiled.graph.replace(
        resident_bytes=plan.graph.resident_bytes, forward_resident_bytes=plan.graph.forward_resident_bytes
    )
    problem = Problem(graph)
    baseline = problem.evaluate(problem.captured)
    return dataclasses.replace(
        plan,
        untiled=graph,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        lower_bound_seconds=min(plan.lower_bound_seconds, baseline.seconds),
        status=Status.FEASIBLE if plan.predicted_seconds > baseline.seconds else plan.status,
        notes=(*plan.notes, "its losses over classes are computed in slices of rows"),
    )
