"""HiRemate (Gusak et al. 2025): Tables 2, 3 and 4, and what Figures 5 and 6 show.

    python -m benchmarks.papers.hiremate            # all of it: some twenty minutes
    python -m benchmarks.papers.hiremate --quick    # three networks: a minute

Times of ops are the least that a P100 needs (the GPU of Table 4; `roofline`: FLOPs or bytes moved, and a launch). FFTs and what
else has no FLOPs of its own count by the bytes that they move; products of complex matrices count as real ones.

A budget is of activations, as the paper's: bytes above those of parameters, their gradients and the batch, which are held all
through the step. Its share is of the activations' peak without rematerialization. ``base + share * (plain peak - base)`` is
what the solvers get.

Table 4: each network at the relative peak that the paper observed; overheads are beside its predicted ones. "hiremate" gets a
tenth of the paper's whole time (capture and partition included there), and is said to need it with and without its capture.
Tables 2 and 3: schedules of layers (`checkmate_networks.layers`), which `rk_checkmate` can solve: "optimal" means proven for
the captured order of layers to within 0.01 %, else the bound is given. Budgets of UNet and MLP-Mixer are the paper's over the
plain peaks that Table 4 implies; it tells none for the others, whose largest budget is taken for nine tenths of it.
Figures 5 and 6: no numbers are in the paper's text; its networks (a) and (b) are not named in it. Its H-ILP is the whole
framework without the other solvers: here "hiremate" with the program alone at the top level (below it, dynamic programming and
sets of kept values), and beside it "h_ilp", which has one level only. GB is 1e9 bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from benchmarks.common.commands import script
from benchmarks.common.pictures import draw, entitle
from benchmarks.common.tables import numbers_table
from benchmarks.papers.hiremate_studies import (
    ALONE,
    CURVE_METHODS,
    CURVE_SECONDS,
    CURVES,
    H_ILP,
    HIREMATE,
    LEVEL_SIZES,
    LEVELS,
    MORE_NODES,
    OPS,
    OPTIMUM,
    OPTIMUM_SECONDS,
    OTHERS,
    OTHERS_SECONDS,
    PAPER_OPTIMAL,
    PAPER_PARTITIONS,
    PAPER_RESULTS,
    PAPER_SIZES,
    PARTITION_SIZE,
    ROTOR,
    SHARES,
    TENTH,
    TREEWIDTH,
    curve,
    levels,
    optimal,
    study,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(quick: bool, console: Console) -> dict[str, Any]:
    """All networks; returns what goes into the file."""
    table_4, table_3, figure_5, figure_6 = [], [], [], []
    for name in track(("UNet", "MLP-Mixer", "FNO 1d") if quick else tuple(PAPER_RESULTS), "Table 4", console=console):
        table_4.append(study(name))
    for name in track(("Transformer 2-2",) if quick else tuple(PAPER_OPTIMAL), "Tables 2 and 3", console=console):
        table_3.append(optimal(name, (8.0,) if quick else PAPER_OPTIMAL[name]))
    for name in track(("UNet",) if quick else tuple(CURVES), "Figure 5", console=console):
        figure_5.append(curve(name, SHARES[1:2] if quick else SHARES))
    for sizes in track(() if quick else LEVEL_SIZES, "Figure 6", console=console):
        figure_6.append(levels(sizes, SHARES[1:]))
    limits = {OPTIMUM: OPTIMUM_SECONDS, "others": OTHERS_SECONDS, "figures": CURVE_SECONDS}
    return {
        "table_4": table_4,
        "table_3": table_3,
        "figure_5": figure_5,
        "figure_6": figure_6,
        "time_limits": limits,
        "paper": {
            "table_4a": PAPER_SIZES,
            "table_4b": PAPER_PARTITIONS,
            "table_4c": PAPER_RESULTS,
            "table_3": {name: {str(gb): cells for gb, cells in rows.items()} for name, rows in PAPER_OPTIMAL.items()},
        },
    }


def sizes_table(studies: Sequence[Mapping[str, Any]]) -> Table:
    """Tables 4(a) and 4(b)."""
    columns = ("", "before", "forward", "both", "and data", "levels", "subgraphs", "distinct", "largest")
    rows = []
    for one in studies:
        theirs = (*PAPER_SIZES[one["network"]], *PAPER_PARTITIONS[one["network"]])
        cells = zip((*one["sizes"], *one["partition"]), theirs, strict=True)
        rows.append((one["network"], *(f"{ours:,} ({paper:,})" for ours, paper in cells)))
    title = f"Tables 4(a) and 4(b): nodes of the graphs; H-Partition, {PARTITION_SIZE} nodes at most (the paper's in brackets)"
    return numbers_table(title, columns, rows)


def results_table(studies: Sequence[Mapping[str, Any]]) -> Table:
    """Table 4(c)."""
    columns = (
        "", "batch", "plain GB", "capture s", "solve s", "met, with it", "peak %", "time %", "bound %", "best of others",
    )  # fmt: skip
    rows = []
    for one in studies:
        minutes, gigabytes, share, percent = PAPER_RESULTS[one["network"]]
        ours = one["solutions"][HIREMATE]
        best = best_other(one)
        rows.append(
            (
                one["network"],
                str(one["batch"]),
                f"{one['activation_bytes'] / 1e9:.1f} ({100 * gigabytes / share:.1f})",
                f"{one['capture_seconds']:.1f}",
                f"{ours['solve_seconds']:.1f} of {minutes * TENTH:.0f}",
                ", ".join("yes" if met(one, with_capture) else "NO" for with_capture in (False, True)),
                _percent(ours["relative_peak"], share),
                _percent(ours["relative_seconds"], percent),
                _percent(max(found["relative_bound"] for found in one["solutions"].values())),
                "-"
                if best is None
                else f"{best}: {_percent(one['solutions'][best]['relative_seconds'])}, "
                f"{one['solutions'][best]['solve_seconds']:.1f} s",
            )
        )
    title = "Table 4(c): seconds, of a tenth of the paper's; relative peak of activations and time (the paper's in brackets)"
    return numbers_table(title, columns, rows)


def _percent(ours: float | None, paper: float | None = None) -> str:
    text = "-" if ours is None else f"{100 * ours:.1f}"
    return text if paper is None else f"{text} ({paper:.1f})"


def met(one: Mapping[str, Any], with_capture: bool = False) -> bool:
    """Whether a schedule was found in a tenth of the paper's time."""
    ours = one["solutions"][HIREMATE]
    took = ours["solve_seconds"] + (one["capture_seconds"] if with_capture else 0.0)
    return ours["relative_seconds"] is not None and took <= PAPER_RESULTS[one["network"]][0] * TENTH


def best_other(one: Mapping[str, Any]) -> str | None:
    """The other method whose schedule is the cheapest."""
    found = {method: one["solutions"][method]["relative_seconds"] for method in OTHERS}
    return min((method for method in OTHERS if found[method] is not None), key=lambda m: found[m], default=None)


def results_notes(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which requirements are met, and what was measured where they are not, or where figures differ."""
    count = len(studies)
    late = [one for one in studies if not met(one)]
    late_with = [one for one in studies if not met(one, with_capture=True)]
    costly = [
        one["network"]
        for one in studies
        if (one["solutions"][HIREMATE]["relative_seconds"] or 9) > PAPER_RESULTS[one["network"]][3] / 100
    ]
    notes = []
    notes.append(
        f"planned in a tenth of the paper's time: {count - len(late)} of {count}, with capture {count - len(late_with)}; "
        f"no slower than the paper predicts: {count - len(costly)} of {count} {', '.join(costly)}"
    )
    for one in late_with:
        notes.append(
            f"{one['network']}: capture takes {one['capture_seconds']:.0f} s for {one['joint_ops']:,} ops of the joint graph "
            f"({1e3 * one['capture_seconds'] / one['joint_ops']:.1f} ms each), solving "
            f"{one['solutions'][HIREMATE]['solve_seconds']:.0f} s"
        )
    for one in studies:
        best = best_other(one)
        ours = one["solutions"][HIREMATE]["relative_seconds"]
        if best is not None and ours is not None and one["solutions"][best]["relative_seconds"] < ours - 5e-4:
            notes.append(
                f"{one['network']}: {best} is {100 * (ours - one['solutions'][best]['relative_seconds']):.1f} points better"
            )
    shares = ", ".join(
        f"{one['network']} {100 * one['cheap']['bytes']:.0f} / {100 * one['cheap']['seconds']:.0f}" for one in studies
    )
    notes.append(
        "why little time buys half of the memory: cheap ops (no convolution, matrix product or FFT) made this much of what the "
        f"plain step holds between forward and backward, in this much of its time, in percent: {shares}"
    )
    copies = [f"{one['network']} {100 * one['scatter']:.0f} %" for one in studies if one["scatter"] > 0.01]
    notes.append(MORE_NODES + (", ".join(copies) or "none"))
    scopes = {
        found["bound_scope"] for one in studies for found in one["solutions"].values() if found["relative_bound"] > 1
    }
    return [*notes, *(f"bounds hold for: {scope}" for scope in sorted(scopes))]


def optimal_table(studies: Sequence[Mapping[str, Any]]) -> Table:
    """Tables 2 and 3."""
    columns = ("", "layers", "GB", "share", OPTIMUM, "proven", H_ILP, HIREMATE, "seconds, in that order")
    rows = []
    for one in studies:
        for row in one["rows"]:
            paper = PAPER_OPTIMAL[one["network"]][row["paper_gigabytes"]]
            found = row["solutions"]
            best = found[OPTIMUM]
            proven = best["status"] if best["status"] != "feasible" else f">= {_overhead(best['relative_bound'])}"
            rows.append(
                (
                    f"{one['network']}, batch {one['batch']}",
                    str(one["layers"]),
                    f"{row['paper_gigabytes']:g}",
                    f"{row['share']:.2f}",
                    f"{_overhead(best['relative_seconds'])} ({'-' if paper[0] is None else f'{paper[0]:.2f}'})",
                    proven,
                    f"{_overhead(found[H_ILP]['relative_seconds'])} ({paper[1]:.2f})",
                    _overhead(found[HIREMATE]["relative_seconds"]),
                    ", ".join(f"{found[method]['solve_seconds']:.1f}" for method in (OPTIMUM, H_ILP, HIREMATE)),
                )
            )
    return numbers_table(
        "Tables 2 and 3: overhead in percent (the paper's RK-CHECKMATE and H-ILP in brackets)", columns, rows
    )


def _overhead(relative: float | None) -> str:
    return "-" if relative is None else f"{100 * (relative - 1):.2f}"


def optimal_notes(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the two are from proven optima."""
    proven = [
        row["solutions"] for one in studies for row in one["rows"] if row["solutions"][OPTIMUM]["status"] == "optimal"
    ]
    paper = [theirs - best for cells in PAPER_OPTIMAL.values() for best, theirs in cells.values() if best is not None]
    notes = []
    for method in (H_ILP, HIREMATE):
        gaps = [
            100 * (found[method]["relative_seconds"] - found[OPTIMUM]["relative_seconds"])
            for found in proven
            if found[method]["relative_seconds"] is not None
        ]
        if gaps:
            notes.append(
                f"{method} above the proven optima, in points of overhead: {sum(gaps) / len(gaps):.2f} on average, "
                f"{max(gaps):.2f} at most ({len(gaps)} of {len(proven)} budgets; the paper's "
                f"H-ILP: {sum(paper) / len(paper):.2f} and {max(paper):.2f})"
            )
    for one in studies:
        for row in one["rows"]:
            if OPS in row["solutions"]:
                best = min(
                    found["relative_seconds"] or 9 for method, found in row["solutions"].items() if method != OPS
                )
                notes.append(
                    f"{one['network']} at {row['share']:.2f}: {_overhead(best)} on layers, each computed again as a "
                    f"whole, and {_overhead(row['solutions'][OPS]['relative_seconds'])} by hiremate on ops"
                )
    return notes


def curves_table(one: Mapping[str, Any]) -> Table:
    """Figure 5."""
    rows = []
    for method in CURVE_METHODS:
        found = [row["solutions"][method] for row in one["rows"]]
        rows.append((method, *(f"{_overhead(s['relative_seconds'])} in {s['solve_seconds']:.1f} s" for s in found)))
    title = (
        f"Figure 5: {one['network']} ({CURVES[one['network']]}), batch {one['batch']}\n"
        f"overhead in percent by share of {one['activation_bytes'] / 1e9:.1f} GB"
    )
    return numbers_table(title, ("", *(f"{row['share']:.1f}" for row in one["rows"])), rows)


def curves_notes(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the paper says of Figure 5, held against the figures."""
    rows = [row["solutions"] for one in curves for row in one["rows"]]
    best = [min(s["relative_seconds"] or float("inf") for s in found.values()) for found in rows]
    feasible = [(found, least) for found, least in zip(rows, best, strict=True) if least < float("inf")]
    notes = []
    for method in CURVE_METHODS:
        own = [(s, least) for found, least in feasible if (s := found[method]["relative_seconds"]) is not None]
        excess = max([100 * (s - least) for s, least in own], default=0.0)
        notes.append(
            f"{method}: a schedule at {len(own)} of {len(feasible)} budgets, {excess:.1f} points above the best at most"
        )
    for one in curves:
        for row in one["rows"]:
            failed = row["solutions"][H_ILP]
            if failed["relative_seconds"] is None and row["solutions"][HIREMATE]["relative_seconds"] is not None:
                notes.append(
                    f"no schedule by h_ilp for {one['network']} at {row['share']}: {', '.join(failed['notes'])}"
                )
    return ["of the budgets at which any method has a schedule:", *notes]


def levels_table(studies: Sequence[Mapping[str, Any]]) -> Table:
    """Figure 6."""
    rows = []
    for one in studies:
        cells = []
        for row in one["rows"]:
            found = [row["solutions"][method] for method in (ALONE, HIREMATE)]
            cells.append(", ".join(_overhead(s["relative_seconds"]) for s in found))
        rows.append(
            (f"{one['partition'][0]}", f"{one['top_size']}, {one['block_size']}", str(one["partition"][1]), *cells)
        )
    columns = ("levels", "M^t, M^l", "subgraphs", *(f"{row['share']:.1f}" for row in studies[0]["rows"]))
    title = (
        f"Figure 6: {LEVELS}: overhead in percent by share, H-ILP alone at the top level, and with the dynamic program"
    )
    return numbers_table(title, columns, rows)


def present(data: Mapping[str, Any]) -> list[RenderableType]:
    """What is printed."""
    table_4, table_3, curves = data["table_4"], data["table_3"], data["figure_5"]
    parts: list[RenderableType] = [sizes_table(table_4), results_table(table_4), *results_notes(table_4)]
    parts += [optimal_table(table_3), *optimal_notes(table_3)]
    parts += [*map(curves_table, curves), *curves_notes(curves)]
    return [*parts, levels_table(data["figure_6"])] if data["figure_6"] else parts


COLORS = {HIREMATE: "#1f6fb4", ALONE: "#c77800", H_ILP: "#e0b060", TREEWIDTH: "#555555", ROTOR: "#2a9d5c"}


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """Figures 5 and 6; ``False`` without matplotlib."""
    return draw(path, (15, 8), lambda figure: _paint(figure, data))


def _paint(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(2, 3).ravel()

    def line(axes: Any, rows: Sequence[Mapping[str, Any]], method: str, label: str, **style: Any) -> None:
        fit = [row for row in rows if row["solutions"][method]["relative_seconds"] is not None]
        overheads = [100 * (row["solutions"][method]["relative_seconds"] - 1) for row in fit]
        axes.plot([row["share"] for row in fit], overheads, "o-", ms=4, lw=1.2, label=label, **style)

    for axes, one in zip(panels, data["figure_5"], strict=False):
        for method, color in COLORS.items():
            line(axes, one["rows"], method, method, color=color)
        entitle(axes, f"{one['network']}, batch {one['batch']}: overhead [%] by share")
        axes.legend(fontsize=8, frameon=False)
    for axes, method in zip(panels[4:], (ALONE, HIREMATE), strict=True):
        for one in data["figure_6"]:
            line(axes, one["rows"], method, f"{one['partition'][0]} levels ({one['top_size']}, {one['block_size']})")
        entitle(axes, f"{LEVELS}, {method}: overhead [%] by share")
        if data["figure_6"]:
            axes.legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.set_ylim(bottom=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the networks, print the tables, write the file and the picture."""
    packages = ("lightning_remat", "torch", "transformers", "pytorchcv", "mip")
    return script("hiremate", __doc__, "three networks, a budget each", run, present, picture, packages, arguments)


if __name__ == "__main__":
    sys.exit(main())
