"""Checkmate (Jain et al. 2020), section 6: Table 2, and what Figures 5 and 6 show.

    python -m benchmarks.papers.checkmate            # all of it: a quarter of an hour
    python -m benchmarks.papers.checkmate --quick    # VGG16 and U-Net, a budget or two

Costs are FLOPs. Schedules are made for graphs of layers, as the paper's are (`checkmate_networks.layers`). Each network is
solved at budgets spread between the smallest peak that `find_smallest` finds and the peak without rematerialization. A ratio
is a schedule's cost over that of the best known one: the cheapest, of whatever method, whose peak is within that budget. What
is compared with Table 2 is the geometric mean of the ratio over the budgets for which the method has a schedule, as in the
paper (section 6.5), whose best known schedules are those of an hour of Gurobi on 24 cores. The certified bound is the best of
the linear program's and the integer program's; it holds for the captured order of layers.

Figure 6 (section 6.4): the largest batch in 16 GiB at the cost of one extra forward at most. Baselines are scaled (eq. 11);
ours are the largest for which a schedule was found, to within a hundredth.

The paper names no budgets; batch sizes are those that make the networks need about 20 GiB. GiB is 2^30 bytes.
"""

from __future__ import annotations

import math
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
from benchmarks.papers.checkmate_networks import capture, layers
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem, find_smallest, solve
from lightning_remat.solvers.checkmate import _generalized_chen, _lp_rounding
from lightning_remat.solvers.chen_griewank import _griewank
from lightning_remat.solvers.portfolio._batch_size import (
    extrapolated_batch_size,
    linear_in_batch,
    max_batch_size,
    one_extra_forward,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REGISTERED = (_generalized_chen, _griewank, _lp_rounding)

BATCHES = {"MobileNet": 512, "VGG16": 256, "VGG19": 256, "U-Net": 32, "ResNet50": 256}
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Budgets, as shares of the way from the smallest peak found to the peak without rematerialization."""

LP_SECONDS, MILP_SECONDS, BATCH_SECONDS = 20.0, 10.0, 10.0
"""Time limits of one solve."""

LP, UNFILLED, MILP = "lp_rounding", "lp_rounding, not filled up", "milp"
CHEN, CHEN_GREEDY, GRIEWANK = "chen_sqrt", "chen_greedy", "griewank_logn"
GENERALIZED = ("ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy")
BASELINES = (CHEN, CHEN_GREEDY, GRIEWANK, *GENERALIZED)
OTHERS = ("greedy", "treewidth")
"""Not in the paper; they count towards the best known schedule."""

LARGEST_FOR_LP, LARGEST_FOR_MILP = 120, 80
"""Layers up to which the programs are solved without coarsening."""

PAPER_RATIOS: dict[str, dict[str, float]] = {
    "MobileNet": {CHEN: 1.14, CHEN_GREEDY: 1.07, GRIEWANK: 7.07, LP: 1.06},
    "VGG16": {CHEN: 1.28, CHEN_GREEDY: 1.06, GRIEWANK: 1.44, LP: 1.01},
    "VGG19": {CHEN: 1.54, CHEN_GREEDY: 1.39, GRIEWANK: 1.75, LP: 1.00},
    "U-Net": {CHEN: 1.27, CHEN_GREEDY: 1.23, LP: 1.03},
    "ResNet50": {CHEN: 1.20, CHEN_GREEDY: 1.25, LP: 1.05},
}
"""Table 2."""

WITHIN = 1.06
"""Table 2's largest ratio of the approximation."""

PAPER_SHARE = 16 / 23
"""U-Net at batch 32: the paper's 16 GB of the 23 GB that it needs without rematerialization (section 6.3)."""

HELD, PLAIN = "every result held", "no_remat"
CARD = 16 * 2**30
BATCH_NETWORKS = ("U-Net", "FCN8", "SegNet", "VGG19", "ResNet50", "MobileNet")
PAPER_BATCH = {"U-Net": 61, "MobileNet": 1105}
PAPER_TIMES_ALL = {"MobileNet": 5.1}
PAPER_TIMES_BASELINE = {"U-Net": 1.73, "MobileNet": 1.73}
"""Section 6.4: batch sizes, over those of keeping everything, and over the best baseline's."""


def study(name: str, batch: int, shares: Sequence[float], quick: bool) -> dict[str, Any]:
    """One network at several budgets, by all methods."""
    ops = capture(name, batch)
    graph = layers(ops)
    problem = Problem(graph)
    plain = problem.evaluate(problem.captured)
    smallest = find_smallest(graph).peak_bytes
    budgets = [smallest + round(share * (plain.peak_bytes - smallest)) for share in shares]
    if name == "U-Net":
        budgets.append(round(PAPER_SHARE * plain.peak_bytes))
    budgets.sort()
    rows = [_at_budget(graph, ops, budget, quick) for budget in budgets]
    found = [one for row in rows for one in row["solutions"].values()]
    for index, row in enumerate(rows):
        row["best_seconds"] = min([one["seconds"] for one in found if one["peak_bytes"] <= row["budget_bytes"]])
        row["bound_seconds"] = max([larger["own_bound_seconds"] for larger in rows[index:]])
    return {
        "network": name,
        "batch": batch,
        "ops": len(Problem(ops)),
        "layers": len(problem),
        "peak_bytes": plain.peak_bytes,
        "ops_peak_bytes": Problem(ops).evaluate(Problem(ops).captured).peak_bytes,
        "smallest_peak_bytes": smallest,
        "seconds": plain.seconds,
        "one_extra_forward": one_extra_forward(graph) / plain.seconds,
        "dropped": dropped(problem),
        "budgets": rows,
    }


def _at_budget(graph: ComputationGraph, ops: ComputationGraph, budget: int, quick: bool) -> dict[str, Any]:
    count = len(graph.ops)
    limit = 3.0 if quick else LP_SECONDS
    jobs: list[tuple[str, str, float, dict[str, Any]]] = [
        (method, method, limit, {}) for method in (*BASELINES, *OTHERS)
    ]
    jobs.append((LP, "lp_rounding", limit, {"max_ops": LARGEST_FOR_LP}))
    jobs.append((UNFILLED, "lp_rounding", limit, {"max_ops": LARGEST_FOR_LP, "fill_up": False}))
    if count <= LARGEST_FOR_MILP:
        jobs.append((MILP, "milp", limit / 2, {"max_ops": LARGEST_FOR_MILP}))
    solutions, bound = {}, 0.0
    for label, method, seconds, options in jobs:
        found = solve(graph, budget, method, seconds, **options)
        bound = max(bound, found.lower_bound_seconds)
        if found.schedule is not None:
            solutions[label] = {
                "seconds": found.seconds,
                "peak_bytes": found.peak_bytes,
                "status": found.status.value,
                "solve_seconds": round(found.solve_seconds, 2),
            }
    finer = {method: solve(ops, budget, method, limit / 2) for method in ("auto", "lp_rounding")}
    return {
        "budget_bytes": budget,
        "solutions": solutions,
        "own_bound_seconds": bound,
        "ops_seconds": {method: found.seconds if found.schedule else None for method, found in finer.items()},
    }


def dropped(problem: Problem) -> dict[str, float]:
    """Cost of √n checkpoints over that of running everything once, what is computed again being held or not."""
    checkpoints = _generalized_chen.root_ends(range(problem.boundary))
    once = problem.evaluate(problem.captured).seconds

    def over(hold: bool) -> float:
        return problem.evaluate(_generalized_chen.recomputations(problem, checkpoints, hold)).seconds / once

    return {"held": over(True), "not_held": over(False)}


def ratios(study: Mapping[str, Any], method: str) -> list[float]:
    """By budget for which ``method`` has a schedule, its cost over the best known."""
    rows = study["budgets"]
    return [row["solutions"][method]["seconds"] / row["best_seconds"] for row in rows if method in row["solutions"]]


def geometric_mean(values: Sequence[float]) -> float:
    """Of one value at least."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


# -- the largest batch -----------------------------------------------------------------------------------------------------


def batch_sizes(name: str, quick: bool) -> dict[str, Any]:
    """Figure 6's bars of one network, and what would fit if every result of the forward were held."""
    sizes = (32, 64)
    ops_at = linear_in_batch(capture(name, sizes[0]), sizes[0], capture(name, sizes[1]), sizes[1])

    def layers_at(batch: int) -> ComputationGraph:
        return layers(ops_at(batch))

    fixed = ops_at(0).floor_bytes  # parameters and their gradients
    each = 64  # images of the graph that is scaled: bytes that do not grow with the batch are few beside them
    problem = Problem(ops_at(each))
    held = sum([problem.nbytes[v] for node in range(problem.boundary) for v in problem.writes[node]])
    found = {
        HELD: (CARD - fixed) * each // held,
        PLAIN: max_batch_size(layers_at, CARD, method="no_remat").batch_size,
    }
    for method in BASELINES:
        found[method] = extrapolated_batch_size(layers_at(each), CARD, fixed, batch_size=each, method=method).batch_size
    ours: list[tuple[str, Any, dict[str, Any]]] = [("greedy", layers_at, {}), ("greedy, ops", ops_at, {})]
    ours += [("treewidth, ops", ops_at, {}), ("rotor, ops", ops_at, {})]
    if not quick:
        ours.append(("hiremate, ops", ops_at, {}))
        ours.append((LP, layers_at, {"max_ops": LARGEST_FOR_LP}))
    for label, graph_of, options in ours:
        method = label.partition(",")[0]
        found[label] = max_batch_size(
            graph_of, CARD, method=method, precision=0.01, time_limit=BATCH_SECONDS, **options
        ).batch_size
    return {"network": name, "fixed_bytes": fixed, "batch_sizes": found}


# -- tables and a picture --------------------------------------------------------------------------------------------------


def run(quick: bool, console: Console) -> dict[str, Any]:
    """All networks; returns what goes into the file."""
    studies, sizes = [], []
    for name in track(("VGG16", "U-Net") if quick else tuple(BATCHES), "Table 2, Figure 5", console=console):
        studies.append(study(name, BATCHES[name], SHARES[1:2] if quick else SHARES, quick))
    for name in track(("U-Net",) if quick else BATCH_NETWORKS, "Figure 6", console=console):
        sizes.append(batch_sizes(name, quick))
    limits = {"lp_rounding": LP_SECONDS, "milp": MILP_SECONDS, "largest batch": BATCH_SECONDS}
    return {
        "table_2": studies,
        "figure_6": sizes,
        "time_limits": limits,
        "paper": {"table_2": PAPER_RATIOS, "figure_6": PAPER_BATCH},
    }


def _table(title: str, rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> Table:
    """A column for each of ``columns``, after one of the names of the rows."""
    return numbers_table(title, ("", *columns), [(name, *cells) for name, cells in rows.items()])


def ratio_table(studies: Sequence[Mapping[str, Any]]) -> Table:
    """Table 2."""
    rows = {"layers (ops)": [f"{one['layers']} ({one['ops']})" for one in studies]}
    for method in (CHEN, CHEN_GREEDY, *GENERALIZED, GRIEWANK, UNFILLED, LP):
        rows[method] = [_ratio_cell(one, method) for one in studies]
    gaps = [[row["best_seconds"] / row["bound_seconds"] for row in one["budgets"]] for one in studies]
    rows["best over certified bound"] = [f"{geometric_mean(gap):.3f}" for gap in gaps]
    title = (
        "Table 2: cost over the best known schedule's, geometric mean over the budgets that have one\n"
        "(in brackets the paper's; how many budgets)"
    )
    return _table(title, rows, [one["network"] for one in studies])


def _ratio_cell(one: Mapping[str, Any], method: str) -> str:
    paper = PAPER_RATIOS[one["network"]].get(method)
    found = ratios(one, method)
    mean = f"{geometric_mean(found):.2f}" if found else "-"
    return mean + (f" ({paper:.2f})" if paper else "") + f" {len(found)}/{len(one['budgets'])}"


def ratio_notes(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the approximation is where the paper has it, and what was measured of the rest."""
    near = [one["network"] for one in studies if (r := ratios(one, LP)) and geometric_mean(r) <= WITHIN]
    notes = [
        f"lp_rounding within {WITHIN} of the best known schedule on {len(near)} of {len(studies)}: {', '.join(near)}"
    ]
    for one in studies:
        held, not_held = one["dropped"]["held"], one["dropped"]["not_held"]
        notes.append(
            f"{one['network']}: one extra forward makes {one['one_extra_forward']:.2f} of the cost; √n checkpoints {held:.2f} "
            f"where what is computed again is held until its last use, {not_held:.2f} where every reader computes it anew"
        )
    return notes


def overhead_table(one: Mapping[str, Any]) -> Table:
    """Figure 5, and schedules of the finer graph."""
    rows = {}
    for method in (*BASELINES, *OTHERS, UNFILLED, LP, MILP):
        rows[method] = [row["solutions"].get(method, {}).get("seconds") for row in one["budgets"]]
    rows["best known"] = [row["best_seconds"] for row in one["budgets"]]
    rows["certified bound"] = [row["bound_seconds"] for row in one["budgets"]]
    for method in ("auto", "lp_rounding"):
        rows[f"{method} on {one['ops']} ops"] = [row["ops_seconds"][method] for row in one["budgets"]]
    cells = {
        label: [f"{100 * (cost / one['seconds'] - 1):.1f}" if cost else "-" for cost in costs]
        for label, costs in rows.items()
    }
    title = (
        f"Figure 5: {one['network']}, batch {one['batch']}, {one['layers']} layers: overhead in percent by budget\n"
        f"(no rematerialization: {one['peak_bytes'] / 2**30:.2f} GiB)"
    )
    return _table(title, cells, [f"{row['budget_bytes'] / 2**30:.2f} GiB" for row in one["budgets"]])


def at_the_papers_share(one: Mapping[str, Any]) -> str:
    """Section 6.3's numbers of U-Net."""
    row = min(one["budgets"], key=lambda row: abs(row["budget_bytes"] - PAPER_SHARE * one["peak_bytes"]))
    best = row["best_seconds"]

    def over(methods: Sequence[str]) -> str:
        costs = [row["solutions"][method]["seconds"] / best for method in methods if method in row["solutions"]]
        return f"{min(costs):.2f}x" if costs else "infeasible"

    return (
        f"U-Net, batch 32, at 16/23 of its memory: overhead {100 * (best / one['seconds'] - 1):.1f} % (the paper: under 10); "
        f"the baselines of the paper cost {over(GENERALIZED)} of the best at least (1.20x), linearized greedy "
        f"{over(['linearized_greedy'])} (1.20x), linearized sqrt {over(['linearized_sqrt'])} (1.38x), and chen_greedy, which "
        f"keeps all that crosses, {over([CHEN_GREEDY])}. It needs {one['ops_peak_bytes'] / 2**30:.1f} GiB here (23 GB): its "
        "network is not the paper's"
    )


def batch_table(sizes: Sequence[Mapping[str, Any]]) -> Table:
    """Figure 6."""
    labels = list(dict.fromkeys(label for one in sizes for label in one["batch_sizes"]))
    rows = {label: [str(one["batch_sizes"][label]) for one in sizes] for label in labels}
    best = [best_batch(one) for one in sizes]
    rows["best"] = [f"{size}{_paper(PAPER_BATCH, one)}" for size, one in zip(best, sizes, strict=True)]
    rows["over no_remat"] = [
        f"{size / one['batch_sizes'][PLAIN]:.2f}{_paper(PAPER_TIMES_ALL, one)}"
        for size, one in zip(best, sizes, strict=True)
    ]
    rows["over the best baseline"] = [
        f"{size / best_baseline(one):.2f}{_paper(PAPER_TIMES_BASELINE, one)}"
        for size, one in zip(best, sizes, strict=True)
    ]
    title = "Figure 6: largest batch in 16 GiB at the cost of one extra forward at most (the paper's in brackets)"
    return _table(title, rows, [one["network"] for one in sizes])


def _paper(figures: Mapping[str, float], one: Mapping[str, Any]) -> str:
    return f" ({figures[one['network']]})" if one["network"] in figures else ""


def best_baseline(one: Mapping[str, Any]) -> int:
    """The largest batch of any baseline."""
    sizes: dict[str, int] = one["batch_sizes"]
    return max(sizes[method] for method in BASELINES)


def best_batch(one: Mapping[str, Any]) -> int:
    """The largest batch of any method of ours."""
    sizes: dict[str, int] = one["batch_sizes"]
    return max(size for label, size in sizes.items() if label not in (HELD, PLAIN, *BASELINES))


def batch_notes(sizes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was measured about the batch sizes that the paper gives."""
    notes = []
    for one in sizes:
        found, name = one["batch_sizes"], one["network"]
        if name in PAPER_TIMES_ALL:
            notes.append(
                f"{name}: the paper's {PAPER_BATCH[name]} is {PAPER_TIMES_ALL[name]} times keeping everything, which is then "
                f"{PAPER_BATCH[name] / PAPER_TIMES_ALL[name]:.0f}; here {found[HELD]} would fit with every result of the "
                f"forward held, {found[PLAIN]} as PyTorch holds them: nothing the backward does not read, ReLU in place"
            )
        if name in PAPER_TIMES_BASELINE:
            text = f"{PAPER_BATCH[name] / PAPER_TIMES_BASELINE[name]:.0f}"
            notes.append(f"{name}: the paper's best baseline is then {text}; here {best_baseline(one)}")
    return notes


def present(data: Mapping[str, Any]) -> list[RenderableType]:
    """What is printed."""
    studies, sizes = data["table_2"], data["figure_6"]
    parts: list[RenderableType] = [ratio_table(studies), *ratio_notes(studies)]
    parts += [overhead_table(one) for one in studies]
    parts += [at_the_papers_share(one) for one in studies if one["network"] == "U-Net"]
    return [*parts, batch_table(sizes), *batch_notes(sizes)]


COLORS = {
    CHEN: "#999999", CHEN_GREEDY: "#555555", GRIEWANK: "#b07aa1", "ap_greedy": "#e0a030", "linearized_greedy": "#c77800",
    LP: "#1f6fb4", MILP: "#2a9d5c",
}  # fmt: skip
BARS = {"no_remat": "#222222", "ap_sqrt": "#e0a030", "linearized_greedy": "#c77800", "best": "#1f6fb4"}


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """Figures 5 and 6; ``False`` without matplotlib."""
    return draw(path, (15, 8), lambda figure: _paint(figure, data))


def _paint(figure: Figure, data: Mapping[str, Any]) -> None:
    studies, sizes = data["table_2"], data["figure_6"]
    panels = figure.subplots(2, 3).ravel()
    for axes, one in zip(panels, studies, strict=False):
        for method, color in COLORS.items():
            rows = [row for row in one["budgets"] if method in row["solutions"]]
            overheads = [100 * (row["solutions"][method]["seconds"] / one["seconds"] - 1) for row in rows]
            budgets = [row["budget_bytes"] / 2**30 for row in rows]
            axes.plot(budgets, overheads, "o-", ms=4, lw=1.2, color=color, label=method)
        axes.axvline(one["peak_bytes"] / 2**30, color="#222222", lw=1, ls=(0, (5, 3)))
        entitle(axes, f"{one['network']}, batch {one['batch']}: overhead [%] by budget [GiB]")
        axes.set_ylim(-1, 75)
    panels[0].legend(fontsize=8, frameon=False)
    axes = panels[5]
    for index, (label, color) in enumerate(BARS.items()):
        heights = [
            (best_batch(one) if label == "best" else one["batch_sizes"][label]) / one["batch_sizes"]["no_remat"]
            for one in sizes
        ]
        axes.bar([i + 0.2 * index for i in range(len(sizes))], heights, 0.19, color=color, label=label)
    axes.set_xticks([i + 0.3 for i in range(len(sizes))], [one["network"] for one in sizes])
    entitle(axes, "largest batch in 16 GiB, over that without rematerialization")
    axes.legend(fontsize=8, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the networks, print the tables, write the file and the picture."""
    packages = ("lightning_remat", "torch", "pytorchcv", "mip")
    return script("checkmate", __doc__, "VGG16 and U-Net, a budget or two", run, present, picture, packages, arguments)


if __name__ == "__main__":
    sys.exit(main())
