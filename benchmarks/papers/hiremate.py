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

import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from benchmarks.common.commands import script
from benchmarks.common.pictures import draw, entitle
from benchmarks.common.tables import numbers_table
from benchmarks.papers.checkmate_networks import layers
from benchmarks.papers.hiremate_networks import BATCHES, capture
from lightning_remat.graph import ComputationGraph, Phase
from lightning_remat.solvers import Block, Problem, Solution, solve
from lightning_remat.solvers.common._problem import PlainProblem
from lightning_remat.solvers.hiremate._blocks import alive_after
from lightning_remat.solvers.hiremate._hiremate import _renumber
from lightning_remat.solvers.hiremate._isomorphism import canonical_form, subproblem
from lightning_remat.solvers.hiremate._partition import backward_blocks, partition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SIZES = {
    "GPT 24": (1858, 367, 734, 1614), "GPT 96": (7402, 1447, 2894, 6366), "UNet": (73, 50, 101, 205),
    "MLP-Mixer": (203, 125, 250, 549), "RegNet32": (245, 173, 347, 721), "ResNet101": (346, 211, 423, 851),
    "Transformer 6-6": (1030, 224, 417, 991), "Transformer 36-36": (6160, 1334, 2457, 5851), "FNO 1d": (71, 42, 82, 167),
    "FNO 3d": (317, 64, 121, 257), "U-FNO": (567, 118, 221, 467), "UNO": (997, 129, 229, 495),
}  # fmt: skip
"""Table 4(a): nodes before simplification, of the forward, of both, and with data nodes."""

PAPER_PARTITIONS = {
    "GPT 24": (3, 28, 8, 15), "GPT 96": (4, 61, 21, 10), "UNet": (2, 9, 9, 15), "MLP-Mixer": (2, 15, 6, 10),
    "RegNet32": (2, 15, 10, 15), "ResNet101": (2, 19, 10, 15), "Transformer 6-6": (3, 23, 20, 17),
    "Transformer 36-36": (16, 128, 67, 19), "FNO 1d": (2, 10, 5, 8), "FNO 3d": (2, 12, 12, 10), "U-FNO": (2, 11, 9, 17),
    "UNO": (4, 12, 12, 19),
}  # fmt: skip
"""Table 4(b): levels, subgraphs, distinct ones, nodes of the largest."""

PAPER_RESULTS = {
    "GPT 24": (7.9, 1.7, 36.6, 122.3), "GPT 96": (15, 4.5, 47.2, 119.6), "UNet": (9, 5, 51.3, 113.5),
    "MLP-Mixer": (1.5, 4.5, 53.3, 107.3), "RegNet32": (5, 3.5, 41.1, 107.0), "ResNet101": (5.5, 4.5, 42.6, 115.3),
    "Transformer 6-6": (20, 3.5, 46.9, 117.6), "Transformer 36-36": (147, 4.9, 44.6, 118.4), "FNO 1d": (2.5, 5, 53.1, 114.7),
    "FNO 3d": (5.3, 4, 47.2, 117.4), "U-FNO": (16.3, 5.2, 56.7, 116.3), "UNO": (46, 5.2, 58.5, 121.9),
}  # fmt: skip
"""Table 4(c): minutes, GB, relative peak and predicted relative time in percent."""

PAPER_OPTIMAL: dict[str, dict[float, tuple[float | None, float]]] = {
    "ResNet34": {5.0: (1.38, 1.84), 4.0: (3.60, 3.94), 3.5: (5.17, 5.54), 3.0: (7.12, 7.61)},
    "UNet": {9.1: (0.90, 0.90), 8.1: (2.93, 3.17), 7.1: (5.32, 5.44), 6.1: (7.76, 8.30)},
    "Transformer 2-2": {9.0: (1.95, 1.94), 8.0: (3.55, 3.56), 7.0: (5.32, 5.34), 6.0: (7.00, 7.02)},
    "MLP-Mixer": {8.0: (0.50, 0.44), 7.0: (1.37, 1.37), 6.0: (2.47, 2.44), 5.0: (4.66, 5.45)},
    "GPT 5": {1.4: (1.13, 1.17), 1.25: (6.02, 9.24), 1.1: (15.15, 19.29), 1.0: (None, 25.93)},
}
"""Table 3 (Table 2 is a part of it): overheads in percent of Checkmate and of H-ILP, by budget in GB."""

TABLE_2 = {"UNet": 7.1, "Transformer 2-2": 7.0, "MLP-Mixer": 6.0, "GPT 5": 1.25}
"""The budgets of Table 2."""

SHARE_OF_LARGEST = 0.9
CURVES = {
    "ResNet101": "sequential",
    "GPT 5": "sequential",
    "UNet": "not sequential",
    "Transformer 6-6": "not sequential",
}
SHARES = (0.9, 0.7, 0.5, 0.3)
HIREMATE, H_ILP, TREEWIDTH, ROTOR, OPTIMUM = "hiremate", "h_ilp", "treewidth", "rotor", "rk_checkmate"
ALONE, OPS = "hiremate, h_ilp alone", "hiremate on ops"

PAPER_SIZE = {"blocks": 16, "total_options": 48}
"""Of "h_ilp": about as many blocks as the largest subgraphs of Table 4(b)."""

MORE_NODES = (
    "more nodes than the paper's: a layer of GPT-2 has 43 in the forward, not 15. Its GELU is written out, attention guards "
    "its softmax (isneginf, all, where), scales both factors and copies them, and a dropout is a draw, a mask and a product. "
    "Writing to a slice copies the whole where nothing is mutated (slice_scatter), in this share of the step's time: "
)
"""Measured: which ops a layer has."""

PARTITION_SIZE = 20
"""M^t and M^l of Table 4(b): the paper's largest subgraphs have 19 nodes at most. "hiremate" itself has more at the top."""

CURVE_METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    HIREMATE: (HIREMATE, {}),
    ALONE: (HIREMATE, {"top": (H_ILP,)}),
    H_ILP: (H_ILP, PAPER_SIZE),
    TREEWIDTH: (TREEWIDTH, {}),
    ROTOR: (ROTOR, {}),
}
"""Lines of Figure 5: the method and its options."""

LEVELS = "Transformer 6-6"
LEVEL_SIZES = ((60, 20), (20, 20), (20, 10), (12, 6), (12, 3))
"""M^t and M^l of Figure 6."""

OTHERS = ("rotor", "auto")
TENTH = 6.0
"""Seconds that a tenth of a minute has."""

OTHERS_SECONDS, OPTIMUM_SECONDS, CURVE_SECONDS = 20.0, 30.0, 10.0
"""Time limits of one solve."""

KERNELS = ("convolution", "mm", "fft")
"""Parts of the names of the ops that take the time; the rest is cheap for the memory that its results take."""


class Network:
    """A captured network, and budgets of its activations."""

    def __init__(self, name: str, graph: ComputationGraph) -> None:
        self.name, self.graph, self.problem = name, graph, Problem(graph)
        plain = self.problem.evaluate(self.problem.captured)
        self.seconds, self.activations = plain.seconds, plain.peak_bytes - self.problem.base_bytes

    def solve(self, share: float, method: str, time_limit: float, **options: Any) -> dict[str, Any]:
        """A schedule whose activations take at most ``share`` of the plain peak's, as what goes into the file."""
        budget = self.problem.base_bytes + round(share * self.activations)
        return self.outcome(solve(self.graph, budget, method, time_limit, **options))

    def outcome(self, found: Solution) -> dict[str, Any]:
        """What is kept of a solution, relative to the plain step."""
        has = found.schedule is not None
        return {
            "status": found.status.value,
            "relative_seconds": found.seconds / self.seconds if has else None,
            "relative_peak": (found.peak_bytes - self.problem.base_bytes) / self.activations if has else None,
            "relative_bound": found.lower_bound_seconds / self.seconds,
            "bound_scope": found.bound_scope,
            "solve_seconds": round(found.solve_seconds, 2),
            "notes": list(found.notes),
        }


@functools.cache
def captured(name: str) -> tuple[Network, float]:
    """A network at its batch, and the seconds of its capture."""
    started = time.perf_counter()
    graph = capture(name, BATCHES[name])
    return Network(name, graph), time.perf_counter() - started


# -- Table 4 -----------------------------------------------------------------------------------------------------------------


def study(name: str) -> dict[str, Any]:
    """One row of Table 4."""
    network, capture_seconds = captured(name)
    graph, problem = network.graph, network.problem
    minutes, _, share, _ = PAPER_RESULTS[name]
    blocks = partition("h_partition", problem, top_size=PARTITION_SIZE, block_size=PARTITION_SIZE)
    found = {HIREMATE: network.solve(share / 100, HIREMATE, minutes * TENTH)}
    for method in OTHERS:
        found[method] = network.solve(share / 100, method, min(OTHERS_SECONDS, minutes * TENTH))
    return {
        "network": name,
        "batch": BATCHES[name],
        "capture_seconds": round(capture_seconds, 2),
        "sizes": (
            sum(op.phase is not Phase.BACKWARD for op in graph.ops),
            problem.boundary,
            len(problem),
            len(problem) + len(problem.nbytes),
        ),
        "joint_ops": len(graph.ops),
        "partition": hierarchy(problem, blocks),
        "activation_bytes": network.activations,
        "base_bytes": problem.base_bytes,
        "seconds": network.seconds,
        "cheap": cheap(problem),
        "scatter": sum([s for node, s in enumerate(problem.seconds) if "scatter" in target(problem, node)])
        / network.seconds,
        "solutions": found,
    }


def hierarchy(problem: PlainProblem, blocks: Sequence[Block]) -> tuple[int, int, int, int]:
    """Levels, subgraphs (the top level included), distinct ones, and nodes of the largest."""
    forms = set()
    sizes = [len(blocks)]

    def visit(problem: PlainProblem, blocks: Sequence[Block]) -> None:
        backward = backward_blocks(problem, [block.nodes for block in blocks])
        for block, nodes in zip(blocks, backward, strict=True):
            if len(block.nodes) > 1:
                part = subproblem(problem, block.nodes, nodes).problem
                place = {node: local for local, node in enumerate(block.nodes)}
                inner = tuple(_renumber(one, place) for one in block.parts)
                forms.add((canonical_form(part), inner))
                sizes.append(len(inner) or len(block.nodes))
                if inner:
                    visit(part, inner)

    visit(problem, blocks)
    depth = 1 + max([block.depth for block in blocks if len(block.nodes) > 1], default=0)
    return depth, len(sizes), 1 + len(forms), max(sizes)


def target(problem: Problem, node: int) -> str:
    """What a node calls."""
    return problem.graph.ops[problem.ops[node]].target


def cheap(problem: Problem) -> dict[str, float]:
    """Of what the plain step holds between forward and backward, the share that cheap ops made, and their share of its time."""

    def is_cheap(node: int) -> bool:
        return not any(part in target(problem, node) for part in KERNELS)

    held = [v for v in alive_after(problem, problem.captured, problem.boundary) if problem.producer[v] >= 0]
    own = sum([problem.nbytes[v] for v in held if is_cheap(problem.producer[v])])
    makers = {problem.producer[v] for v in held if is_cheap(problem.producer[v])}
    return {
        "bytes": own / sum([problem.nbytes[v] for v in held]),
        "seconds": sum([problem.seconds[node] for node in makers]) / sum(problem.seconds),
    }


# -- Tables 2 and 3, Figures 5 and 6 -------------------------------------------------------------------------------------------


def optimal(name: str, budgets: Iterable[float]) -> dict[str, Any]:
    """Table 3 for one network: the optimum of its layers, and what H-ILP and HiRemate find for them."""
    network = Network(name, layers(captured(name)[0].graph))
    plain = max(PAPER_OPTIMAL[name]) / SHARE_OF_LARGEST
    if name in PAPER_RESULTS:
        _, budget, share, _ = PAPER_RESULTS[name]
        plain = budget / (share / 100)
    rows = []
    for gigabytes in budgets:
        share = gigabytes / plain
        found = {
            OPTIMUM: network.solve(share, OPTIMUM, OPTIMUM_SECONDS, max_ops=len(network.problem)),
            H_ILP: network.solve(share, H_ILP, OPTIMUM_SECONDS, **PAPER_SIZE),
            HIREMATE: network.solve(share, HIREMATE, OPTIMUM_SECONDS),
        }
        if TABLE_2.get(name) == gigabytes:
            found[OPS] = captured(name)[0].solve(share, HIREMATE, OPTIMUM_SECONDS)
        rows.append({"paper_gigabytes": gigabytes, "share": share, "solutions": found})
    return {
        "network": name,
        "batch": BATCHES[name],
        "layers": len(network.problem),
        "activation_bytes": network.activations,
        "rows": rows,
    }


def curve(name: str, shares: Iterable[float]) -> dict[str, Any]:
    """Figure 5 for one network."""
    network, _ = captured(name)
    rows = []
    for share in shares:
        found = {
            label: network.solve(share, method, CURVE_SECONDS, **options)
            for label, (method, options) in CURVE_METHODS.items()
        }
        rows.append({"share": share, "solutions": found})
    return {"network": name, "batch": BATCHES[name], "activation_bytes": network.activations, "rows": rows}


def levels(sizes: tuple[int, int], shares: Iterable[float]) -> dict[str, Any]:
    """Figure 6 for one M^t and M^l: H-ILP at the top level alone, and with the dynamic program beside it."""
    network, _ = captured(LEVELS)
    top, block = sizes
    options: dict[str, Any] = {"partitioner": "h_partition", "top_size": top, "block_size": block}
    found = partition("h_partition", network.problem, top_size=top, block_size=block)
    rows = [
        {
            "share": share,
            "solutions": {
                ALONE: network.solve(share, HIREMATE, CURVE_SECONDS, top=(H_ILP,), **options),
                HIREMATE: network.solve(share, HIREMATE, CURVE_SECONDS, **options),
            },
        }
        for share in shares
    ]
    return {"top_size": top, "block_size": block, "partition": hierarchy(network.problem, found), "rows": rows}


# -- tables and a picture ----------------------------------------------------------------------------------------------------


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
