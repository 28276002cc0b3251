"""Predicted and measured peaks of a step, to the byte: every network at two budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import networks
from benchmarks.determinism import settle
from benchmarks.gpu.bits import BUDGETS, Precision, Training
from benchmarks.gpu.markdown import difference, mib, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, INFEASIBLE, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import infeasible, not_captured, peaks, plan_facts
from lightning_remat import InfeasibleBudgetError, rematerialize

TIME_LIMIT = 10.0
"""Seconds of the planner."""

WARM_UP = 2
"""Steps before the measured one: the first plans, and lazily made workspaces are there after the second."""


def cases(settings: Settings) -> Sequence[Case]:
    """Every network at both budgets; those of a network share a process, and its measured costs."""
    return [
        Case(f"{name}, {budget}", name, {"network": name, "budget": budget})
        for name in settings.networks or networks.networks()
        for budget in BUDGETS
    ]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Take a few scheduled steps, and measure one."""
    workload = networks.build(case["network"], "tiny" if settings.dry else "gpu", settings.device)
    module = workload.module
    made = Training(module, workload.batch, Precision())
    undetermined = settle(lambda: made.step(module, module))
    module.zero_grad(set_to_none=True)
    step = rematerialize(module, budget=case["budget"], **({"time_limit": TIME_LIMIT} | settings.options))
    try:
        for _ in range(WARM_UP):
            made.step(module, step)
    except InfeasibleBudgetError as error:
        return result(status=INFEASIBLE, description=workload.description, **infeasible(error))
    fields = {"description": workload.description, "nondeterministic": undetermined, **plan_facts(step.plan)}
    if reason := not_captured(step):
        return result(FAILED, error=reason, **fields)
    fields |= peaks(lambda: made.step(module, step), module, made.batch, made.device)
    return result(*([OVER] if fields["measured_peak_bytes"] > fields["budget_bytes"] else []), **fields)


def table(results: Mapping[str, Result]) -> str:
    """A row a network and budget."""
    columns = (
        "network, budget",
        "predicted",
        "measured, less predicted",
        "reserved, predicted",
        "measured, less predicted",
    )
    rows = []
    for key, one in results.items():
        predicted, reserved = one.get("predicted_peak_bytes"), one.get("predicted_reserved_bytes")
        rows.append(
            (
                " ".join([key, said(one)]).strip(),
                mib(predicted),
                difference(predicted, one.get("measured_peak_bytes")),
                mib(reserved),
                difference(reserved, one.get("reserved_peak_bytes")) or mib(one.get("reserved_peak_bytes")),
            )
        )
    return markdown_table(columns, rows)


PART = Part(
    name="peaks",
    title="Peaks",
    about="One scheduled step, sizes that people train, bfloat16. Predictions in MiB; measured ones less predicted in "
    "bytes, or in MiB where nothing was predicted. Reserved: by the allocator, from an empty cache.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=240,
    least_seconds=60,
    workers=3,
)
