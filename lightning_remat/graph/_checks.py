"""The rules that a computation graph keeps."""

from __future__ import annotations

from typing import Protocol

from lightning_remat.errors import GraphError
from lightning_remat.graph._op import Op, Phase, Tensor


class Graph(Protocol):
    """What is checked of a `ComputationGraph`."""

    @property
    def ops(self) -> tuple[Op, ...]: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def storages(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def forward_resident_bytes(self) -> int: ...


def resident(graph: Graph) -> None:
    """Raise `GraphError` for negative bytes beside the ops."""
    if graph.resident_bytes < 0 or graph.forward_resident_bytes < 0:
        raise GraphError("resident bytes cannot be negative")


def check(graph: Graph) -> None:
    """Raise `GraphError` at the first broken rule."""
    resident(graph)
    tensor_count, storage_count = len(graph.tensors), len(graph.storages)
    lies_on = [tensor.storage for tensor in graph.tensors]
    for index, nbytes in enumerate(graph.storages):
        if not isinstance(nbytes, int):
            raise GraphError(f"storage {index} has {nbytes!r} bytes: a whole number is needed")
        if nbytes < 0:
            raise GraphError(f"storage {index} has a negative size: {nbytes} bytes")
    _phases(graph)
    names: set[str] = set()
    for tensor in graph.tensors:
        if not 0 <= tensor.storage < storage_count:
            raise GraphError(f"tensor {tensor.name} lies on storage {tensor.storage}, of {storage_count}")
        if tensor.name in names:
            raise GraphError(f"two tensors are named {tensor.name}")
        names.add(tensor.name)
    for group in ("inputs", "forward_outputs", "forward_transient", "backward_outputs"):
        for t in getattr(graph, group):
            if not 0 <= t < tensor_count:
                raise GraphError(f"{group} names tensor {t}, of {tensor_count}")
    known = set(graph.inputs)
    written = {graph.tensors[t].storage for t in known}
    op_names: set[str] = set()
    for op in graph.ops:
        inputs, outputs = op.inputs, op.outputs
        if op.name in op_names:
            raise GraphError(f"two ops are named {op.name}")
        op_names.add(op.name)
        cost(op)
        if not known.issuperset(inputs):
            _range(graph, op)
            raise _too_early(graph, op, known)
        if any(len(one) > 1 and len(set(one)) != len(one) for one in (inputs, outputs)):
            raise GraphError(f"op {op.name} names a tensor twice")
        if op.mutates and not set(op.mutates) <= set(inputs):
            raise GraphError(f"op {op.name} mutates a tensor that it does not read")
        if op.overwritable:
            _overwritable(graph, op)
        fresh = []
        for t in outputs:
            if not 0 <= t < tensor_count:
                _range(graph, op)
            if t in known:
                raise GraphError(f"tensor {graph.tensors[t].name} is produced twice")
            storage = lies_on[t]
            if storage in written and all(lies_on[one] != storage for one in inputs):
                raise GraphError(f"op {op.name} writes {graph.tensors[t].name} on a storage that it does not read")
            fresh.append(storage)
            known.add(t)
        written.update(fresh)
    for group in ("forward_outputs", "forward_transient", "backward_outputs"):
        for t in getattr(graph, group):
            if t not in known:
                raise GraphError(f"{group} names {graph.tensors[t].name}, which nothing produces")
    for index, tensor in enumerate(graph.tensors):
        if index not in known:
            raise GraphError(f"tensor {tensor.name} is neither an input nor produced by an op")


def order(graph: Graph) -> None:
    """Raise `GraphError` where something is read before it is produced, or a forward op comes late."""
    _phases(graph)
    known = set(graph.inputs)
    for op in graph.ops:
        if not known.issuperset(op.inputs):
            raise _too_early(graph, op, known)
        known.update(op.outputs)


def _phases(graph: Graph) -> None:
    phases = [op.phase is Phase.BACKWARD for op in graph.ops]
    if phases != sorted(phases):
        late = graph.ops[len(phases) - 1 - phases[::-1].index(False)]
        raise GraphError(f"forward op {late.name} lies after a backward op: list forward and loss ops first")


def _too_early(graph: Graph, op: Op, known: set[int]) -> GraphError:
    t = next(t for t in op.inputs if t not in known)
    return GraphError(
        f"op {op.name} reads {graph.tensors[t].name} before it is produced: the ops must be in a topological "
        "order and without cycles"
    )


def _range(graph: Graph, op: Op) -> None:
    for t in (*op.inputs, *op.outputs):
        if not 0 <= t < len(graph.tensors):
            raise GraphError(f"op {op.name} names tensor {t}, of {len(graph.tensors)}")


def cost(op: Op) -> None:
    """Raise `GraphError` for an op with negative costs."""
    if not op.seconds >= 0 or op.workspace_bytes < 0:
        raise GraphError(f"op {op.name} has a negative cost: {op.seconds} s, {op.workspace_bytes} bytes")


def _overwritable(graph: Graph, op: Op) -> None:
    """An op's first result may take the storage of an input of its size, which the op reads through that one tensor only."""
    if not set(op.overwritable) <= set(op.inputs):
        raise GraphError(f"op {op.name} may overwrite a tensor that it does not read")
    storages = [graph.tensors[t].storage for t in op.inputs]
    own = [graph.tensors[t].storage for t in op.outputs]
    if not own or own[0] in storages or own.count(own[0]) != 1:
        raise GraphError(f"op {op.name} may overwrite an input: its first output must lie on a storage of its own")
    for t in op.overwritable:
        storage = graph.tensors[t].storage
        if graph.storages[storage] != graph.storages[own[0]] or storages.count(storage) != 1:
            raise GraphError(
                f"op {op.name} may not overwrite {graph.tensors[t].name}: its storage must have the size of the output's, "
                "and no other input may lie on it"
            )
