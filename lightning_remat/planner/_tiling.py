"""Which form of a step is planned: as it was captured, with what can be computed in slices, or with runs of ops fused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lightning_remat.capture import CapturedGraph, Fusing, Tiling
from lightning_remat.errors import InfeasibleBudgetError
from lightning_remat.planner._plan import Plan
from lightning_remat.solvers import Problem, Status

AS_CHEAP = 0.01
"""A plan is taken before other forms are planned if it costs no more than this share over the captured step."""

DEAR = 0.2
"""The forms in which products of heads run in slices, and chains of ops, which run a second time in the backward, are planned
if the others cost more than this share."""

WORTH_IT = 0.01
"""With the budget ``"min"``, the share by which a peak may be over the smallest of all forms, where that takes less time."""

_TOLD: dict[Tiling | Fusing, str] = {
    Tiling.LOSSES: "its losses over classes are computed in slices of rows",
    Tiling.HEADS: "its losses over classes, and the products that these are of, are computed in slices",
    Tiling.CHAINS: "chains of its ops are computed in slices, and again in the backward",
    Fusing.EXACT: "runs of its ops are one kernel each",
    Fusing.FAST: "runs of its ops are one kernel each, and bits may differ from eager mode's",
}
"""What is said of a plan of each form."""

OF_THIS_FORM = ", of the step in this form"
"""Added to the scope of a bound on a plan of another form than the captured one."""

_Form = TypeVar("_Form")
_Made = TypeVar("_Made")


def forms(
    captured: CapturedGraph, *, fits: bool, tiled: bool = True, fusing: Fusing | None = None
) -> Iterator[tuple[CapturedGraph, float]]:
    """The forms in which to plan a step, each made when it is asked for.

    Args:
        captured: the step as it was captured.
        fits: whether it is within the budget so: then none is in slices.
        tiled: whether any may be.
        fusing: how runs of ops are fused, if they are: each form comes so first.

    Yields:
        A form, and the share over the step without rematerialization up to which a plan is good enough to ask for no more.
        (`cheapest` leaves the captured form out behind one in slices that is as fast.)
    """
    for form, good_enough in _in_slices(captured) if tiled and not fits else [(captured, 0.0)]:
        fused = None if fusing is None else form.fused(fusing)
        if fused is not None:
            yield fused, good_enough
        yield form, good_enough


def _in_slices(captured: CapturedGraph) -> Iterator[tuple[CapturedGraph, float]]:
    losses = captured.tiled(Tiling.LOSSES)
    if losses is not None:
        yield losses, AS_CHEAP
    yield captured, DEAR
    for tiling in (Tiling.HEADS, Tiling.CHAINS):
        form = captured.tiled(tiling)
        if form is not None:
            yield form, DEAR


def cheapest(
    forms: Iterable[tuple[_Form, float]],
    make: Callable[[_Form, float], _Made],
    plan: Callable[[_Made], Plan],
    *,
    smallest: bool,
    improved: Callable[[_Made, float], _Made] = lambda made, _below_seconds: made,
    whole: Callable[[_Form], bool] = lambda _form: False,
) -> _Made:
    """A plan for a step: that of the form in which it costs least.

    Args:
        forms: see the function of that name.
        make: plans a form, given the seconds a step of the cheapest plan so far: one that takes no less is of no use.
        plan: the plan of what it returns.
        smallest: whether the smallest peak is wanted, and not the shortest step.
        improved: makes a plan of such a peak cheaper within it, given the seconds a step of the cheapest so far; asked of
            forms whose peak is near the smallest of all.
        whole: whether nothing of a form is in slices: it is not planned then behind one in slices whose ops take no longer:
            each of its schedules is one of that form too, in no more memory.

    Raises:
        InfeasibleBudgetError: where none is found within the budget; it names the smallest of the smallest budgets.
    """
    found: list[_Made] = []
    errors: list[InfeasibleBudgetError] = []
    for form, good_enough in forms:
        if not (whole(form) and any(as_fast(plan(made)) for made in found)):
            try:
                fit = [plan(made).predicted_seconds for made in found if not (smallest or over(plan(made)))]
                found.append(make(form, min(fit, default=math.inf)))
            except InfeasibleBudgetError as error:
                errors.append(error)
        if not smallest and any(not over(plan(made)) and plan(made).overhead <= good_enough for made in found):
            break
    if not found:
        raise min(errors, key=lambda error: error.smallest_bytes)
    if smallest:
        least = min(plan(made).predicted_peak_bytes for made in found)
        near = [made for made in found if plan(made).predicted_peak_bytes <= (1 + 2 * WORTH_IT) * least]
        best: list[_Made] = []
        for made in sorted(near, key=lambda made: plan(made).predicted_seconds):
            better = improved(made, min([plan(one).predicted_seconds for one in best], default=math.inf))
            best += [better] if plan(better).predicted_peak_bytes <= (1 + WORTH_IT) * least else []
        return min(best or near, key=lambda made: plan(made).predicted_seconds)
    return min(found, key=lambda made: (over(plan(made)), plan(made).predicted_seconds))


def as_fast(plan: Plan) -> bool:
    """Whether the ops of a form in slices take no longer than those of the step as it was captured, each evaluated once."""
    if plan.untiled is None:
        return False
    sliced, whole = (sum(op.seconds for op in graph.ops) for graph in (plan.graph, plan.untiled))
    return sliced <= (1 + AS_CHEAP) * whole


def over(plan: Plan) -> int:
    """Bytes by which a plan is over its budget: one of captured order is, where the verifier refuses what was found."""
    return max(0, plan.predicted_peak_bytes - plan.budget_bytes)


def beside_untiled(plan: Plan, captured: CapturedGraph) -> Plan:
    """The plan of another form, with peak and time of the step without rematerialization as it was captured.

    Its lower bound speaks of schedules of its own form (`of_this_form`).
    """
    if captured.untiled is None:
        return plan
    told = (_TOLD[how] for how in (captured.tiling, captured.fusing) if how is not None)
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
        bound_scope=of_this_form(plan.bound_scope),
        status=Status.FEASIBLE if plan.predicted_seconds > baseline.seconds else plan.status,
        notes=(*plan.notes, *told),
    )


def of_this_form(scope: str) -> str:
    """The scope of a lower bound, in words, for a plan of another form than the captured one."""
    return scope if not scope or scope.endswith(OF_THIS_FORM) else scope + OF_THIS_FORM
