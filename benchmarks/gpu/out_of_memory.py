"""Training at batches that do not fit: eagerly, with ``budget="auto"``, and with ``strategy="remat"``.

The process may have 0.3 of the device. Whether the allocator's fragmentation lets a plan run is seen nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.markdown import difference, mib, milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, OK, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import plan_facts
from benchmarks.gpu.training import (
    OUT_OF_MEMORY,
    TRAINED,
    Fit,
    Training,
    against_eager,
    build,
    device_limit,
    fit,
    settled,
)
from lightning_remat.callbacks import RematCallback

NETWORKS = ("gpt2",)
SHARE = 0.3
"""Of the device."""

BATCHES = (0.5, 1.0, 1.5)
"""Times the network's batch: 8, 16 and 24 of GPT-2's."""

WAYS = EAGER, AUTO, STRATEGY = "eager", "auto", "strategy remat"
DRY_BUDGET = 0.6
"""Instead of ``"auto"`` in a dry run, which has no device to fill."""

PRECISION = "bf16-mixed"


def cases(settings: Settings) -> Sequence[Case]:
    """Each in a process of its own: what one leaves in the allocator would disturb the next."""
    ways = [(times, way) for times in BATCHES for way in (EAGER, AUTO)] + [(BATCHES[-1], STRATEGY)]
    found = []
    for name in settings.networks or NETWORKS:
        for times, way in ways:
            key = f"{name}, {times:g} x its batch, {way}"
            found.append(Case(key, key, {"network": name, "times": times, "way": way}))
    return found


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train within the share; where that worked, train eagerly with all of the device and compare."""
    workload = build(case["network"], settings)
    nondeterministic = settled(workload, settings)
    batch_size = max(1, int(case["times"] * len(workload.batch[0])))

    def eager() -> Fit:
        return fit(Training(workload, batch_size), settings, precision=PRECISION, nondeterministic=nondeterministic)

    budget = DRY_BUDGET if settings.dry else "auto"
    remat = RematCallback(budget, artifacts=False, **settings.options)
    with device_limit(SHARE, settings) as limit:
        if case["way"] == EAGER:
            ended = eager()
        else:
            ended = fit(
                Training(workload, batch_size),
                settings,
                [remat],
                precision=PRECISION,
                strategy="remat" if case["way"] == STRATEGY else "auto",
                nondeterministic=nondeterministic,
            )
    fields = {
        "description": workload.description,
        "nondeterministic": nondeterministic,
        "limit_bytes": limit,
        **ended.facts(),
        **plan_facts(remat.plan),
        "measured_peak_bytes": remat.measured_peak_bytes,
    }
    if case["way"] == EAGER:
        return result(**fields)
    if ended.left is None:
        return result(FAILED, **{**fields, "error": f"{ended.outcome}: {ended.error}"})
    if remat.failures or remat.plan is None:
        return result(FAILED, **{**fields, "error": f"not captured: {'; '.join(remat.failures) or 'no plan'}"})
    wrong, status, compared = against_eager(ended.left, eager(), eager)
    over = remat.measured_peak_bytes is not None and remat.measured_peak_bytes > remat.plan.budget_bytes
    return result(*wrong, *([OVER] if over else []), status=status or OK, **fields, **compared)


def table(results: Mapping[str, Result]) -> str:
    """A row a case."""
    columns = (
        "network, batch, way",
        "outcome",
        "limit",
        "budget",
        "predicted",
        "measured, less predicted",
        "reserved, predicted",
        "reserved, steady",
        "reserved, most",
        "ms a sample",
        "first step, s",
    )
    rows = []
    for key, one in results.items():
        seconds, batch = one.get("step_seconds"), one.get("batch_size")
        recoveries = one.get("recoveries")
        outcome = one.get("outcome", "") if one.get("outcome") in (TRAINED, OUT_OF_MEMORY) else ""
        rows.append(
            (
                " ".join([key, said(one)]).strip(),
                outcome + (f", {recoveries} repeated" if recoveries else ""),
                mib(one.get("limit_bytes")),
                mib(one.get("budget_bytes")),
                mib(one.get("predicted_peak_bytes")),
                difference(one.get("predicted_peak_bytes"), one.get("measured_peak_bytes")),
                mib(one.get("predicted_reserved_bytes")),
                mib(one.get("reserved_peak_bytes")),
                mib(one.get("reserved_most_bytes")),
                milliseconds(seconds / batch) if seconds and batch else "",
                f"{one['first_step_seconds']:.1f}" if one.get("first_step_seconds") else "",
            )
        )
    return markdown_table(columns, rows)


PART = Part(
    name="out-of-memory",
    title="Out of memory",
    about=f"A Lightning Trainer, {PRECISION}, AdamW, {SHARE:g} of the device; MiB. Where it trained, losses, gradients, "
    "parameters and random state are compared with eager's on the whole device.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=240,
    least_seconds=60,
)
