"""Kumar et al. 2019, section 4: Tables 1 and 2, and what Figures 2 to 4 show, on graphs of the same networks.

    python -m benchmarks.papers.kumar            # all of it: a minute
    python -m benchmarks.papers.kumar --quick    # small depths only

NoRemat, GreedyRemat and TWRemat run under the paper's model: one final node, every op costs 1, memory is the bytes of the
tensors that are held (the networks are in `kumar_networks`, with what is left out). The paper gives GreedyRemat's memory limit
nowhere: here several are tried, and the one of the lowest peak counts. Its figures are pictures without numbers: beside
Figures 2 to 4 stands what its text says of them. Schedules are those of the algorithms, with nothing taken out that
the budget would have had room for; each is verified. GiB is 2^30 bytes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from benchmarks.common.commands import script
from benchmarks.common.pictures import draw, entitle
from benchmarks.common.tables import numbers_table
from benchmarks.papers.kumar_networks import feed_forward, resnet, transformer
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import verify
from lightning_remat.solvers import NodeSequence, Problem
from lightning_remat.solvers.common._prune import drop_unused, once
from lightning_remat.solvers.kumar._tree_decomposition import Tree, decompose, width
from lightning_remat.solvers.kumar._treewidth import NodeGraph, remat
from lightning_remat.solvers.xla._greedy_xla import greedy_remat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
WITHIN = 0.25
"""Share by which a peak ratio of Table 2 may be off."""

PAPER_SIZES = {
    "ResNet200": (17705, 27312, 11),
    "FFN (100 layers)": (3217, 4447, 6),
    "Transformer Base": (15842, 21771, 18),
}
"""Table 1: n, m, width."""

PAPER_TRANSFORMERS = {
    "Transformer Base": (3.97, 2.92, 1.21, 1.14, 10.61),
    "Transformer Big": (13.25, 10.12, 1.27, 2.89, 10.64),
}
"""Table 2: GiB of NoRemat; GiB and relative length of GreedyRemat and of TWRemat."""

PAPER_FIGURES = {
    "ResNet": "NoRemat linear; GreedyRemat about half of it, linear; TWRemat sublinear, up to 10x less; 3x to 4x as long",
    "FFN": "NoRemat linear; GreedyRemat saves very little; TWRemat sublinear, up to 10x less; 3x to 4x as long",
}
"""Sections 4.1 and 4.2, of Figures 2 and 3."""

LOGITS = (
    "TWRemat's peak lies at the logits, three tensors of whose size make four fifths of it (0.51 GiB each in the big model):\n"
    "the cross-entropy alone reads two and writes one. The paper's peaks are 4.4 and 5.6 of them, at twice the width"
)
"""Measured: what is in memory at that peak."""

HELD = {"Transformer Base, gradients held": False, "Transformer Big, gradients held": True}
"""Networks whose final node reads the gradients of all weights, and whether they are big."""

NO_REMAT, GREEDY, TREEWIDTH = "NoRemat", "GreedyRemat", "TWRemat"
LONGEST = 60.0
"""Evaluations a node after which a schedule is given up."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One schedule: peak in bytes, evaluations over nodes, seconds that it took to find, and for TWRemat its k."""

    method: str
    peak_bytes: int
    relative_length: float
    seconds: float
    recursion_limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """One network: nodes, edges, width found, and the schedules of the methods."""

    family: str
    depth: int
    nodes: int
    edges: int
    width: int
    decomposition_seconds: float
    points: tuple[Point, ...]

    def of(self, method: str) -> Point:
        """The schedule of a method: of TWRemat the whole recursion's."""
        return next(p for p in self.points if p.method == method and p.recursion_limit in (None, 1))

    def ratio(self, method: str) -> float:
        """Peak of NoRemat over that of ``method``."""
        return self.of(NO_REMAT).peak_bytes / self.of(method).peak_bytes


def study(family: str, depth: int, graph: ComputationGraph, limits: Iterable[int] = (1,), greedy: bool = True) -> Found:
    """Run the methods on one network.

    Args:
        family: its name.
        depth: its layers.
        graph: the network.
        limits: the k of TWRemat(k), from 1.
        greedy: whether GreedyRemat is run too.
    """
    problem = Problem(graph)
    nodes = NodeGraph(problem)
    undirected = nodes.undirected()
    started = time.perf_counter()
    tree = decompose(undirected)
    seconds = time.perf_counter() - started
    plain = once(problem)
    points = [_point(NO_REMAT, graph, problem, lambda: plain)]
    if greedy:
        points.append(best_greedy(graph, problem, points[0].peak_bytes))
    for limit in limits:
        found = _point(TREEWIDTH, graph, problem, lambda k=limit: _tree_schedule(problem, nodes, tree, k), limit)  # type: ignore[misc]
        points.append(found)
    edges = sum(map(len, problem.predecessors))
    return Found(family, depth, len(problem), edges, width(tree[0]), seconds, tuple(points))


def best_greedy(graph: ComputationGraph, problem: Problem, peak: int, halvings: int = 6) -> Point:
    """GreedyRemat at the limit of the lowest peak, by bisection between the largest op and no rematerialization."""
    low = max([problem.base_bytes + _alone(problem, node) for node in range(len(problem))])
    found = []
    for _ in range(halvings):
        limit = (low + peak) // 2
        point = _point(GREEDY, graph, problem, lambda at=limit: _found(greedy_remat(problem, at, math.inf)))  # type: ignore[misc]
        found.append(point)
        if point.peak_bytes <= limit:
            peak = limit
        else:
            low = limit
    return min(found, key=lambda point: (point.peak_bytes, point.relative_length))


def _alone(problem: Problem, node: int) -> int:
    return sum([problem.nbytes[v] for v in {*problem.reads[node], *problem.writes[node]}])


def _tree_schedule(problem: Problem, nodes: NodeGraph, tree: Tree, limit: int) -> NodeSequence:
    order = remat(nodes.predecessors, tree, nodes.targets, limit, LONGEST * len(problem))
    return drop_unused(problem, nodes.legal(_found(order)))


def _found(value: T | None) -> T:
    if value is None:
        raise RuntimeError(f"a schedule of more than {LONGEST:g} times the nodes")
    return value


def _point(
    method: str, graph: ComputationGraph, problem: Problem, make: Callable[[], NodeSequence], limit: int | None = None
) -> Point:
    started = time.perf_counter()
    sequence = make()
    seconds = time.perf_counter() - started
    peak = verify(graph, problem.expand(sequence), None)
    return Point(method, peak, len(sequence.nodes) / len(problem), seconds, limit)


# -- the paper's tables and figures -------------------------------------------------------------------------------------


FAMILIES: dict[str, tuple[Callable[[int], ComputationGraph], tuple[int, ...], tuple[int, ...]]] = {
    "ResNet": (resnet, (18, 34, 50, 101, 152, 200), (18, 50)),
    "FFN": (feed_forward, (10, 25, 50, 100, 200, 400), (10, 25)),
    "Transformer": (transformer, (2, 4, 6, 12, 24), (1, 2)),
}
"""Networks by depth, the depths, and those of a quick run."""


def run(quick: bool, console: Console) -> dict[str, Any]:
    """All networks; returns what goes into the file."""
    jobs: list[tuple[str, int, Callable[[], ComputationGraph], tuple[int, ...], bool]] = []
    for family, (build, depths, few) in FAMILIES.items():
        for depth in few if quick else depths:
            deepest = family == "ResNet" and depth == (few if quick else depths)[-1]
            limits = tuple(1 << i for i in range(13)) if deepest else (1,)
            jobs.append((family, depth, lambda b=build, d=depth: b(d), limits, True))  # type: ignore[misc]
    if not quick:
        jobs.append(("Transformer Big", 6, lambda: transformer(6, big=True), (1,), True))
        for held, big in HELD.items():
            jobs.append((held, 6, lambda b=big: transformer(6, big=b, hold_gradients=True), (1,), True))  # type: ignore[misc]
        jobs.append(("Transformer", 48, lambda: transformer(48), (1,), False))  # about 18,000 nodes
    found = []
    for family, depth, make, limits, greedy in track(jobs, "networks", console=console):
        console.log(f"{family}, {depth} layers")
        found.append(study(family, depth, make(), limits, greedy))
    return {
        "networks": [dataclasses.asdict(one) for one in found],
        "paper": {"table 1": PAPER_SIZES, "table 2": PAPER_TRANSFORMERS, "figures 2 and 3": PAPER_FIGURES},
    }


def found_of(data: dict[str, Any]) -> list[Found]:
    """The networks, as `run` found them."""
    return [Found(**{**one, "points": tuple(Point(**point) for point in one["points"])}) for one in data["networks"]]


def _named(found: Sequence[Found]) -> dict[str, Found]:
    """The paper's names for the networks of Tables 1 and 2."""
    names = {
        ("ResNet", 200): "ResNet200",
        ("FFN", 100): "FFN (100 layers)",
        ("Transformer", 6): "Transformer Base",
        ("Transformer Big", 6): "Transformer Big",
    }
    return {names[one.family, one.depth]: one for one in found if (one.family, one.depth) in names}


def sizes_table(found: Sequence[Found]) -> Table:
    """Table 1."""
    title = "Table 1: nodes, edges, width of the decomposition (the paper's in brackets)"
    table = numbers_table(title, ("network", "n", "m", "width", "decomposed in"))
    named = _named(found) | {f"{one.family}, {one.depth} layers": one for one in found if one.nodes > 15_000}
    for name, one in named.items():
        paper = PAPER_SIZES.get(name)
        numbers = zip((one.nodes, one.edges, one.width), paper or (None,) * 3, strict=True)
        cells = [f"{ours:,}" + (f" ({theirs:,})" if theirs else "") for ours, theirs in numbers]
        table.add_row(name, *cells, f"{one.decomposition_seconds:.1f} s")
    return table


def transformers_table(found: Sequence[Found]) -> Table:
    """Table 2."""
    table = numbers_table(
        "Table 2: GiB and relative length (the paper's in brackets)",
        ("network", "method", "GiB", "length", "peak ratio"),
        text=("network", "method"),
        caption=f"peak ratio: NoRemat's peak over the method's; * where it is within {WITHIN:.0%} of the paper's\n{LOGITS}",
    )
    for name, one in _named(found).items():
        if name not in PAPER_TRANSFORMERS:
            continue
        plain, greedy, greedy_length, tree, tree_length = PAPER_TRANSFORMERS[name]
        theirs = {NO_REMAT: (plain, 1.0), GREEDY: (greedy, greedy_length), TREEWIDTH: (tree, tree_length)}
        for method, (gib, length) in theirs.items():
            point, ratio = one.of(method), one.ratio(method)
            close = "*" if abs(ratio / (plain / gib) - 1) <= WITHIN else " "
            table.add_row(
                name,
                method,
                f"{point.peak_bytes / 2**30:.2f} ({gib:.2f})",
                f"{point.relative_length:.2f} ({length:.2f})",
                f"{ratio:.2f} ({plain / gib:.2f}) {close}",
            )
    return table


def held_notes(found: Sequence[Found]) -> list[str]:
    """The peak ratios of Table 2 where the gradients of all weights are there at the end."""
    notes = []
    for one in found:
        if one.family in HELD:
            plain, greedy, _, tree, _ = PAPER_TRANSFORMERS[one.family.partition(",")[0]]
            pairs = ((GREEDY, one.ratio(GREEDY), plain / greedy), (TREEWIDTH, one.ratio(TREEWIDTH), plain / tree))
            notes.append(
                f"{one.family} until the end (the paper does not say whether they are): peak ratio "
                + ", ".join(
                    f"{method} {ours:.2f} ({paper:.2f}, {ours / paper - 1:+.0%})" for method, ours, paper in pairs
                )
            )
    return notes


def depths_table(found: Sequence[Found]) -> Table:
    """Figures 2 and 3."""
    columns = (
        "network",
        "layers",
        "n",
        "NoRemat",
        "Greedy",
        "ratio",
        "length",
        "TWRemat",
        "ratio",
        "length",
        "found in",
    )
    caption = "\n".join(f"the paper on {family}: {text}" for family, text in PAPER_FIGURES.items())
    table = numbers_table("Figures 2 and 3: peak and length against depth", columns, caption=caption)
    for one in found:
        plain, tree = one.of(NO_REMAT), one.of(TREEWIDTH)
        has_greedy = any(point.method == GREEDY for point in one.points)
        cells = [one.family, str(one.depth), f"{one.nodes:,}", f"{plain.peak_bytes / 2**30:.3f}"]
        cells += _cells(one, GREEDY) if has_greedy else [""] * 3
        table.add_row(*cells, *_cells(one, TREEWIDTH), f"{tree.seconds:.1f} s")
    return table


def _cells(one: Found, method: str) -> list[str]:
    point = one.of(method)
    return [f"{point.peak_bytes / 2**30:.3f}", f"{one.ratio(method):.2f}", f"{point.relative_length:.2f}"]


def limits_table(one: Found) -> Table:
    """Figure 4."""
    table = numbers_table(f"Figure 4: TWRemat(k) on {one.family} {one.depth}", ("k", "GiB", "length"), text=())
    for point in one.points:
        if point.recursion_limit is not None:
            table.add_row(str(point.recursion_limit), f"{point.peak_bytes / 2**30:.3f}", f"{point.relative_length:.2f}")
    return table


def with_limits(found: Sequence[Found]) -> Found:
    """The network whose recursion limits were tried."""
    return max(found, key=lambda one: len(one.points))


COLORS = {NO_REMAT: "#222222", GREEDY: "#c77800", TREEWIDTH: "#1f6fb4"}


def present(data: dict[str, Any]) -> list[RenderableType]:
    """The tables that have rows."""
    found = found_of(data)
    own = [one for one in found if one.family not in HELD]
    sizes, table_2, depths, limits = (
        sizes_table(own), transformers_table(own), depths_table(own), limits_table(with_limits(own))
    )  # fmt: skip
    tables = [table for table in (sizes, table_2) if table.row_count]
    return [*tables, *held_notes(found), *(table for table in (depths, limits) if table.row_count)]


def picture(data: dict[str, Any], path: Path) -> bool:
    """Figures 2, 3 and 4; ``False`` without matplotlib."""
    return draw(path, (15, 7), lambda figure: _paint(figure, found_of(data)))


def _paint(figure: Figure, found: Sequence[Found]) -> None:
    panels = figure.subplots(2, 4)
    for column, family in enumerate(FAMILIES):
        for method, color in COLORS.items():
            line = [one for one in found if one.family == family and any(p.method == method for p in one.points)]
            depth = [one.depth for one in line]
            panels[0, column].plot(
                depth, [one.of(method).peak_bytes / 2**30 for one in line], "o-", color=color, label=method
            )
            panels[1, column].plot(
                depth, [one.of(method).relative_length for one in line], "o-", color=color, label=method
            )
        entitle(panels[0, column], f"{family}: peak", y="GiB")
        entitle(panels[1, column], f"{family}: length over NoRemat's", "layers")
    panels[0, 0].legend(fontsize=8, frameon=False)
    one = with_limits(found)
    points = [point for point in one.points if point.recursion_limit is not None]
    axes = panels[0, 3]
    axes.plot(
        [p.relative_length for p in points], [p.peak_bytes / 2**30 for p in points], "o-", color=COLORS[TREEWIDTH]
    )
    for p in points:
        axes.annotate(str(p.recursion_limit), (p.relative_length, p.peak_bytes / 2**30), fontsize=7)
    entitle(axes, f"TWRemat(k) on {one.family} {one.depth}, by k", "length over NoRemat's", "GiB")
    panels[1, 3].set_axis_off()
    for axes in panels.ravel():
        axes.set_ylim(bottom=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the networks, print the tables, write the file and the picture."""
    packages = ("lightning_remat", "networkx", "numpy")
    return script("kumar", __doc__, "small depths only", run, present, picture, packages, arguments)


if __name__ == "__main__":
    sys.exit(main())
