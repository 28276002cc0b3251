"""What a step costs beside its kernels: tiny networks, whose steps are Python, dispatch and autograd almost alone.

    python -m benchmarks.launches                      # all networks: a few minutes
    python -m benchmarks.launches --network gpt2 resnet50

Each network is as deep as people train it, or nearly, and as narrow as it can be, on one thread of the CPU. Steps (forward
and backward) in eager mode, as captured (a budget of 1.0: nothing is computed twice) and at a share of 0.6 take turns in one
process. Their time is that of the thread on the processor, which other processes disturb least, and a ratio is the median over
steps that are run one after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import torch
from rich.console import Console
from torch import nn

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.results import RESULTS, stamp, write
from lightning_remat import rematerialize

PACKAGES = ("lightning_remat", "torch", "transformers", "pytorchcv")
SHARES = (1.0, 0.6)
WARM_UP = 5
"""Steps of each that are not timed."""

NARROW = 16
"""What channels of convolutions are divided by."""

_TEXT = {"layers": 6, "width": 16, "length": 8, "batch": 2}
_TINY: Mapping[str, dict[str, Any]] = {
    "gpt2": _TEXT,
    "gpt2-nodropout": _TEXT,
    "transformer": {"layers": 3, "length": 4, "batch": 2},
    "transformer-6+6": {"layers": 6, "length": 4, "batch": 2},
    "llama": _TEXT,
    "bert": _TEXT,
    "t5": {**_TEXT, "layers": 3},
    "vit": {"layers": 6, "width": 16},
    "swin": {"side": 32},
}
"""What is changed of the size ``"tiny"``; for what is not here, see `narrowed`."""


def workload(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """One of the benchmarks' networks, as narrow as it can be, and a batch."""
    if name in _TINY:
        made = networks.build(name, "tiny", **_TINY[name])
        return made.module, made.batch
    made = networks.build(name, "tiny", side=32, batch=2)
    return narrowed(made.module), made.batch


def narrowed(module: nn.Module) -> nn.Module:
    """A network of convolutions with few channels, for images of 32²; in place."""

    def few(channels: int) -> int:
        return channels // NARROW if channels >= 2 * NARROW else channels

    for name, part in list(module.named_modules()):
        other: nn.Module
        if isinstance(part, nn.Conv2d):
            sizes: Any = (part.kernel_size, part.stride, part.padding, part.dilation)
            bias = part.bias is not None
            other = type(part)(few(part.in_channels), few(part.out_channels), *sizes, few(part.groups), bias)
        elif isinstance(part, nn.BatchNorm2d):
            other = nn.BatchNorm2d(few(part.num_features), part.eps, part.momentum)
        elif isinstance(part, nn.Linear):
            other = nn.Linear(few(part.in_features), part.out_features)
        elif isinstance(part, nn.AvgPool2d) and part.kernel_size == 7:
            other = nn.AdaptiveAvgPool2d(1)
        else:
            continue
        module.set_submodule(name, other)
    return module.train()


def launch_seconds(name: str, rounds: int) -> dict[str, Any]:
    """Steps of a network in eager mode and as planned, in turns.

    Returns:
        Seconds of each way's steps (medians), and, for each of `SHARES`, the ratio to eager's and how many ops its plan runs.
    """
    module, batch = workload(name)
    steps = {f"{share:g}": rematerialize(module, budget=share, time_limit=5.0) for share in SHARES}
    ways: dict[str, Callable[..., torch.Tensor]] = {"eager": module, **steps}

    def seconds(way: str) -> float:
        module.zero_grad(set_to_none=True)
        started = time.thread_time()
        ways[way](*batch).backward()  # type: ignore[no-untyped-call]
        return time.thread_time() - started

    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM_UP + rounds):
        for way in ways:
            found = seconds(way)
            if number >= WARM_UP:
                times[way].append(found)
    for step in steps.values():
        if step.failures or len(step.plans) != 1:
            raise RuntimeError(f"{name} is not captured as one graph: {step.failures}")
    ratios = {way: [a / b for a, b in zip(times[way], times["eager"], strict=True)] for way in steps}
    return {
        "network": name,
        "seconds": {way: statistics.median(found) for way, found in times.items()},
        "ratios": {way: statistics.median(found) for way, found in ratios.items()},
        "quartiles": {way: statistics.quantiles(found, n=4)[::2] for way, found in ratios.items()},
        "ops": {way: sum(step.plans[0].schedule.evaluations.values()) for way, step in steps.items()},
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The results as a table."""
    shares = [f"{share:g}" for share in SHARES]
    head = ["network", "eager, ms", *(f"at {share}" for share in shares), *(f"ops at {share}" for share in shares)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        ratios = [f"{row['ratios'][share]:.2f}" for share in shares]
        cells = [row["network"], f"{1000 * row['seconds']['eager']:.2f}", *ratios]
        lines.append("| " + " | ".join([*cells, *(str(row["ops"][share]) for share in shares)]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Time the networks, print a table, and write JSON and Markdown."""
    parser = command_line(__doc__)
    add_networks(parser, networks.networks())
    parser.add_argument("--rounds", type=int, default=200, help="timed steps of each way")
    parser.add_argument("--out", type=Path, default=RESULTS / "launches-cpu.json", help="the table goes beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    rows = []
    for name in options.networks or networks.networks():
        rows.append(launch_seconds(name, options.rounds))
        console.print(f"{name}: {', '.join(f'{ratio:.2f} at {way}' for way, ratio in rows[-1]['ratios'].items())}")
    table = markdown(rows)
    print(table)
    data = {"format": "lightning_remat.launches", "version": 1, **stamp(PACKAGES, "cpu"), "networks": rows}
    write(options.out, data)
    options.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
