"""One captured graph of a training step: the computation graph, and the way back from its ops to FX nodes."""

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
from lightning_remat.capture.fusing import Fusing
from lightning_remat.capture.tiling import Tiling
from lightning_remat.graph import ComputationGraph, TensorRole

Node = torch.fx.Node


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """A joint forward-backward graph as a `ComputationGraph`, and the FX node behind each of its ops and tensors.

    Attributes:
        graph: the computation graph; costs are zero until a cost model has filled them in. Its storages have the bytes that
            they take on ``device``: none where they lie elsewhere.
        module: the joint graph module, rewritten so that each op is one node.
        nodes: the FX node of each op; ``None`` for one that stands for something outside the graph.
        tensors: the FX node that stands for each tensor; ``None`` for an output that nobody reads.
        node_tensor: tensor index by FX node.
        updated: by node, the primal over which its value is written as soon as it is computed (running statistics,
            counters); the value lies on the primal's storage.
        calls: what a cost model times for each op; ``None`` for what is taken to be free: views, values written over a
            primal, ops that return no tensor or have an effect, and gradients handed over (see `from_joint`).
        primals: placeholders of the forward, in calling order.
        tangents: placeholders handed to the backward.
        forward_outputs: what the forward module returns to AOTAutograd (nodes, or plain values).
        backward_outputs: what the backward module returns.
        arguments: the position of each of ``primals`` among the captured function's arguments; ``None`` for a primal
            that is no argument itself, but made of some (see `capture._torch.argument_of`).
        gradient_arguments: of each of ``backward_outputs``, the position of the argument whose gradient it is, likewise.
        sizes: the numbers that symbolic sizes stand for in ``graph``.
        symbols: those that sizes of tensors depend on, and their nodes among ``primals``.
        device: where most of the step's bytes are.
        real_bytes: bytes on ``device``, by storage, where measuring has found others than tracing says.
        untiled: the graph with costs that it is another form of (see `tiled` and `fused`); ``None`` for one as it was captured.
        tiling: which form it is.
        fusing: how runs of its ops are fused; ``None`` where none are.
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
    _tile: Callable[[Tiling], Callable[[Sizes], CapturedGraph] | None] = lambda _tiling: None
    _fuse: Callable[[Fusing], Callable[[Sizes], CapturedGraph] | None] = lambda _fusing: None
    _order: tuple[int, ...] = ()
    real_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    untiled: CapturedGraph | None = None
    tiling: Tiling | None = None
    fusing: Fusing | None = None

    def at(self, sizes: Sequence[int]) -> CapturedGraph:
        """The same ops in the same order, without costs, for these ``sizes`` in the place of ``symbols``, one each."""
        others = {symbol: value for symbol, value in self.sizes.values.items() if symbol not in self.symbols}
        found = self._read(Sizes({**others, **dict(zip(self.symbols, sizes, strict=True))}))
        return found.reordered(self._order) if self._order else found

    def tiled(self, tiling: Tiling) -> CapturedGraph | None:
        """The same step, with what can be computed in slices (see ``tiling``); without costs, in the captured order.

        ``None`` where nothing can that the tiling is of.
        """
        read = self._tile(tiling)
        return None if read is None else dataclasses.replace(read(self.sizes), untiled=self, tiling=tiling)

    def fused(self, fusing: Fusing) -> CapturedGraph | None:
        """The same step, with runs of ops in one kernel each (see ``fusing``); without costs, in the captured order.

        ``None`` where there are none.
        """
        read = self._fuse(fusing)
        if read is None:
            return None
        return dataclasses.replace(read(self.sizes), untiled=self.untiled or self, tiling=self.tiling, fusing=fusing)

    def reordered(self, order: Sequence[int]) -> CapturedGraph:
        """A copy with the ops in another order, given as indices into the present one."""
        earlier = self._order or tuple(range(len(self.nodes)))
        return dataclasses.replace(
            self,
            graph=self.graph.in_order(order),
            nodes=tuple(self.nodes[i] for i in order),
            calls=tuple(self.calls[i] for i in order),
            _order=tuple(earlier[i] for i in order),
        )

    def with_costs(
        self, seconds: Sequence[float], workspace_bytes: Sequence[int], real_bytes: Sequence[Sequence[tuple[int, int]]]
    ) -> CapturedGraph:
        """A copy with what each op costs, and with the bytes of the outputs that take others than tracing says.

        Args:
            seconds: one an op.
            workspace_bytes: one an op.
            real_bytes: for each op, pairs of such an output's place among the op's outputs and its bytes on ``device``.
        """
        graph = self.graph.with_costs(seconds, workspace_bytes)
        found: dict[int, int] = {}
        for op, pairs in zip(graph.ops, real_bytes, strict=True):
            found.update((graph.tensors[op.outputs[place]].storage, nbytes) for place, nbytes in pairs)
        return dataclasses.replace(self, graph=graph).taking(found)

    def taking(self, real_bytes: Mapping[int, int]) -> CapturedGraph:
        """A copy in which these storages have these bytes; those of inputs and tangents keep their own."""
        graph = self.graph
        given = {graph.tensors[t].storage for t in graph.inputs}
        kept = {storage: nbytes for storage, nbytes in real_bytes.items() if storage not in given}
        if not kept:
            return dataclasses.replace(self, real_bytes=kept)
        storages = tuple(kept.get(i, nbytes) for i, nbytes in enumerate(graph.storages))
        return dataclasses.replace(self, graph=graph.replace(storages=storages), real_bytes=kept)

    def size_limits(self) -> tuple[int | None, ...]:
        """The largest number that each of ``symbols`` may stand for; ``None`` where there is no bound."""
        return tuple(largest(node.meta["val"]) for node in self.symbols.values())

    @property
    def static_bytes(self) -> int:
        """Bytes of the parameters and buffers among the inputs."""
        return self._bytes_of(TensorRole.PARAMETER, TensorRole.BUFFER)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the other inputs, tangents excepted."""
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
        """The gradients, as positions in ``backward_outputs``, that depend on these outputs' tangents and no others."""
        missing = {node for node in self.tangents if output_of_tangent(node) in outputs}
        through: dict[Node, set[Node]] = {node: {node} for node in self.tangents}
        for node in self.module.graph.nodes:
            if node not in through:
                through[node] = set().union(*(through[source] for source in node.all_input_nodes))
        gradients = [through[node] if isinstance(node, Node) else set() for node in self.backward_outputs]
        return frozenset(i for i, tangents in enumerate(gradients) if tangents and tangents <= missing)
