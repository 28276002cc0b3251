"""Schedules in stages: stage t evaluates node t for the first time, after evaluating again any of the nodes before it.

These are Checkmate's frontier-advancing stages (Jain et al. 2020, section 4.6): row t of the matrix R says what stage t
evaluates, in the captured order and each node at most once. Moccasin's events lie in such stages as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import required
from lightning_remat.solvers.common._rollout import rollout
from lightning_remat.solvers.common._segments import crossing, segment_ends
from lightning_remat.solvers.common._solution import Status

Stages = list[set[int]]
"""Nodes evaluated in each stage: the rows of R."""


@dataclasses.dataclass(frozen=True)
class StagesResult:
    """The best sequence found, how the solve ended, and the proven bound in seconds (0: none)."""

    sequence: NodeSequence | None
    status: Status
    lower_bound_seconds: float
    notes: tuple[str, ...] = ()


def from_stages(problem: PlainProblem, stages: Stages) -> NodeSequence:
    """The sequence of a row-major scan of R (Algorithm 1 of section 4.9; frees follow from last uses)."""
    nodes = [node for row in stages for node in sorted(row)]
    return NodeSequence(tuple(nodes), sum([len(row) for row in stages[: problem.boundary]]))


def to_stages(problem: PlainProblem, sequence: NodeSequence) -> Stages:
    """The matrix R that comes closest to ``sequence``: its repetitions, each in the stage in which they occur.

    Within a stage the captured order replaces the sequence's, every node has its first evaluation in its own stage, and
    what a stage repeats several times it evaluates once: `from_stages` of it is valid, but its peak may differ.
    """
    wanted = required(problem)
    stages: Stages = [set() for _ in problem.reads]
    for node in wanted:
        stages[node].add(node)
    stage = 0  # position in ``wanted`` of the next first evaluation
    for node in sequence.nodes:
        while stage < len(wanted) and wanted[stage] < node:
            stage += 1
        if stage < len(wanted) and wanted[stage] == node:
            stage += 1
        elif wanted and problem.recomputable[node] and node <= wanted[-1]:
            stages[wanted[min(stage, len(wanted) - 1)]].add(node)
    return stages


def last_useful_stages(problem: PlainProblem, readers: Sequence[Iterable[int]]) -> list[int]:
    """By node, the last stage in which evaluating it can serve a read, the boundary or the end; its own stage at least.

    Args:
        problem: the problem.
        readers: nodes that may read each value.
    """
    outputs, transient, finals = map(frozenset, (problem.forward_outputs, problem.forward_transient, problem.finals))
    last = list(range(len(problem)))
    for node in range(len(problem) - 1, -1, -1):
        if not problem.recomputable[node]:
            continue
        for v in problem.writes[node]:
            until = max([last[reader] for reader in readers[v]], default=node)
            if v in outputs:  # the caller holds it from the boundary on
                until = min(until, problem.boundary - 1)
            elif v in finals:
                until = len(problem) - 1
            elif v in transient:
                until = max(until, problem.boundary - 1)
            last[node] = max(last[node], until)
    return last


def best_start(problem: PlainProblem, budget_bytes: int, start: NodeSequence | None) -> NodeSequence | None:
    """The fastest sequence within the budget among ``start`` and a few checkpointed ones, in the form of stages."""
    options = [start] if start is not None else []
    for segments in range(1, min(problem.boundary, 16) + 1):
        keep = crossing(problem, segment_ends(problem.boundary, segments))
        reread = {v for v, producer in enumerate(problem.producer) if 0 <= producer < problem.boundary} - keep
        options += [rollout(problem, keep), rollout(problem, keep, reread)]
    best: tuple[float, NodeSequence] | None = None
    for option in options:
        staged = from_stages(problem, to_stages(problem, option))
        evaluation = problem.evaluate(staged)
        if evaluation.peak_bytes <= budget_bytes and (best is None or evaluation.seconds < best[0]):
            best = (evaluation.seconds, staged)
    return best[1] if best else None
