"""One captured graph of a training step: the computation graph, and the way back from its ops to torch nodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._call import OpCall
from lightning_remat.capture._nodes import new_values
from lightning_remat.capture._sizes import Sizes, Symbol
from lightning_remat.capture._torch import largest, output_of_tangent
from lightning_remat.graph import ComputationGraph, TensorRole

Node = torch.fx.Node


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """One captured graph of a training step.

    Attributes:
        graph: the computation graph; costs are zero until a cost model has filled them in. Its storages have the bytes that
            they take on ``device``: none where they lie elsewhere.
        module: the joint graph module, rewritten so that each op is one node.
        nodes: the torch node of each op; ``None`` for one that stands for something outside the graph.
        tensors: the torch node that stands for each tensor; ``None`` for an output that nobody reads.
        node_tensor: tensor index by torch node.
        updated: the primal that a node's value is written over as soon as it is known; the value lies on its storage.
        calls: what a cost model times for each op; ``None`` for views.
        primals: placeholders of the forward, in calling order.
        tangents: placeholders handed to the backward.
        forward_outputs: what the forward module returns to AOTAutograd (nodes, or plain values).
        backward_outputs: what the backward module returns.
        arguments: the position, among the captured function's arguments, of each of ``primals``; ``None`` for one that is made
            of arguments and is none (see `capture._torch.argument_of`).
        gradient_arguments: of each of ``backward_outputs``, the position of the argument whose gradient it is, likewise.
        sizes: what the symbolic sizes stand for, here.
        symbols: those that sizes of tensors depend on, and their nodes among ``primals``.
        device: where most of the step's bytes are.
        real_bytes: by storage, what it really takes on ``device`` where that was seen to be other than tracing says.
    """

    graph: ComputationGraph
    module: torch.fx.GraphModule
    nodes: tuple[Node | None, ...]
    tensors: tuple[Node | None, ...]
    node_tensor: dict[Node, int]
    updated: dict[Node, Node]
    calls: tuple[OpCall | None, ...]
    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    arguments: tuple[int | None, ...]
    gradient_arguments: tuple[int | None, ...]
    sizes: Sizes
    symbols: dict[Symbol, Node]
    device: torch.device
    _read: Callable[[Sizes], CapturedGraph]
    _order: tuple[int, ...] = ()
    real_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at(self, sizes: Sequence[int]) -> CapturedGraph:
        """The same ops in the same order, without costs, where ``symbols`` are ``sizes``."""
        others = {symbol: value for symbol, value in self.sizes.values.items() if symbol not in self.symbols}
        found = self._read(Sizes({**others, **dict(zip(self.symbols, sizes, strict=True))}))
        return found.reordered(self._order) if self._order else found

    def reordered(self, order: Sequence[int]) -> CapturedGraph:
        """With the ops in another order: indices into this one's."""
        earlier = self._order or tuple(range(len(self.nodes)))
        return dataclasses.replace(
            self,
            graph=self.graph.replace(ops=tuple(self.graph.ops[i] for i in order)),
            nodes=tuple(self.nodes[i] for i in order),
            calls=tuple(self.calls[i] for i in order),
            _order=tuple(earlier[i] for i in order),
        )

    def with_costs(
        self, seconds: Sequence[float], workspace_bytes: Sequence[int], real_bytes: Sequence[Sequence[tuple[int, int]]]
    ) -> CapturedGraph:
        """With what each op costs, and with the bytes of those of its outputs that take others than tracing says.

        Args:
            seconds: one an op.
            workspace_bytes: one an op.
            real_bytes: for each op, such outputs (places among all of its own) and their bytes on ``device``.
        """
        graph = self.graph.with_costs(seconds, workspace_bytes)
        found: dict[int, int] = {}
        for op, pairs in zip(graph.ops, real_bytes, strict=True):
            found.update((graph.tensors[op.outputs[place]].storage, nbytes) for place, nbytes in pairs)
        return dataclasses.replace(self, graph=graph).taking(found)

    def taking(self, real_bytes: Mapping[int, int]) -> CapturedGraph:
        """With these bytes for these storages, but for those that are handed in."""
        graph = self.graph
        given = {graph.tensors[t].storage for t in graph.inputs}
        kept = {storage: nbytes for storage, nbytes in real_bytes.items() if storage not in given}
        storages = tuple(kept.get(i, nbytes) for i, nbytes in enumerate(graph.storages))
        return dataclasses.replace(self, graph=graph.replace(storages=storages), real_bytes=kept)

    def size_limits(self) -> tuple[int | None, ...]:
        """The most that each of ``symbols`` may be; ``None`` where there is no bound."""
        return tuple(largest(node.meta["val"]) for node in self.symbols.values())

    @property
    def static_bytes(self) -> int:
        """Bytes of the parameters and buffers among the inputs."""
        return self._bytes_of(TensorRole.PARAMETER, TensorRole.BUFFER)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the other inputs."""
        return self._bytes_of(TensorRole.BATCH)

    def _bytes_of(self, *roles: TensorRole) -> int:
        found = {self.graph.tensors[t].storage for t in self.graph.inputs if self.graph.tensors[t].role in roles}
        return sum(self.graph.storages[s] for s in found)

    @functools.cached_property
    def handed_over_bytes(self) -> int:
        """Bytes of the gradients that are handed over as soon as they are made (see `from_joint`)."""
        ops = [
            op
            for op, node in zip(self.graph.ops, self.nodes, strict=True)
            if node and node.meta.get("remat_handed_over")
        ]
        return sum(self.graph.storages[self.graph.tensors[op.inputs[0]].storage] for op in ops)

    @functools.cached_property
    def written(self) -> frozenset[Node]:
        """The primals that the step itself gives new values."""
        return frozenset(primal for _, primal in new_values(self.module.graph, self.forward_outputs))

    def tangents_of(self, outputs: frozenset[int]) -> frozenset[str]:
        """The tangents, as targets of placeholders, that are the gradients of these outputs of the function."""
        return frozenset(str(node.target) for node in self.tangents if output_of_tangent(node) in outputs)

    def gradients_without(self, outputs: frozenset[int]) -> frozenset[int]:
        """The gradients, as positions in ``backward_outputs``, that come through nothing but these outputs of the function."""
        missing = {node for node in self.tangents if output_of_tangent(node) in outputs}
        through: dict[Node, set[Node]] = {node: {node} for node in self.tangents}
        for node in self.module.graph.nodes:
            if node not in through:
                through[node] = set().union(*(through[source] for source in node.all_input_nodes))
        gradients = [through[node] if isinstance(node, Node) else set() for node in self.backward_outputs]
        return frozenset(i for i, tangents in enumerate(gradients) if tangents and tangents <= missing)
