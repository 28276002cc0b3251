"""Computing gradients that are larger than their inputs at the end of the backward.

Eager mode computes each gradient when its layer's backward runs, and holds it from there to the end of the step. Where
a gradient is larger than what it is computed from (a wide linear layer on a small batch, a gradient that is only cast
to a wider type), it lowers the peak to hold these inputs instead, and to compute the gradient when the activations are
gone. That costs nothing, and no bit changes: the same kernels run on the same values.
"""

from __future__ import annotations

from lightning_remat.capture import CapturedGraph
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers import Problem


def with_late_gradients(captured: CapturedGraph) -> CapturedGraph:
    """The graph with those gradients at the end of its order, if that lowers the peak without rematerialization."""
    graph = captured.graph
    problem = Problem(graph)
    late = _late_ops(graph, problem)
    if not late:
        return captured
    order = [i for i in range(len(graph.ops)) if i not in late] + sorted(late)
    moved = captured.reordered(order)
    other = Problem(moved.graph)
    if other.evaluate(other.captured).peak_bytes >= problem.evaluate(problem.captured).peak_bytes:
        return captured
    return moved


def _late_ops(graph: ComputationGraph, problem: Problem) -> set[int]:
    """Backward ops that only gradients depend on, with outputs larger than their inputs; and views of these outputs."""
    kept = frozenset((*problem.finals, *problem.forward_outputs))
    nodes: set[int] = set()
    for node in range(len(problem) - 1, problem.boundary - 1, -1):
        written = problem.writes[node]
        last = all(reader in nodes for v in written for reader in problem.consumers[v])
        made = sum(problem.nbytes[v] for v in written)
        held = sum(problem.nbytes[v] for v in problem.reads[node] if v not in kept)
        op = graph.ops[problem.ops[node]]
        if written and last and made > held and problem.recomputable[node] and not op.random and not op.mutates:
            nodes.add(node)
    found = {problem.ops[node] for node in nodes}
    for index, op in enumerate(graph.ops):
        if graph.is_view[index] and any(graph.producer[t] in found for t in op.inputs):
            found.add(index)
    return found
