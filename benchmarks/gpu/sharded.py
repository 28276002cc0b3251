"""FSDP2 on two devices: bits, peaks, and the time of planned steps beside FSDP2's own."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from benchmarks import networks
from benchmarks.gpu.alone import alone
from benchmarks.gpu.bits import Precision, Training
from benchmarks.gpu.markdown import mib, milliseconds, said
from benchmarks.gpu.markdown import table as markdown_table
from benchmarks.gpu.part import FAILED, MISMATCH, OVER, Case, Part, Result, Settings, result
from benchmarks.gpu.steps import Left, in_turns, peaks
from lightning_remat import rematerialize

NETWORKS = ("gpt2", "llama", "vit")
PROCESSES = 2
TRAINED, STEPS, UNTIMED = 8, 10, 2
"""Steps that are compared (the planner has measured its own by then), and those that are timed."""

TIME_LIMIT = 20.0

WAYS: Mapping[str, dict[str, Any]] = {
    "FSDP2": {},
    "1.0": {"budget": 1.0},
    "0.5": {"budget": 0.5},
    "min": {"budget": "min"},
}


def cases(settings: Settings) -> Sequence[Case]:
    """A network each; none where there are fewer devices than processes."""
    if not settings.dry and torch.cuda.device_count() < PROCESSES:
        return []
    return [Case(name, name, {"network": name}) for name in settings.networks or NETWORKS]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train in every way in two processes, compare what is left in each of them, and time steps that take turns."""
    with tempfile.TemporaryDirectory() as folder, alone():
        spawn(_process, (folder, case["network"], settings, WAYS), PROCESSES)
        each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    faults = sorted({fault for one in each for fault in one["faults"]})
    errors = [error for one in each for error in one["errors"]]
    fields = {"description": each[0]["description"], "rows": [one["rows"] for one in each]}
    return result(*faults, **fields, **({"error": "; ".join(errors)} if errors else {}))


def _process(rank: int, folder: str, network: str, settings: Settings, ways: Mapping[str, dict[str, Any]]) -> None:
    kind = torch.device(settings.device).type
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES
    )
    try:
        found = _measured(network, device, settings, ways)
    finally:
        distributed.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if kind == "cpu":  # gloo's threads may outlive the interpreter
        os._exit(0)


def _measured(
    network: str, device: torch.device, settings: Settings, ways: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    left: dict[str, Left] = {}
    faults, errors = set[str](), []
    description = ""
    for way, options in ways.items():
        workload = networks.build(network, "tiny" if settings.dry else "gpu", device)
        description, module = workload.description, workload.module
        for path in workload.blocks:
            fully_shard(module.get_submodule(path))
        fully_shard(module)
        made = Training(module, workload.batch, Precision())
        call: Any = module
        if options:
            call = rematerialize(module, **{"time_limit": TIME_LIMIT, **settings.options, **options})
        left[way] = made.train(module, call, TRAINED)
        step: Callable[[], object] = functools.partial(made.step, made.module, call)
        rows[way] = peaks(step, module, made.batch, device)
        if options:
            ran = [plan for plan, runs in zip(call.plans, call.runs, strict=True) if runs >= 3]
            if call.failures or not ran:
                errors.append(f"{way}: {'; '.join(call.failures) or 'no plan has run'}")
                faults.add(FAILED)
                continue
            budget = max(plan.budget_bytes for plan in ran)
            rows[way] |= {
                "plans": len(ran),
                "budget_bytes": budget,
                # Those of the first steps, in which not all graphs are known, have budgets of their own.
                "predicted_peak_bytes": max(p.predicted_allocated_bytes for p in ran if p.budget_bytes == budget),
            }
            if (rows[way]["measured_peak_bytes"] or 0) > budget:
                faults.add(OVER)
        rows[way]["differing"] = left[way].differences(left["FSDP2"])
        if rows[way]["differing"]:
            faults.add(MISMATCH)
        steps[way] = step
    for way, seconds in in_turns(steps, device, STEPS, UNTIMED).items():
        rows[way]["seconds"] = statistics.median(seconds)
    return {"description": description, "rows": rows, "faults": sorted(faults), "errors": errors}


def table(results: Mapping[str, Result]) -> str:
    """A row for each network and way: the slower process, and the larger peak."""
    rows = []
    for key, one in results.items():
        each: list[dict[str, Any]] = one.get("rows", [])
        for way in each[0] if each else ():
            ways = [process[way] for process in each]
            seconds = max(row.get("seconds", 0.0) for row in ways)
            whole = max(process["FSDP2"].get("seconds", 0.0) for process in each)
            wrong = any(row.get("differing") for row in ways)
            rows.append(
                (
                    key,
                    way,
                    milliseconds(seconds or None),
                    f"{seconds / whole:.3f}" if seconds and whole else "",
                    "" if way == "FSDP2" or "seconds" not in ways[0] else "**≠**" if wrong else "=",
                    mib(max(row["measured_peak_bytes"] for row in ways)),
                    mib(max((row.get("predicted_peak_bytes") or 0) for row in ways) or None),
                    mib(max((row.get("budget_bytes") or 0) for row in ways) or None),
                )
            )
        if said(one):
            rows.append((key, said(one), *[""] * 6))
    head = ("network", "budget", "ms", "of FSDP2's", "bits", "peak, MiB", "predicted", "budget, MiB")
    return markdown_table(head, rows)


PART = Part(
    name="sharded",
    title="FSDP2, two devices",
    about=f"One training step in bfloat16 of each of {PROCESSES} processes, each block a unit: median of {STEPS} steps that "
    f"take turns, as a ratio to FSDP2's own. Bits: what {TRAINED} seeded steps leave in each process. The larger of the peaks.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=400,
)
