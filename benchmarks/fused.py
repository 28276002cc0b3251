"""What fused runs save: steps with each run of elementwise ops as one compiled kernel, against eager mode and against the ops.

    python -m benchmarks.fused                          # GPT-2, BERT, ResNet-50 and U-Net: some ten minutes
    python -m benchmarks.fused --network gpt2 --threads 2

Each network trains three steps in eager mode and fused, from the same state, and all bits are compared. Then steps (forward
and backward) in eager mode, as captured (a budget of 1.0: nothing is computed twice), and fused within the same budget take
turns in one process. On one thread, which is the default, their time is that of the thread on the processor, which other
processes disturb least. A ratio is the median over steps that are run one after the other. Peaks are the allocator's.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import torch
from rich.console import Console
from torch import nn

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.results import RESULTS, stamp, write
from lightning_remat import Rematerialized, rematerialize
from lightning_remat.exactness import same_bits
from lightning_remat.measure import held_bytes, peak_memory

PACKAGES = ("lightning_remat", "torch", "transformers", "pytorchcv")
NETWORKS = ("gpt2", "bert", "resnet50", "unet")
WARM_UP = 2
"""Steps of each that are not timed."""

Step = Callable[..., torch.Tensor]


def trained(module: nn.Module, step: Step, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Losses, gradients and buffers of three steps of training, dropout included."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    found: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.detach())
        found += [one.grad.clone() for one in module.parameters() if one.grad is not None]
        found += [one.clone() for one in module.buffers()]
        optimizer.step()
    return found


def measured(name: str, size: str, rounds: int, fuse: str) -> dict[str, Any]:
    """Steps of a network in eager mode, as captured, and fused, in turns.

    Returns:
        Whether all bits are equal; seconds of each way's steps (medians) and the ratios to eager's with their quartiles;
        peaks and budget in bytes, and how many ops are runs of how many kernels.
    """
    workload = networks.build(name, size)
    module, batch = workload.module, workload.batch
    twin = copy.deepcopy(module)
    options: dict[str, Any] = {"budget": 1.0, "time_limit": 10.0}
    steps: dict[str, Rematerialized] = {
        "captured": rematerialize(module, **options),
        "fused": rematerialize(module, fuse=fuse, **options),
    }
    exact = all(
        map(same_bits, trained(module, steps["fused"], batch), trained(twin, twin, batch)),
    )
    ways: dict[str, Step] = {"eager": module, **steps}
    alone = torch.get_num_threads() == 1

    def run(way: str) -> float:
        module.zero_grad(set_to_none=True)
        started = time.thread_time() if alone else time.perf_counter()
        ways[way](*batch).backward()  # type: ignore[no-untyped-call]
        return (time.thread_time() if alone else time.perf_counter()) - started

    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM_UP + rounds):
        for way in ways:
            found = run(way)
            if number >= WARM_UP:
                times[way].append(found)
    ratios = {way: [a / b for a, b in zip(times[way], times["eager"], strict=True)] for way in steps}
    ratios["fused to captured"] = [a / b for a, b in zip(times["fused"], times["captured"], strict=True)]
    for step in steps.values():
        if step.failures or len(step.plans) != 1:
            raise RuntimeError(f"{name} is not captured as one graph: {step.failures}")
    plan = steps["fused"].plans[0]
    kernels = [op.target for op in plan.graph.ops if op.target.startswith("fused_run")]
    parameters = held_bytes(module, batch)
    peaks = {way: _peak(module, way_step, batch) for way, way_step in ways.items()}
    return {
        "network": name,
        "exact": exact,
        "seconds": {way: statistics.median(found) for way, found in times.items()},
        "ratios": {way: statistics.median(found) for way, found in ratios.items()},
        "quartiles": {way: statistics.quantiles(found, n=4)[::2] for way, found in ratios.items()},
        "runs": len(kernels),
        "kernels": len(set(kernels)),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_ratio": plan.predicted_seconds / plan.baseline_seconds,
        "peak_bytes": {way: parameters + peak for way, peak in peaks.items()},
    }


def _peak(module: nn.Module, step: Step, batch: tuple[torch.Tensor, ...]) -> int:
    """The peak of a step beside parameters, buffers and batch: old gradients live through the forward."""
    gradients = held_bytes([one.grad for one in module.parameters()])

    def run() -> None:
        loss = step(*batch)
        module.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]

    return gradients + peak_memory(run, "cpu")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The results as a table."""
    head = ["network", "bits", "eager, s", "as captured", "fused", "fused to captured", "runs (kernels)"]
    head += ["peak eager, MiB", "peak fused", "budget", "predicted"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        ratios = [f"{row['ratios'][way]:.3f}" for way in ("captured", "fused", "fused to captured")]
        cells = [row["network"], "equal" if row["exact"] else "differ", f"{row['seconds']['eager']:.3f}", *ratios]
        cells.append(f"{row['runs']} ({row['kernels']})")
        peaks = [
            row["peak_bytes"]["eager"],
            row["peak_bytes"]["fused"],
            row["budget_bytes"],
            row["predicted_peak_bytes"],
        ]
        lines.append("| " + " | ".join([*cells, *(f"{peak / 2**20:.1f}" for peak in peaks)]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Time the networks, print a table, and write JSON and Markdown."""
    parser = command_line(__doc__)
    add_networks(parser, networks.networks())
    parser.add_argument("--size", choices=networks.SIZES, default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each way")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fuse", choices=("exact", "fast"), default="exact")
    parser.add_argument("--out", type=Path, default=RESULTS / "fused-cpu.json", help="the table goes beside it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    rows = []
    for name in options.networks or NETWORKS:
        rows.append(measured(name, options.size, options.rounds, options.fuse))
        console.print(f"{name}: {', '.join(f'{ratio:.3f} {way}' for way, ratio in rows[-1]['ratios'].items())}")
    table = markdown(rows)
    print(table)
    data = {"format": "lightning_remat.fused", "version": 1, "threads": options.threads, "fuse": options.fuse}
    write(options.out, {**data, **stamp(PACKAGES, "cpu"), "networks": rows})
    options.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
