"""What is run for HiRemate's tables and figures (Gusak et al. 2025): its numbers, and a function a network for each of them.

`benchmarks.papers.hiremate` runs all of it, and says what budgets and times mean.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    pass

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
