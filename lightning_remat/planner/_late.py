"""Gradients that are larger than what they are made of, made last.

Eager makes each gradient where its layer's backward runs, and it is held from there to the end of the step. Where it is larger
than what it is made of (a wide linear layer on a small batch, a gradient that is only cast to a wider type), holding that
instead, and making the gradient when the activations are gone, lowers the peak and costs nothing. The same kernels run on the
same values: no bit changes.
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
    """Backward ops that only gradients depend on, and that make more bytes than they hold; with the views of what they make."""
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
