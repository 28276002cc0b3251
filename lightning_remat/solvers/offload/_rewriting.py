"""The problem with some tensors on the host, as one of keeping and computing again alone, which every solver takes.

The op that makes such a tensor makes a *note* of no bytes in its place, the tensor's bytes being workspace; and an op of
little time, which reads the note, makes the tensor. Others read the tensor as before. The note is kept, being free, and so
what can be fetched can be "computed again". Its first evaluation, right after the op, stands for the tensor as the op has
made it; `_placing` makes copies of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from lightning_remat.errors import SolverError
from lightning_remat.graph import ComputationGraph, Host, Op, Tensor


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A graph in which some tensors are fetched by ops, and the way back.

    Attributes:
        plain: the graph that runs.
        graph: the one that is solved. Tensors of the former keep their numbers; notes come behind.
        op: for each op of ``graph``, its number in ``plain``; -1 for those that fetch.
        fetches: for each op of ``graph``, the tensor that it fetches; -1 for others.
    """

    plain: ComputationGraph
    graph: ComputationGraph
    op: tuple[int, ...]
    fetches: tuple[int, ...]


def rewrite(graph: ComputationGraph, offloaded: Collection[int], price: float) -> Rewritten:
    """The graph with ops that fetch the tensors ``offloaded``.

    Args:
        graph: with host memory.
        offloaded: tensors of the forward that are copyable.
        price: what fetching costs, as a share of the time that the copy takes: most of it passes beside the ops.
    """
    host = host_of(graph)
    tensors, storages = list(graph.tensors), list(graph.storages)
    ops: list[Op] = []
    numbers: list[int] = []
    fetches: list[int] = []
    for index, op in enumerate(graph.ops):
        mine = [t for t in op.outputs if t in offloaded]
        numbers.append(index)
        fetches.append(-1)
        if not mine:
            ops.append(op)
            continue
        note: dict[int, int] = {}
        for t in mine:
            note[t] = len(tensors)
            tensors.append(Tensor(f"{graph.tensors[t].name} on the host", len(storages)))
            storages.append(0)
        nbytes = sum(graph.storages[graph.tensors[t].storage] for t in mine)
        ops.append(
            dataclasses.replace(
                op,
                outputs=tuple(note.get(t, t) for t in op.outputs),
                workspace_bytes=op.workspace_bytes + nbytes,
                overwritable=() if op.outputs[0] in note else op.overwritable,
            )
        )
        for t in mine:
            seconds = price * host.seconds(graph.storages[graph.tensors[t].storage], to_device=True)
            name = f"fetch of {graph.tensors[t].name}"
            ops.append(Op(name, "fetch", (note[t],), (t,), op.phase, seconds=seconds, module=op.module))
            numbers.append(-1)
            fetches.append(t)
    solved = graph.replace(ops=tuple(ops), tensors=tuple(tensors), storages=tuple(storages), host=None)
    return Rewritten(graph, solved, tuple(numbers), tuple(fetches))


def host_of(graph: ComputationGraph) -> Host:
    """The host's memory of a graph that has one.

    Raises:
        SolverError: where it has none.
    """
    if graph.host is None:
        raise SolverError("offload='host' needs a graph with host memory: set `ComputationGraph.host`")
    return graph.host
