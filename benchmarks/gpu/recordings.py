"""Steps that are recorded as CUDA graphs beside eager mode and beside the same plan unrecorded: time, memory, bits."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import networks
from benchmarks.determinism import settle
from benchmarks.gpu.alone import alone, measuring_alone
from benchmarks.gpu.bits import Precision, Training
from benchmarks.gpu.markdown import mib, milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, MISMATCH, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import Left, cleared, in_turns, left_by, not_captured
from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat.measure import track_peak
from lightning_remat.runtime._recordings import WARM_UP

SIZES = {
    "gpt2": "cpu",
    "resnet18": "cpu",
    "mobilenet": "cpu",
    "vit": "cpu",
    "bert": "cpu",
    "unet": "cpu",
}
"""Networks, and their size unless others are asked for: small ones, since the time of large ones is the device's."""

UNRECORDED = WARM_UP + 2
"""First steps, of which the last one is recorded."""

STEPS, UNTIMED = 20, 2
TIME_LIMIT = 3.0
WAYS: Mapping[str, dict[str, Any]] = {
    "eager": {},
    "1.0": {"budget": 1.0, "solver": "no_remat"},
    "1.0, recorded": {"budget": 1.0, "solver": "no_remat", "cuda_graphs": True},
    "0.6, recorded": {"budget": 0.6, "cuda_graphs": True},
    "min, recorded": {"budget": "min", "cuda_graphs": True},
}


def cases(settings: Settings) -> Sequence[Case]:
    """A network each."""
    return [Case(name, name, {"network": name}) for name in settings.networks or SIZES]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train in every way from the same seed, compare what is left, and time steps that take turns."""
    size = "tiny" if settings.dry else SIZES.get(case["network"], "cpu")
    workload = networks.build(case["network"], size, settings.device)
    made = Training(workload.module, workload.batch, Precision())
    undetermined = settle(lambda: made.train(copy.deepcopy(workload.module), steps=1))
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    left: dict[str, Left] = {}
    errors = []
    for way, options in WAYS.items():
        before = cleared(made.device)
        module = copy.deepcopy(workload.module)
        call = _planned(module, options, settings)
        try:
            began = time.perf_counter()
            with measuring_alone():
                left[way] = _trained(made, module, call)
        except InfeasibleBudgetError as error:
            rows[way] = {"note": f"infeasible under {error.budget_bytes:,} bytes"}
            continue
        rows[way] = {"first_steps_seconds": time.perf_counter() - began}
        if call is not module and (reason := not_captured(call)):
            errors.append(f"{way}: {reason}")
        rows[way]["reserved_bytes"] = _reserved_in_a_step(made, module, call) - before
        steps[way] = lambda module=module, call=call: made.step(module, call)  # type: ignore[misc]
    with alone():
        timed = in_turns(steps, made.device, STEPS, UNTIMED)
    for way, seconds in timed.items():
        rows[way]["seconds"] = statistics.median(seconds)
        rows[way]["differing"] = left[way].differences(left["eager"])
    wrong = [MISMATCH] if any(row.get("differing") for row in rows.values()) else []
    fields = {"description": workload.description, "nondeterministic": undetermined, "rows": rows}
    return result(*wrong, *([FAILED] if errors else []), **fields, **({"error": "; ".join(errors)} if errors else {}))


def _planned(module: nn.Module, options: Mapping[str, Any], settings: Settings) -> Any:
    if not options:
        return module
    return rematerialize(module, **{"time_limit": TIME_LIMIT, **settings.options, **options})


def _trained(made: Training, module: nn.Module, call: Callable[..., torch.Tensor]) -> Left:
    """What a few seeded steps leave, recorded ones among them."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(UNRECORDED + 2):
        losses.append(made.step(module, call))
        optimizer.step()
    return left_by(module, losses)


def _reserved_in_a_step(made: Training, module: nn.Module, call: Callable[..., torch.Tensor]) -> int:
    """The most that is reserved in one more step: of a recorded one that is what it takes, not what counts as allocated."""
    cleared(made.device)
    with track_peak(made.device) as peak:
        made.step(module, call)
    return peak.reserved_bytes or 0


def table(results: Mapping[str, Result]) -> str:
    """A row for each network and way."""
    rows = []
    for key, one in results.items():
        ways = one.get("rows", {})
        eager = ways.get("eager", {}).get("seconds")
        for way, row in ways.items():
            seconds = row.get("seconds")
            ratio = f"{seconds / eager:.2f}" if seconds and eager else ""
            bits = "" if seconds is None else "**≠**" if row["differing"] else "="
            rows.append(
                (key, way, milliseconds(seconds), ratio, bits, mib(row.get("reserved_bytes")), row.get("note", ""))
            )
        if said(one):
            rows.append((key, said(one), "", "", "", "", ""))
    return markdown_table(("network", "budget", "ms", "of eager's", "bits", "reserved, MiB", ""), rows)


PART = Part(
    name="recordings",
    title="CUDA graphs",
    about="One training step of small networks in float32, in eager mode and by plans, without and with "
    f"`cuda_graphs=True`: median of {STEPS} steps that take turns. Bits: losses, gradients, parameters, buffers and random "
    "state of seeded training against eager's. Reserved: module, gradients and step.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=120,
    workers=6,
)
