"""What no schedule of a graph avoids: the largest working set of an op that every schedule runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem
from lightning_remat.solvers.common._prune import required


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """A lower bound on the peak of every schedule: bytes of all that is held, and the op that sets it."""

    nbytes: int
    op: str


def unavoidable(graph: ComputationGraph) -> WorkingSet:
    """The largest working set: what must be present, in any schedule, while some op that every schedule runs does.

    That is what the caller holds, the op's inputs and outputs and its workspace, less the largest input that its result may
    overwrite; for ops that must run before the boundary, the old gradients as well. The other candidate: when the last of
    the gradients is made, all others are there.
    """
    problem = Problem(graph)
    nbytes = problem.nbytes

    def needs(node: int, beside: Sequence[int] = ()) -> int:
        present = {*problem.reads[node], *problem.writes[node], *beside}
        reused = max((nbytes[v] for v in problem.overwrites[node] if v not in beside), default=0)
        return problem.base_bytes + sum(nbytes[v] for v in present) + problem.workspace[node] - reused

    nodes = required(problem)
    early = _before_boundary(problem, nodes)
    found = [(needs(n) + problem.forward_extra_bytes * (n in early), n) for n in nodes]
    largest, node = max(found, default=(problem.base_bytes, -1))
    module = problem.module(node) if node >= 0 else ""
    named = WorkingSet(largest, (problem.name(node) if node >= 0 else "nothing") + (f" in {module}" if module else ""))
    last = min(
        (needs(problem.producer[v], problem.finals) for v in problem.finals if problem.producer[v] >= 0), default=0
    )
    return WorkingSet(last, "all gradients, when the last of them is made") if last > largest else named


def _before_boundary(problem: Problem, nodes: Sequence[int]) -> set[int]:
    """Nodes that run before the boundary in every schedule: with effects or for the loss, and all that these depend on."""
    outputs = {problem.producer[v] for v in (*problem.forward_outputs, *problem.forward_transient)}
    found: set[int] = set()
    waiting = [
        n
        for n in nodes
        if not problem.is_backward[n] and (n in outputs or problem.random[n] or not problem.recomputable[n])
    ]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(problem.predecessors[node])
    return found
