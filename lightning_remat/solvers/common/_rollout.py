"""From a set of values to keep to a whole schedule.

Forward nodes run once, in the captured order. Backward nodes run in the captured order too, and whatever they need that
was not kept is computed again just in time, recursively, from what was. This is checkpointing (Chen et al. 2016) for
any graph and any set of values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem

Keep = frozenset[int]


def rollout(problem: PlainProblem, keep: Iterable[int], forget: Collection[int] = frozenset()) -> NodeSequence:
    """The sequence that keeps the values ``keep`` from the forward and computes others again when they are needed.

    Args:
        problem: the problem.
        keep: values that are not computed again. Outputs of nodes that may run only once, and what the caller holds,
            count as kept whether listed or not.
        forget: values that, once computed again, serve the one backward node that asked for them only; all others stay
            until their last use.

    Returns:
        A sequence that evaluates every forward node once before the boundary. Its peak is not bounded by anything.
    """
    boundary, producer, reads, writes = problem.boundary, problem.producer, problem.reads, problem.writes
    recomputable = problem.recomputable
    present = bytearray(len(problem.nbytes))
    for v in keep:
        present[v] = 1
    for v in (*problem.forward_outputs, *problem.tangents):
        present[v] = 1
    for node in range(boundary):
        if not recomputable[node]:
            for v in writes[node]:
                present[v] = 1
    nodes = list(range(boundary))
    for target in range(boundary, len(problem)):
        forgotten: list[int] = []
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [producer[v] for v in reads[node] if not present[v]]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if node != target and all([present[v] for v in writes[node]]):
                continue  # two readers asked for it
            nodes.append(node)
            for v in writes[node]:
                present[v] = 1
                if forget and node < boundary and v in forget:
                    forgotten.append(v)
        for v in forgotten:
            present[v] = 0
    return NodeSequence(tuple(nodes), boundary)


def candidates(problem: PlainProblem) -> list[Keep]:
    """Sets of values to keep or not: each forward value that is read and recomputable, and all such of one node."""
    found: dict[Keep, None] = {}
    for node in range(problem.boundary):
        if problem.recomputable[node]:
            writes = [v for v in problem.writes[node] if problem.consumers[v]]
            for v in writes:
                found[frozenset([v])] = None
            if len(writes) > 1:
                found[frozenset(writes)] = None
    return list(found)
