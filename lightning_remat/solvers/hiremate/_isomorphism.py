"""Parts of a problem as problems of their own, numbered so that equal parts become equal problems.

HiRemate recognises identical subgraphs by a canonical representation and a hash table, in linear time (Gusak et al. 2025,
appendix C.1.1): the order of the ops is given, so no graph isomorphism needs to be searched for. Nodes and values of a part are
numbered in the order in which they are met; two parts of equal form have equal schedules, node by node. A node's equivalence
class is what a solver sees of it: its time, workspace, sizes and flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from lightning_remat.solvers.common._problem import PlainProblem


@dataclasses.dataclass(frozen=True, eq=False)
class Subproblem:
    """A part of a problem as a problem of its own.

    Attributes:
        problem: the part. What it reads of the rest of the forward counts as held by the caller, and is left out; gradients
            that come in are tangents; what others read of it is a forward output or a final.
        nodes: the node of the whole problem that each node stands for.
        values: the value of the whole problem that each value stands for.
    """

    problem: PlainProblem
    nodes: tuple[int, ...]
    values: tuple[int, ...]


def subproblem(problem: PlainProblem, forward: Sequence[int], backward: Sequence[int]) -> Subproblem:
    """The part that consists of the nodes ``forward`` and ``backward``, both in the captured order."""
    nodes = (*forward, *backward)
    inside = set(nodes)
    local: dict[int, int] = {}
    tangents: list[int] = []
    for node in nodes:
        if problem.is_backward[node]:
            for v in problem.reads[node]:
                producer = problem.producer[v]
                if v not in local and producer not in inside and (producer < 0 or problem.is_backward[producer]):
                    tangents.append(local.setdefault(v, len(local)))
        for v in problem.writes[node]:
            local.setdefault(v, len(local))
    own = {node: index for index, node in enumerate(nodes)}
    wanted = {*problem.forward_outputs, *problem.forward_transient, *problem.finals}
    end = max(nodes, default=-1)

    def leaves(v: int) -> bool:
        if problem.producer[v] in inside:
            return v in wanted or not inside.issuperset(problem.consumers[v])
        return v in wanted or any(
            reader > end for reader in problem.consumers[v]
        )  # a gradient on its way to others too

    leaving = [v for v in local if leaves(v)]
    forward_outputs = tuple(local[v] for v in leaving if 0 <= problem.producer[v] < problem.boundary)

    def of(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(local[v] for v in values if v in local)

    part = PlainProblem(
        reads=[of(problem.reads[node]) for node in nodes],
        writes=[of(problem.writes[node]) for node in nodes],
        seconds=[problem.seconds[node] for node in nodes],
        workspace=[problem.workspace[node] for node in nodes],
        is_backward=[problem.is_backward[node] for node in nodes],
        recomputable=[problem.recomputable[node] for node in nodes],
        random=[problem.random[node] for node in nodes],
        nbytes=[problem.nbytes[v] for v in local],
        producer=[own.get(problem.producer[v], -1) for v in local],
        tangents=tangents,
        boundary=len(forward),
        forward_outputs=forward_outputs,
        forward_transient=(),
        finals=tuple(local[v] for v in leaving if local[v] not in forward_outputs),
        base_bytes=0,
        forward_extra_bytes=0,
        overwrites=[of(problem.overwrites[node]) for node in nodes] if problem.overwrites else [],
    )
    return Subproblem(part, nodes, tuple(local))


def canonical_form(problem: PlainProblem) -> Hashable:
    """A hashable form: where it is equal, a schedule of one problem is a schedule of the other, at the same cost."""
    return tuple(
        (name, tuple(content) if isinstance(content, list) else content)
        for name, content in ((field.name, getattr(problem, field.name)) for field in dataclasses.fields(PlainProblem))
    )
