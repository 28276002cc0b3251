"""Plans of the graphs of one step, with that step as a whole."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from lightning_remat.planner._plan import Plan
from lightning_remat.planner._together import kept_bytes
from lightning_remat.schedule import WholeStep, simulate
from lightning_remat.schedule._whole_step import halves, joined


def with_whole(plans: Sequence[Plan]) -> list[Plan]:
    """Plans that `plan_together` made, with the step as a whole where they are several."""
    if len(plans) == 1:
        return list(plans)
    baselines = [(plan, plan.baseline_schedule()) for plan in plans]
    # What each keeps more where it evaluates nothing again is held while the later ones run.
    more = [simulate(plan.as_captured, plain).saved_bytes - kept_bytes(plan) for plan, plain in baselines]
    beside = itertools.accumulate(more, initial=0)
    before, ahead = joined(
        [halves(plan.as_captured, plain, held) for (plan, plain), held in zip(baselines, beside, strict=False)]
    )
    after, ahead_after = joined([halves(plan.graph, plan.schedule) for plan in plans])
    elsewhere = plans[0].predicted_peak_bytes
    if elsewhere > after.most_bytes:  # of code that is not captured, before the first graph or after it
        before, after = before.behind(elsewhere), after.behind(elsewhere)
        ahead, ahead_after = ahead + 1, ahead_after + 1
    whole = WholeStep(len(plans), before, after, (ahead, ahead_after))
    return [dataclasses.replace(plan, whole=whole) for plan in plans]
