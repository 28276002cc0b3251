"""The default planner on whole networks: how long it plans, how far from optimal it can be, and whether anything is cheaper.

    python -m benchmarks.planner            # HiRemate's twelve networks, and all seventeen at half of their memory: an hour
    python -m benchmarks.planner --quick    # three networks, two other methods

Networks, batches, costs (the least times of a P100) and budgets of activations are those of `benchmarks.papers.hiremate`, which
says where they come from. The twelve are planned at the relative peaks that the paper observed, with default options, and
compared with its predicted overhead and with other methods at the same budget. They and five more are planned at half
of their activations too. The gap is to the solution's bound, which holds for any order of the ops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from benchmarks.common.commands import script
from benchmarks.common.pictures import draw
from benchmarks.common.tables import numbers_table
from benchmarks.common.unavoidable import unavoidable
from benchmarks.papers.checkmate_networks import capture as layers_of_checkmate
from benchmarks.papers.hiremate_studies import PAPER_RESULTS, Network, captured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS = {"GPT 24": 10, "GPT 96": 30, "Transformer 6-6": 15, "Transformer 36-36": 60, "UNet": 10}
"""Seconds of planning, after capture and cost."""

HALF = {"VGG16": 256, "ResNet50": 256, "MobileNet": 512, "U-Net": 32}
"""Checkmate's networks at half of their activations, with its costs (FLOPs), and their batches."""

GPT = "GPT 12"
METHODS = (
    *("moments", "crossing", "descent", "rotor", "hiremate", "greedy", "treewidth", "lp_rounding", "h_ilp"),
    *("linearized_greedy", "chen_greedy"),
)
SECONDS = 20.0
"""Time limit of each of the other methods."""

WIDE = 0.01
"""The gap at half of the activations over which a network is named."""

AUTO = "auto"
LIMIT = 60.0
"""Time limit of the default; it stops by itself before."""


def at_the_papers_budget(name: str, methods: Sequence[str]) -> dict[str, Any]:
    """One of the twelve networks."""
    network, capture_seconds = captured(name)
    share = PAPER_RESULTS[name][2] / 100
    found = {AUTO: network.solve(share, AUTO, LIMIT)}
    found |= {method: network.solve(share, method, SECONDS) for method in methods}
    return {
        "network": name,
        "ops": len(network.graph.ops),
        "nodes": len(network.problem),
        "capture_seconds": round(capture_seconds, 1),
        "share": share,
        "paper_relative_seconds": PAPER_RESULTS[name][3] / 100,
        "solutions": found,
    }


def at_half(name: str, share: float = 0.5) -> dict[str, Any]:
    """One network at half of its activations or another share."""
    network = Network(name, layers_of_checkmate(name, HALF[name])) if name in HALF else captured(name)[0]
    largest = unavoidable(network.graph)
    return {
        "network": name,
        "nodes": len(network.problem),
        "share": share,
        "unavoidable_share": (largest.nbytes - network.problem.base_bytes) / network.activations,
        "unavoidable_op": largest.op,
        "solutions": {AUTO: network.solve(share, AUTO, LIMIT)},
    }


def run(quick: bool, console: Console) -> dict[str, Any]:
    """All networks; returns what goes into the file."""
    names = ("UNet", "MLP-Mixer", "FNO 1d") if quick else tuple(PAPER_RESULTS)
    methods = METHODS[:2] if quick else METHODS
    twelve = [at_the_papers_budget(name, methods) for name in track(names, "HiRemate's networks", console=console)]
    halves = [*names, "VGG16"] if quick else [*names, *HALF, GPT]
    return {
        "twelve": twelve,
        "half": [at_half(one) for one in track(halves, "at half", console=console)],
        "time_limit": SECONDS,
    }


def overhead(found: Mapping[str, Any]) -> float | None:
    """Extra time as a share of the plain step's."""
    return None if found["relative_seconds"] is None else found["relative_seconds"] - 1


def gap(found: Mapping[str, Any]) -> float:
    """How far the solution can be from optimal."""
    return float(found["relative_seconds"] / found["relative_bound"] - 1)


def cheapest_other(one: Mapping[str, Any]) -> tuple[str, float] | None:
    """The best of the other methods, and its overhead."""
    others = [
        (over, method)
        for method, found in one["solutions"].items()
        if method != AUTO and (over := overhead(found)) is not None
    ]
    return min(others)[::-1] if others else None


def _cell(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def twelve_table(twelve: Sequence[Mapping[str, Any]]) -> Table:
    """The twelve networks."""
    columns = (
        "network",
        "ops",
        "share",
        "paper",
        "auto",
        "bound",
        "gap",
        "plan s",
        "target s",
        "capture s",
        "best other",
    )
    title = "HiRemate's networks at its own relative memory: overhead in percent"
    table = numbers_table(title, columns, text=("network", "best other"))
    for one in twelve:
        auto, other = one["solutions"][AUTO], cheapest_other(one)
        seconds = one["solutions"].get(other[0], {}).get("solve_seconds") if other else None
        table.add_row(
            one["network"],
            f"{one['ops']:,}",
            f"{one['share']:.3f}",
            _cell(one["paper_relative_seconds"] - 1),
            _cell(overhead(auto)),
            _cell(auto["relative_bound"] - 1),
            _cell(gap(auto)) if overhead(auto) is not None else "-",
            f"{auto['solve_seconds']:.1f}",
            str(TARGETS.get(one["network"], "")),
            f"{one['capture_seconds']:.0f}",
            f"{other[0]}: {_cell(other[1])}, {seconds:.1f} s" if other else "-",
        )
    return table


def half_table(half: Sequence[Mapping[str, Any]]) -> Table:
    """All networks at half of their activations."""
    columns = ("network", "nodes", "share", "auto", "bound", "gap", "plan s", "least share", "set by")
    table = numbers_table("at half of the activations: overhead in percent", columns, text=("network", "set by"))
    for one in half:
        auto = one["solutions"][AUTO]
        found = overhead(auto) is not None
        cells = (_cell(overhead(auto)), _cell(auto["relative_bound"] - 1), _cell(gap(auto)) if found else "-")
        least = (f"{one['unavoidable_share']:.3f}", one["unavoidable_op"])
        table.add_row(
            one["network"], f"{one['nodes']:,}", f"{one['share']:g}", *cells, f"{auto['solve_seconds']:.1f}", *least
        )
    return table


def verdicts(data: Mapping[str, Any]) -> list[str]:
    """What was asked for, and whether it holds."""
    twelve, notes = data["twelve"], []
    ours = {one["network"]: overhead(one["solutions"][AUTO]) for one in twelve}
    papers = {one["network"]: one["paper_relative_seconds"] - 1 for one in twelve}
    above = [name for name, over in ours.items() if over is None or over > papers[name]]
    half = [name for name, over in ours.items() if over is not None and over <= papers[name] / 2]
    notes.append(f"above the paper's predicted overhead: {_names(above)}; at most half of it: {_names(half)}")
    dearer = []
    for one in twelve:
        over, other = ours[one["network"]], cheapest_other(one)
        if other and (over is None or other[1] < over - 1e-6):
            dearer.append(f"{one['network']} ({other[0]}: {_cell(other[1])} for {_cell(over)})")
    notes.append(f"another method is cheaper on: {_names(dearer)}")
    late = [
        one["network"] for one in twelve if one["solutions"][AUTO]["solve_seconds"] > TARGETS.get(one["network"], LIMIT)
    ]
    notes.append(f"planned later than the target: {_names(late)}")
    impossible = [one for one in data["half"] if one["unavoidable_share"] > one["share"]]
    wide = [
        f"{one['network']} at {one['share']:g}"
        for one in data["half"]
        if one not in impossible and (overhead(one["solutions"][AUTO]) is None or gap(one["solutions"][AUTO]) > WIDE)
    ]
    notes.append(f"at half of the activations, a gap over {WIDE:.0%}: {_names(wide)}")
    no_schedule = [f"{one['network']} at {one['share']:g}" for one in impossible]
    notes.append(f"one op needs more than the budget, whatever the schedule: {_names(no_schedule)}")
    return notes


def _names(names: Iterable[str]) -> str:
    found = list(names)
    return f"{', '.join(found)} ({len(found)})" if found else "none"


def present(data: Mapping[str, Any]) -> list[RenderableType]:
    """What is printed."""
    return [twelve_table(data["twelve"]), half_table(data["half"]), *verdicts(data)]


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """Overheads beside the paper's and the bounds; ``False`` without matplotlib."""
    return draw(path, (11, 4.5), lambda figure: _paint(figure, data))


def _paint(figure: Figure, data: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    names = [one["network"] for one in data["twelve"]]
    bars = {
        "HiRemate (its prediction)": ([one["paper_relative_seconds"] - 1 for one in data["twelve"]], "#bbbbbb"),
        "best other method here": ([(cheapest_other(one) or ("", 0.0))[1] for one in data["twelve"]], "#e0a030"),
        "auto": ([overhead(one["solutions"][AUTO]) or 0.0 for one in data["twelve"]], "#1f6fb4"),
        "bound": ([one["solutions"][AUTO]["relative_bound"] - 1 for one in data["twelve"]], "#2a9d5c"),
    }
    for index, (label, (heights, color)) in enumerate(bars.items()):
        axes.bar(
            [i + 0.2 * index for i in range(len(names))], [100 * h for h in heights], 0.19, color=color, label=label
        )
    axes.set_xticks([i + 0.3 for i in range(len(names))], names, rotation=20, fontsize=8)
    axes.set_ylabel("overhead [%]", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the networks, print the tables, write the file and the picture."""
    packages = ("lightning_remat", "torch", "pytorchcv", "transformers", "mip")
    return script("planner", __doc__, "three networks, two other methods", run, present, picture, packages, arguments)


if __name__ == "__main__":
    sys.exit(main())
