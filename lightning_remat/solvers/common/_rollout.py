"""From a set of values to keep to a whole schedule.

Forward nodes run once, in the captured order. Backward nodes run in the captured order too, and whatever they need that
was not kept is computed again just in time, recursively, from what was. This is checkpointing (Chen et al. 2016) for
any graph and any set of values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem

Keep = frozenset[int]


def computed_again(problem: PlainProblem, held: bytearray, node: int) -> list[int] | None:
    """The nodes that run before ``node``, for it to have what it reads and is not held; ``held`` has their results then.

    ``None`` where one of them may not run again.
    """
    reads, writes, producer, recomputable = problem.reads, problem.writes, problem.producer, problem.recomputable
    nodes: list[int] = []
    stack = [node]
    while True:
        now = stack[-1]
        missing = [producer[v] for v in reads[now] if not held[v]]
        if missing:
            if not all([recomputable[made] for made in missing]):
                return None
            stack.extend(missing)
            continue
        stack.pop()
        if not stack:
            return nodes
        if all([held[v] for v in writes[now]]):
            continue  # two readers asked for it
        nodes.append(now)
        for v in writes[now]:
            held[v] = 1


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
    boundary, writes, recomputable = problem.boundary, problem.writes, problem.recomputable
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
        again = computed_again(problem, present, target)
        assert again is not None  # what may run only once is kept
        nodes += (*again, target)
        for v in writes[target]:
            present[v] = 1
        if forget:
            for v in [v for node in again if node < boundary for v in writes[node] if v in forget]:
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
