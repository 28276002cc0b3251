"""What to expect on 8, 64 and 1,024 devices: a simulation, from graphs that were measured on one H100 and published bandwidths.

    python -m benchmarks.devices                        # all recorded graphs: a minute
    python -m benchmarks.devices --only vit --share 0.25

No number here was measured on more than one device. Compute times and bytes are those of the recorded graphs
(``tests/data/h100``), each planned at a share of what can be saved. Communication takes the bytes that a ring sends
over the slowest link that it crosses, at the bandwidth that its maker states, and a latency for each of its steps: on
eight devices NVLink (450 GB/s in each direction), beyond that eight 400 Gb/s adapters for each eight devices (400 GB/s
together). Nothing else is lost, and no device is slower than another, so that true steps are longer.

* DDP: gradients go into buckets of 25 MiB (the first of 1 MiB) as the schedule makes them, and buckets are reduced one
  after the other, beside the backward; or, for comparison, all after it.
* FSDP2: a unit is a block of the network, and what is in none of them one more. Its parameters are gathered while the
  unit before it computes, in the forward and again in the backward, and its gradients are scattered after its backward.
  Both take turns on one link.

Memory of a device is parameters, gradients and AdamW's two moments (in the parameters' dtype), DDP's buckets or FSDP2's
two whole units, and the activations of the plan.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

from benchmarks.common.commands import command_line
from benchmarks.common.results import RESULTS, stamp, write
from benchmarks.graphs import load
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule import Compute, Schedule, simulate
from lightning_remat.solvers import solve

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "h100"
GRAPHS = ("gpt2", "vit", "resnet50", "unet", "mobilenet")
DEVICES = (8, 64, 1024)
NODE = 8
NVLINK = 450e9
ADAPTERS = 400e9
HOP = 2e-6
"""Seconds of one step of a ring within a node, or of a level of a tree between nodes: some microseconds are usual."""

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20


def exchanged(nbytes: int, devices: int) -> float:
    """Seconds of one half of a reduction: every device sends its share of the bytes to all others (or gathers theirs)."""
    nodes = devices // NODE
    bandwidth = NVLINK if nodes <= 1 else min(NVLINK, ADAPTERS)
    hops = min(devices, NODE) - 1 + math.ceil(math.log2(max(nodes, 1)))
    return (devices - 1) / devices * nbytes / bandwidth + hops * HOP


class Ready(NamedTuple):
    """When a gradient is there, in seconds from the beginning of the step, and its bytes."""

    seconds: float
    nbytes: int


def gradients(graph: ComputationGraph, schedule: Schedule) -> list[Ready]:
    """The gradients of a scheduled step, in the order in which they are there."""
    seconds = simulate(graph, schedule).seconds_after
    wanted = {t for t in graph.backward_outputs if t not in graph.inputs}
    found: dict[int, Ready] = {}
    for step, after in zip(schedule.steps, seconds, strict=True):
        if isinstance(step, Compute):
            for t in wanted.intersection(graph.ops[step.op].outputs):
                found.setdefault(t, Ready(float(after), graph.storages[graph.tensors[t].storage]))
    return sorted(found.values())


def buckets(made: Iterable[Ready]) -> list[Ready]:
    """The same, a bucket at a time."""
    found, nbytes, limit = list[Ready](), 0, FIRST_BUCKET
    last = 0.0
    for one in made:
        nbytes, last = nbytes + one.nbytes, one.seconds
        if nbytes >= limit:
            found.append(Ready(last, nbytes))
            nbytes, limit = 0, BUCKET
    return [*found, Ready(last, nbytes)] if nbytes else found


def ddp_seconds(made: Sequence[Ready], compute: float, devices: int, *, beside: bool) -> float:
    """Seconds of a step under DDP, its gradients reduced beside the backward or after it."""
    free = 0.0
    for one in buckets(made):
        begun = max(free, one.seconds if beside else compute)
        free = begun + 2 * exchanged(one.nbytes, devices)
    return max(compute, free)


class Unit(NamedTuple):
    """A unit's parameter bytes, and the seconds of its forward and its backward."""

    nbytes: int
    forward: float
    backward: float


def units(graph: ComputationGraph, schedule: Schedule) -> list[Unit]:
    """The units of a scheduled step, in the order in which they compute first."""
    block = re.compile(r"^(.*?\.(?:[a-z]*\d+))(?:\.|$)")
    nbytes: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}

    def unit_of(module: str) -> str:
        found = block.match(module)
        return found.group(1) if found else ""

    owner: dict[int, str] = {}
    for op in graph.ops:
        for t in op.inputs:
            if graph.tensors[t].role is TensorRole.PARAMETER:
                owner.setdefault(graph.tensors[t].storage, unit_of(op.module))
    for storage, unit in owner.items():
        nbytes[unit] = nbytes.get(unit, 0) + graph.storages[storage]
    for number, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            spent = seconds.setdefault(unit_of(op.module), [0.0, 0.0])
            spent[number >= schedule.boundary] += op.seconds
    return [Unit(nbytes.get(unit, 0), *spent) for unit, spent in seconds.items()]


def fsdp_seconds(parts: Sequence[Unit], devices: int) -> float:
    """Seconds of a step under FSDP2."""
    clock = link = 0.0
    gathered: float
    begun = 0.0
    for backward, part in [*((False, one) for one in parts), *((True, one) for one in reversed(parts))]:
        link = max(link, begun) + exchanged(part.nbytes, devices)  # from when the unit before began to compute
        gathered = link
        begun = max(clock, gathered)
        clock = begun + (part.backward if backward else part.forward)
        if backward:
            link = max(link, clock) + exchanged(part.nbytes, devices)
    return max(clock, link)


def simulated(name: str, share: float, time_limit: float) -> dict[str, Any]:
    """One graph at a share of what can be saved: a row for one device, and one for each number of devices."""
    graph = load(FOLDER / f"{name}.json.xz")
    plain = solve(graph, 2**50, "no_remat")
    assert plain.schedule is not None
    saved = plain.peak_bytes - graph.floor_bytes
    planned = solve(graph, graph.floor_bytes + int(share * saved), time_limit=time_limit)
    if planned.schedule is None:
        raise SystemExit(f"{name} does not fit {share:.0%} of what it saves: give a larger share")
    owned = {t.storage for t in graph.tensors if t.role is TensorRole.PARAMETER}
    parameters = sum(graph.storages[s] for s in owned)
    made, parts = gradients(graph, planned.schedule), units(graph, planned.schedule)
    two = sum(sorted((part.nbytes for part in parts), reverse=True)[:2])
    beside = planned.peak_bytes - graph.floor_bytes
    rows = []
    for devices in DEVICES:
        seconds = {
            "ddp": ddp_seconds(made, planned.seconds, devices, beside=True),
            "ddp, gradients at the end": ddp_seconds(made, planned.seconds, devices, beside=False),
            "fsdp2": fsdp_seconds(parts, devices),
        }
        rows.append(
            {
                "devices": devices,
                "ratios": {way: one / planned.seconds for way, one in seconds.items()},
                "bytes": {
                    "ddp": 5 * parameters + beside,  # parameters, gradients, buckets, two moments
                    "fsdp2": 4 * parameters // devices + 2 * two + beside,
                },
            }
        )
    return {
        "graph": name,
        "share": share,
        "parameter_bytes": parameters,
        "units": len(parts),
        "unscheduled_seconds": plain.seconds,
        "seconds": planned.seconds,
        "activation_bytes": beside,
        "unscheduled_activation_bytes": saved,
        "rows": rows,
    }


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The results as a table."""
    head = [
        "graph",
        "one device",
        "activations, GiB",
        "devices",
        "DDP",
        "DDP, gradients at the end",
        "FSDP2",
        "GiB, DDP",
        "GiB, FSDP2",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one, row in ((graph, row) for graph in found for row in graph["rows"]):
        ratios = [f"{row['ratios'][way]:.3f}" for way in ("ddp", "ddp, gradients at the end", "fsdp2")]
        held = [f"{row['bytes'][way] / 2**30:.2f}" for way in ("ddp", "fsdp2")]
        kept = f"{one['activation_bytes'] / 2**30:.2f} of {one['unscheduled_activation_bytes'] / 2**30:.2f}"
        alone = f"{1000 * one['seconds']:.0f} ms ({one['seconds'] / one['unscheduled_seconds'] - 1:+.0%})"
        lines.append("| " + " | ".join([one["graph"], alone, kept, f"{row['devices']:,}", *ratios, *held]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Simulate, print a table, and write JSON and Markdown."""
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=GRAPHS, default=GRAPHS)
    parser.add_argument("--share", type=float, default=0.6, help="of the bytes of activations that the plan may hold")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "devices-h100.json", help="the table goes beside it")
    options = parser.parse_args()
    found = [simulated(name, options.share, options.time_limit) for name in options.only]
    table = markdown(found)
    print(table)
    write(
        options.out,
        {
            "format": "lightning_remat.devices",
            "version": 1,
            **stamp(("lightning_remat",), "simulated"),
            "graphs": found,
        },
    )
    options.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
