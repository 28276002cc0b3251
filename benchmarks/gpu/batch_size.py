"""`RematBatchSizeFinder` on a share of the device: how long it looks, what it finds, and whether that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.batch_sizes import TimedFinder
from benchmarks.gpu.markdown import difference, mib, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import plan_facts
from benchmarks.gpu.training import Training, build, device_limit, fit, settled
from lightning_remat.callbacks import RematCallback

NETWORKS = ("gpt2", "resnet50")
SHARE = 0.3
"""Of the device."""

DRY_BUDGET = "8MiB"
"""Instead of ``"auto"`` in a dry run."""

STEPS = 2
"""Trained at the batch size that was found."""


def cases(settings: Settings) -> Sequence[Case]:
    """A network each."""
    return [Case(name, name, {"network": name}) for name in settings.networks or NETWORKS]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Find a batch size, and train on it."""
    workload = build(case["network"], settings)
    nondeterministic = settled(workload, settings)
    finder = TimedFinder()
    remat = RematCallback(DRY_BUDGET if settings.dry else "auto", artifacts=False, **settings.options)
    with device_limit(SHARE, settings) as limit:
        ended = fit(
            Training(workload, batch_size=2),
            settings,
            [remat, finder],
            precision="bf16-mixed",
            nondeterministic=nondeterministic,
            steps=STEPS,
        )
    found = finder.found
    fields = {
        "description": workload.description,
        "limit_bytes": limit,
        "finding_seconds": getattr(finder, "seconds", None),  # not there where the search ended in an error
        **ended.facts(),
    }
    if found is None or ended.left is None:
        return result(FAILED, **{**fields, "error": ended.error or "no batch size was found"})
    told = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "plan"}
    fields |= told | plan_facts(found.plan)
    return result(*([OVER] if found.measured_peak_bytes > found.plan.budget_bytes else []), **fields)


def table(results: Mapping[str, Result]) -> str:
    """A row a network."""
    columns = (
        "network",
        "found",
        "without",
        "search, s",
        "limit",
        "budget",
        "predicted",
        "measured, less predicted",
        "overhead",
    )
    rows = []
    for key, one in results.items():
        rows.append(
            (
                " ".join([key, said(one)]).strip(),
                one.get("batch_size"),
                one.get("without"),
                f"{one['finding_seconds']:.0f}" if one.get("finding_seconds") else "",
                mib(one.get("limit_bytes")),
                mib(one.get("budget_bytes")),
                mib(one.get("predicted_peak_bytes")),
                difference(one.get("predicted_peak_bytes"), one.get("measured_peak_bytes")),
                f"{one['overhead']:+.1%}" if one.get("overhead") is not None else "",
            )
        )
    return markdown_table(columns, rows)


PART = Part(
    name="batch-size",
    title="Batch sizes",
    about=f"RematBatchSizeFinder, bf16-mixed, AdamW, {SHARE:g} of the device; MiB. Without: the largest batch without "
    "rematerialization, as predicted.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=300,
    least_seconds=90,
)
