"""Fewer, larger nodes: runs of consecutive nodes are contracted so that an exact method becomes affordable.

The captured order is a topological one, so contracting a run of it keeps the graph acyclic. No run crosses the boundary.

* The forward is cut where few bytes are in flight between forward nodes, near equal shares of its time and of the bytes
  of its values that the backward reads. Equal shares alone would cut through the middle of blocks; cheap cuts alone
  would leave one huge run.
* The backward is cut to match: for each forward cut, the backward position that best separates the nodes that read values
  from after the cut from those that read values from before it.

A coarse node reads what its run reads from outside and writes what others read of it; its workspace is the run's own
peak beyond those. Values of one run with the same readers are merged: keeping some of them without the others would
save no evaluation of the run. Evaluating a coarse node again costs its whole run, and all that it writes is there at
once, so the coarse optimum is no bound in either direction on the fine one. `Coarsening.refine` drops the evaluations
that nobody reads.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused


@dataclasses.dataclass(frozen=True)
class Coarsening:
    """A fine problem, its coarse one, and the run of fine nodes that each coarse node stands for."""

    fine: PlainProblem
    problem: PlainProblem
    runs: tuple[range, ...]

    def refine(self, sequence: NodeSequence) -> NodeSequence:
        """The fine sequence that a coarse one stands for, without the evaluations that nobody reads."""
        nodes = [node for group in sequence.nodes for node in self.runs[group]]
        boundary = sum([len(self.runs[group]) for group in sequence.nodes[: sequence.boundary]])
        return drop_unused(self.fine, NodeSequence(tuple(nodes), boundary))


def coarsen(problem: PlainProblem, size: int) -> Coarsening:
    """Contract ``problem`` to about ``size`` nodes (never more, at least one for each side of the boundary)."""
    forward_groups = max(1, size // 2) if problem.boundary < len(problem) else max(1, size)
    forward = _forward_cuts(problem, forward_groups)
    backward = _matching_cuts(problem, forward)
    starts = sorted({0, problem.boundary, *forward, *backward} - {len(problem)})
    ends = [*starts[1:], len(problem)]
    runs = tuple(range(start, end) for start, end in zip(starts, ends, strict=True))
    return Coarsening(problem, contract(problem, runs), runs)


def in_flight(problem: PlainProblem) -> list[int]:
    """Bytes that cross each cut of the forward between forward nodes; entry ``p`` is the cut before node ``p``."""
    change = [0] * (problem.boundary + 2)
    for v, producer in enumerate(problem.producer):
        last = max([reader for reader in problem.consumers[v] if reader < problem.boundary], default=-1)
        if 0 <= producer < last:
            change[producer + 1] += problem.nbytes[v]
            change[last + 1] -= problem.nbytes[v]
    return list(accumulate(change))[: problem.boundary + 1]


def _forward_cuts(problem: PlainProblem, groups: int) -> list[int]:
    """First nodes of the forward's runs after the first: the cheapest cut around each equal share."""
    count = problem.boundary
    asked_back = [0] * count
    for v, producer in enumerate(problem.producer):
        if 0 <= producer < count and any([reader >= count for reader in problem.consumers[v]]):
            asked_back[producer] += problem.nbytes[v]
    total_bytes = sum(asked_back) or 1
    total_seconds = sum(problem.seconds[:count]) or 1.0
    share = [
        asked_back[node] / total_bytes + problem.seconds[node] / total_seconds + 1e-3 / max(count, 1)
        for node in range(count)
    ]
    done = [0.0, *accumulate(share)]
    crossing = in_flight(problem)
    whole = done[-1]
    cuts: list[int] = []
    for i in range(1, groups):
        low, aim, high = ((i + offset) * whole / groups for offset in (-0.5, 0.0, 0.5))
        window = [p for p in range(1, count) if low <= done[p] < high]
        if window:
            cuts.append(min(window, key=lambda p: (crossing[p], abs(done[p] - aim))))
    return sorted(set(cuts))


def _matching_cuts(problem: PlainProblem, forward: list[int]) -> list[int]:
    """For each forward cut, the backward cut across which the fewest bytes of forward values are read.

    The backward nodes before a cut should read forward values from after its forward cut, the others those from before
    it.
    """
    count = len(problem)
    cuts: list[int] = []
    for cut in forward:
        wrong = [0] * (count + 1)  # change of the bytes misplaced, as the backward cut moves past each node
        for node in range(problem.boundary, count):
            for v in problem.reads[node]:
                producer = problem.producer[v]
                if 0 <= producer < problem.boundary:
                    wrong[node + 1] += problem.nbytes[v] if producer < cut else -problem.nbytes[v]
        misplaced = list(accumulate(wrong))
        positions = range(problem.boundary + 1, count)
        if positions:
            cuts.append(min(positions, key=lambda p: misplaced[p]))
    return sorted(set(cuts))


def contract(problem: PlainProblem, runs: tuple[range, ...]) -> PlainProblem:
    """The problem whose nodes are ``runs``, which cover all nodes in order without crossing the boundary."""
    group = [g for g, run in enumerate(runs) for _ in run]
    outputs, transient, finals = set(problem.forward_outputs), set(problem.forward_transient), set(problem.finals)
    merged: dict[tuple[object, ...], int] = {}
    coarse_value: dict[int, int] = {}
    nbytes: list[int] = []
    producer: list[int] = []
    for v, fine_producer in enumerate(problem.producer):
        own = group[fine_producer] if fine_producer >= 0 else -1
        readers = tuple(dict.fromkeys(group[r] for r in problem.consumers[v] if group[r] != own))
        wanted = (v in outputs, v in transient, v in finals)
        if fine_producer >= 0 and not readers and not any(wanted):
            continue  # never leaves its run
        index = merged.setdefault((own, readers, wanted), len(nbytes))
        if index == len(nbytes):
            nbytes.append(0)
            producer.append(own)
        nbytes[index] += problem.nbytes[v]
        coarse_value[v] = index
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    for g, run in enumerate(runs):
        outside = [v for node in run for v in problem.reads[node] if v in coarse_value]
        reads.append(tuple(dict.fromkeys(coarse_value[v] for v in outside if producer[coarse_value[v]] != g)))
        escaping = [v for node in run for v in problem.writes[node] if v in coarse_value]
        writes.append(tuple(dict.fromkeys(coarse_value[v] for v in escaping)))

    def of(values: tuple[int, ...] | list[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(coarse_value[v] for v in values))

    return PlainProblem(
        reads=reads,
        writes=writes,
        seconds=[sum(problem.seconds[run.start : run.stop]) for run in runs],
        workspace=[_own_peak(problem, run, coarse_value) for run in runs],
        is_backward=[problem.is_backward[run.start] for run in runs],
        recomputable=[all(problem.recomputable[run.start : run.stop]) for run in runs],
        random=[any(problem.random[run.start : run.stop]) for run in runs],
        nbytes=nbytes,
        producer=producer,
        tangents=list(of(problem.tangents)),
        boundary=sum(not problem.is_backward[run.start] for run in runs),
        forward_outputs=of(problem.forward_outputs),
        forward_transient=of(problem.forward_transient),
        finals=of(problem.finals),
        base_bytes=problem.base_bytes,
        forward_extra_bytes=problem.forward_extra_bytes,
    )


def _own_peak(problem: PlainProblem, run: range, escaping: dict[int, int]) -> int:
    """Bytes that the run needs at its peak beyond all it reads from outside and all it hands out."""
    last: dict[int, int] = {}
    for node in run:
        for v in (*problem.writes[node], *problem.reads[node]):
            last[v] = node
    handed_out = sum([problem.nbytes[v] for node in run for v in problem.writes[node] if v in escaping])
    held = peak = 0
    for node in run:
        held += sum([problem.nbytes[v] for v in problem.writes[node]])
        peak = max(peak, held + problem.workspace[node])
        own = [v for v in {*problem.writes[node], *problem.reads[node]} if problem.producer[v] in run]
        held -= sum([problem.nbytes[v] for v in own if v not in escaping and last[v] == node])
    return max(0, peak - handed_out)
