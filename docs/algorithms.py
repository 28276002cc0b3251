"""The picture and the tables of numbers in `algorithms.md`: every method on one captured network, at several budgets.

Run from the repository's folder: ``python docs/algorithms.py`` (some four minutes; it needs transformers and matplotlib).
``lightning-remat curve`` makes the same table on any graph file; here the lines are spread over panels, to be told apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_remat import rematerialize
from lightning_remat.errors import SolverError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem, Solution, available, find_smallest, solve

PANELS = {
    "this project's, and XLA's greedy": ("auto", "crossing", "moments", "descent", "greedy", "greedy_xla"),
    "checkpoints of segments": ("chen_sqrt", "chen_greedy", "griewank_logn"),
    "checkpoints, single nodes": ("ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy"),
    "integer and linear programs": ("milp", "rk_checkmate", "moccasin", "lp_rounding", "checkmate_unpartitioned"),
    "decompositions and lower sets": ("treewidth", "pathwidth", "exact_dp", "approx_dp"),
    "blocks with options": ("rotor", "h_ilp", "hiremate"),
}
LINEAR = 1.0
"""Percent of extra time up to which the picture is linear; beyond, it is logarithmic."""


class NextToken(nn.Module):
    """GPT-2 with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=2,
            n_embd=256,
            n_head=8,
            vocab_size=4000,
            n_positions=256,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each of ``tokens`` (batch, length) from those before it."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def captured() -> ComputationGraph:
    """The training step of a GPT-2 of 2 layers, 4 sequences of 256 tokens; costs are FLOPs."""
    torch.manual_seed(0)
    step = rematerialize(NextToken().train(), budget=1.0, cost_model="flops", solver="no_remat")
    step(torch.randint(0, 4000, (4, 256)))
    assert step.plan is not None, step.failures
    return step.plan.graph


def main() -> None:
    """Capture, solve, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", type=Path, help="a graph file instead of the GPT-2")
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).with_suffix(".png"))
    given = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    graph = ComputationGraph.load(given.graph) if given.graph else captured()
    problem = Problem(graph)
    baseline = problem.evaluate(problem.captured)
    low, high = find_smallest(graph, given.time_limit).peak_bytes, baseline.peak_bytes
    budgets = [low + (high - low) * i // (given.points - 1) for i in range(given.points)]
    console.print(f"{len(graph.ops)} ops, {len(problem)} nodes, {problem.boundary} of them in the forward")
    console.print(f"floor {graph.floor_bytes:,}, smallest peak found {low:,}, without rematerialization {high:,} bytes")
    methods = [method for panel in PANELS.values() for method in panel]
    console.print("not drawn:", ", ".join(sorted(set(available()) - set(methods))))
    found: dict[str, list[Solution]] = {}
    with console.status("solving") as status:
        for method in methods:
            status.update(method)
            try:
                found[method] = [solve(graph, budget, method, given.time_limit) for budget in budgets]
            except SolverError as error:
                console.print(f"{method}: {error}")
                continue
            console.print(row(method, found[method], baseline.seconds))
    draw(found, budgets, baseline.seconds, graph.floor_bytes).savefig(given.out)
    middle = given.points // 3
    console.print(f"\nAt {budgets[middle] / 2**20:.0f} MiB:")
    for method, solutions in found.items():
        console.print(detail(method, solutions[middle], baseline.seconds))


def row(method: str, solutions: list[Solution], seconds: float) -> str:
    """A method's line of the table of extra times."""
    cells = [f"{s.seconds / seconds - 1:+.1%}" if s.schedule else s.status.value for s in solutions]
    return f"| `{method}` | {' | '.join(cells)} |"


def detail(method: str, solution: Solution, seconds: float) -> str:
    """A method's line of the table at one budget."""
    if solution.schedule is None:
        return (
            f"| `{method}` | {solution.status.value} | | | {solution.solve_seconds:.1f} |  {'; '.join(solution.notes)}"
        )
    extra, bound = solution.seconds / seconds - 1, solution.lower_bound_seconds / seconds - 1
    return (
        f"| `{method}` | {extra:+.1%} | {solution.peak_bytes / 2**20:.1f} | {bound:+.1%} | {solution.solve_seconds:.1f} |"
        f"  {solution.status.value}, {len(solution.schedule.steps)} steps; {'; '.join(solution.notes)}"
    )


def draw(found: dict[str, list[Solution]], budgets: list[int], seconds: float, floor_bytes: int) -> Figure:
    """Extra time against budget, a panel a family; in each the cheapest of all methods, in grey."""
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    x = [budget / 2**20 for budget in budgets]
    best = [100 * (min(s[i].seconds for s in found.values()) / seconds - 1) for i in range(len(budgets))]
    for axes, (title, methods) in zip(panels.flat, PANELS.items(), strict=True):
        axes.plot(x, best, color="0.8", lw=6, solid_capstyle="round", label="the cheapest of all")
        for index, method in enumerate(methods):
            pairs = [(b, 100 * (s.seconds / seconds - 1)) for b, s in zip(x, found.get(method, []), strict=False)]
            pairs = [(b, extra) for b, extra in pairs if extra < float("inf")]
            label = method if len(pairs) > 1 else f"{method}: none below the peak"
            axes.plot([b for b, _ in pairs], [e for _, e in pairs], marker="osD^vP"[index], ms=5, lw=1.3, label=label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.set_yticks([0, 0.5, 1, 3, 10, 30, 100, 300], ["0", "0.5", "1", "3", "10", "30", "100", "300"])
        axes.set_ylim(-0.1, 20_000)  # room for the legend
        axes.grid(axis="y", color="0.92", lw=0.6)
    for axes in panels[-1]:
        axes.set_xlabel("budget [MiB]")
    for axes in panels[:, 0]:
        axes.set_ylabel("extra time [% of the step]")
    figure.suptitle(
        f"GPT-2, 2 layers, FLOPs as times: {floor_bytes / 2**20:.0f} MiB are held whatever the schedule",
        x=0.01,
        ha="left",
    )
    return figure


if __name__ == "__main__":
    main()
