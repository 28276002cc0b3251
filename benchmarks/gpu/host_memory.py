"""Tensors that wait in the host's memory: bits, peaks, and whether steps take as much longer as their plans say."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import networks
from benchmarks.determinism import settle
from benchmarks.gpu.alone import alone, measuring_alone
from benchmarks.gpu.bits import Precision, Training
from benchmarks.gpu.markdown import mib, milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, MISMATCH, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import Left, cleared, in_turns, left_by, not_captured, peaks
from lightning_remat import InfeasibleBudgetError, rematerialize

NETWORKS = ("gpt2", "unet", "vit", "resnet50")
TRAINED, STEPS, UNTIMED = 3, 10, 2
TIME_LIMIT = 20.0
WAYS: Mapping[str, dict[str, Any]] = {
    "eager": {},
    "1.0": {"budget": 1.0, "solver": "no_remat"},
    "0.6": {"budget": 0.6},
    "0.6, host": {"budget": 0.6, "offload": "host"},
    "min": {"budget": "min"},
    "min, host": {"budget": "min", "offload": "host"},
}


def cases(settings: Settings) -> Sequence[Case]:
    """A network each."""
    return [Case(name, name, {"network": name}) for name in settings.networks or NETWORKS]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train in every way from the same seed, compare what is left, and time steps that take turns."""
    workload = networks.build(case["network"], "tiny" if settings.dry else "gpu", settings.device)
    made = Training(workload.module, workload.batch, Precision())
    undetermined = settle(lambda: made.train(copy.deepcopy(workload.module), steps=1))
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    left: dict[str, Left] = {}
    faults, errors = set[str](), []
    for way, options in WAYS.items():
        cleared(made.device)
        module = copy.deepcopy(workload.module)
        call: Any = module
        if options:
            call = rematerialize(module, **{"time_limit": TIME_LIMIT, **settings.options, **options})
        try:
            with measuring_alone():
                left[way] = _trained(made, module, call)
        except InfeasibleBudgetError as error:
            rows[way] = {"note": f"infeasible under {error.budget_bytes:,} bytes"}
            continue
        rows[way] = peaks(lambda m=module, c=call: made.step(m, c), module, made.batch, made.device)  # type: ignore[misc]
        if options:
            if reason := not_captured(call):
                errors.append(f"{way}: {reason}")
                continue
            plan = call.plan
            rows[way] |= {
                "predicted_ratio": plan.predicted_seconds / plan.baseline_seconds,
                "predicted_peak_bytes": plan.predicted_allocated_bytes,
                "host_bytes": plan.host_bytes,
                "copies": plan.copies,
            }
            if (rows[way]["measured_peak_bytes"] or 0) > plan.budget_bytes:
                faults.add(OVER)
        steps[way] = lambda module=module, call=call: made.step(module, call)  # type: ignore[misc]
    with alone():
        timed = in_turns(steps, made.device, STEPS, UNTIMED)
    for way, seconds in timed.items():
        rows[way] |= {
            "seconds": statistics.median(seconds),
            "differing": left[way].differences(left["eager"]),
        }
        if rows[way]["differing"]:
            faults.add(MISMATCH)
    fields = {"description": workload.description, "nondeterministic": undetermined, "rows": rows}
    if errors:
        return result(*sorted(faults), FAILED, **fields, error="; ".join(errors))
    return result(*sorted(faults), **fields)


def _trained(made: Training, module: torch.nn.Module, call: Callable[..., torch.Tensor]) -> Left:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(TRAINED):
        losses.append(made.step(module, call))
        optimizer.step()
    return left_by(module, losses)


def table(results: Mapping[str, Result]) -> str:
    """A row for each network and way."""
    rows = []
    for key, one in results.items():
        ways = one.get("rows", {})
        whole = ways.get("1.0", {}).get("seconds")
        for way, row in ways.items():
            seconds, predicted = row.get("seconds"), row.get("predicted_ratio")
            ratio = seconds / whole if seconds and whole else None
            rows.append(
                (
                    key,
                    way,
                    milliseconds(seconds),
                    f"{ratio:.3f}" if ratio else "",
                    f"{predicted:.3f}" if predicted else "",
                    "" if seconds is None else "**≠**" if row["differing"] else "=",
                    mib(row.get("measured_peak_bytes")),
                    mib(row.get("predicted_peak_bytes")),
                    f"{mib(row['host_bytes'])} ({row['copies']})" if row.get("copies") else "",
                    row.get("note", ""),
                )
            )
        if said(one):
            rows.append((key, said(one), *[""] * 8))
    head = (
        "network",
        "budget",
        "ms",
        "of 1.0's",
        "predicted",
        "bits",
        "peak, MiB",
        "predicted",
        "on the host (copies)",
        "",
    )
    return markdown_table(head, rows)


PART = Part(
    name="host-memory",
    title="Host memory",
    about=f'One training step in bfloat16, within the same budget without and with `offload="host"`: median of {STEPS} steps '
    "that take turns, as a ratio to the same step with nothing computed again or copied, and what the plan says. Bits: "
    "losses, gradients, parameters, buffers and random state of seeded training against eager's.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=400,
    workers=4,
)
