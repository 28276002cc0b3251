"""A computation graph as a networkx graph."""

from __future__ import annotations

import networkx as nx

from lightning_remat.graph._graph import ComputationGraph


def to_networkx(graph: ComputationGraph) -> nx.DiGraph:
    """A directed graph with one node an op.

    Nodes are op indices with the attributes ``name``, ``target``, ``phase``, ``seconds``, ``bytes`` (of the storages
    that the op allocates) and ``module``. An edge runs from the producer of a tensor to each of its readers; its
    ``bytes`` are those of the storages carried over it.
    """
    result: nx.DiGraph = nx.DiGraph(name=graph.name)
    for index, op in enumerate(graph.ops):
        read = {graph.tensors[t].storage for t in op.inputs}
        fresh = {graph.tensors[t].storage for t in op.outputs} - read
        result.add_node(
            index,
            name=op.name,
            target=op.target,
            phase=op.phase.value,
            seconds=op.seconds,
            bytes=sum(graph.storages[s] for s in fresh),
            module=op.module,
        )
        carried: dict[int, set[int]] = {}
        for t in op.inputs:
            if graph.producer[t] >= 0:
                carried.setdefault(graph.producer[t], set()).add(graph.tensors[t].storage)
        for source, storages in carried.items():
            result.add_edge(source, index, bytes=sum(graph.storages[s] for s in storages))
    return result
