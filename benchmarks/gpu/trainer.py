"""Lightning runs of a transformer and of a convolutional network against eager ones: at ``"auto"``, and at shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.markdown import difference, mib, milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, OK, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import plan_facts
from benchmarks.gpu.training import Fit, Training, against_eager, build, device_limit, fit, settled
from lightning_remat.callbacks import RematCallback

NETWORKS = ("gpt2", "resnet50")
WAYS: tuple[tuple[str, float | str], ...] = (("bf16-mixed", "auto"), ("bf16-mixed", 0.5), ("32-true", 0.6))
"""Precisions and budgets."""

TIGHT = 0.75
"""Of eager's allocated peak: all that the process may have at ``"auto"``, so that the plain step does not fit."""


def cases(settings: Settings) -> Sequence[Case]:
    """Each in a process of its own: an earlier one's allocations would disturb it."""
    found = []
    for name in settings.networks or NETWORKS:
        for precision, budget in WAYS:
            key = f"{name}, {precision}, {budget}"
            found.append(Case(key, key, {"network": name, "precision": precision, "budget": budget}))
    return found


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train eagerly, then with the callback, on half of the network's batch, and compare."""
    workload = build(case["network"], settings)
    nondeterministic = settled(workload, settings)
    batch_size = max(1, len(workload.batch[0]) // 2)
    precision, budget = case["precision"], case["budget"]

    def eager() -> Fit:
        return fit(Training(workload, batch_size), settings, precision=precision, nondeterministic=nondeterministic)

    right = eager()
    share = 1.0
    if budget == "auto":
        budget = TIGHT if settings.dry else budget
        if right.allocated_peak_bytes:
            memory = torch.cuda.get_device_properties(torch.device(settings.device)).total_memory
            share = TIGHT * right.allocated_peak_bytes / memory
    remat = RematCallback(budget, artifacts=False, **settings.options)
    with device_limit(share, settings) as limit:
        ended = fit(
            Training(workload, batch_size),
            settings,
            [remat],
            precision=precision,
            nondeterministic=nondeterministic,
        )
    fields = {
        "description": workload.description,
        "nondeterministic": nondeterministic,
        "limit_bytes": limit,
        "eager_step_seconds": right.step_seconds,
        "eager_allocated_peak_bytes": right.allocated_peak_bytes,
        **ended.facts(),
        **plan_facts(remat.plan),
        "measured_peak_bytes": remat.measured_peak_bytes,
    }
    if ended.left is None or right.left is None:
        who = "eager" if right.left is None else case["budget"]
        how = right if right.left is None else ended
        return result(FAILED, **{**fields, "error": f"{who}: {how.outcome}: {how.error}"})
    if remat.failures or remat.plan is None:
        return result(FAILED, **{**fields, "error": f"not captured: {'; '.join(remat.failures) or 'no plan'}"})
    wrong, status, compared = against_eager(ended.left, right, eager)
    over = remat.measured_peak_bytes is not None and remat.measured_peak_bytes > remat.plan.budget_bytes
    return result(*wrong, *([OVER] if over else []), status=status or OK, **fields, **compared)


def table(results: Mapping[str, Result]) -> str:
    """A row a case."""
    columns = (
        "network, precision, budget",
        "allocated, eager",
        "allocated",
        "reserved",
        "limit",
        "measured, less predicted",
        "ms, eager",
        "ms",
    )
    rows = []
    for key, one in results.items():
        rows.append(
            (
                " ".join([key, said(one)]).strip(),
                mib(one.get("eager_allocated_peak_bytes")),
                mib(one.get("allocated_peak_bytes")),
                mib(one.get("reserved_peak_bytes")),
                mib(one.get("limit_bytes")),
                difference(one.get("predicted_peak_bytes"), one.get("measured_peak_bytes")),
                milliseconds(one.get("eager_step_seconds")),
                milliseconds(one.get("step_seconds")),
            )
        )
    return markdown_table(columns, rows)


PART = Part(
    name="trainer",
    title="Lightning",
    about="Losses, gradients, parameters, buffers and random state compared with eager's, bit for bit; MiB. "
    f'At "auto" the process has {TIGHT:g} of eager\'s allocated peak.',
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=240,
    least_seconds=60,
)
