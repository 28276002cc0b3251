"""The memory that is held beside a captured graph: the module, gradients, the optimizer's state, other graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from lightning_remat.capture import CapturedGraph
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule import Schedule

Weights = Mapping[int, int]
"""Bytes of the parameters that a graph gives gradients, by their ids."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a training step holds on the device, captured or not, in bytes.

    Attributes:
        module_bytes: all parameters and buffers; 0 where they are not known (those of the graph are counted anyway).
        trainable_bytes: the parameters that get gradients, likewise.
        resident_bytes: anything else that is there all through the step (optimizer state).
        old_gradients: whether the gradients of the previous step live through the forward.
        accumulating: whether they live through the backward too.
        held_bytes: the part of all this that the process holds already.
        state_bytes: the part of ``resident_bytes`` that is allocated after the first step (the optimizer's state).
        named_bytes: the part of ``resident_bytes`` that may be held already, or come after the first step: no part of either.
        kept_free_bytes: the part of ``resident_bytes`` that something else will need, and does not hold now.
        sharded: whether graphs are given whole parameters that are let go after them (see `with_shards`).
    """

    module_bytes: int = 0
    trainable_bytes: int = 0
    resident_bytes: int = 0
    old_gradients: bool = True
    accumulating: bool = False
    held_bytes: int = 0
    state_bytes: int = 0
    named_bytes: int = 0
    kept_free_bytes: int = 0
    sharded: bool = False

    @property
    def later_bytes(self) -> int:
        """What is held all through the step, but only once the first one has run: state, and gradients that are added to."""
        return self.state_bytes + (self.trainable_bytes if self.old_gradients and self.accumulating else 0)

    def put_around(
        self,
        captured: CapturedGraph,
        weights: Weights,
        earlier: Sequence[tuple[ComputationGraph, Weights]] = (),
        later: Sequence[Weights] = (),
        kept_bytes: int = 0,
    ) -> ComputationGraph:
        """The captured graph with all this counted in its ``resident_bytes`` and ``forward_resident_bytes``.

        Args:
            captured: one graph of the step.
            weights: its parameters that get gradients.
            earlier: the graphs that ran before it in the same forward, each with its weights. What they save for the
                backward is alive while this one runs; their backwards run after this one's, so that their gradients are
                not there yet.
            later: the weights of the graphs that run after it, as far as known: in this one's backward their gradients
                are there already.
            kept_bytes: what the forwards of the earlier ones leave behind (`Timeline.saved_bytes`).
        """
        if self.sharded:  # gradients leave as shards, which are counted as resident
            weights, earlier, later = {}, [(other, {}) for other, _ in earlier], ()
        graph = captured.graph
        graphs = [other for other, _ in earlier]
        others = max(0, self.trainable_bytes - sum(weights.values()))  # gradients of parameters outside this graph
        not_later = {key: nbytes for used in (weights, *(used for _, used in earlier)) for key, nbytes in used.items()}
        again = {key for used in later for key in used} & not_later.keys()  # weights that several graphs share
        # Autograd adds up their gradients as they arrive: for a moment two of them and their sum are there.
        made = max(0, self.trainable_bytes - sum(not_later.values())) + 2 * sum(not_later[key] for key in again)
        kept = kept_bytes + sum(
            _bytes(other, TensorRole.BATCH) - _handed_over_bytes(graphs[:i], other) for i, other in enumerate(graphs)
        )
        resident = (
            self.resident_bytes
            + max(0, self.module_bytes - captured.static_bytes)
            + made
            + max(0, kept - _handed_over_bytes(graphs, graph))
            + replay_bytes(captured)
        )
        # A tangent (the gradient of an output) that is held to the end is no gradient of a parameter.
        tangents = {graph.tensors[t].storage for t in set(graph.backward_outputs) & set(graph.inputs)}
        own = graph.gradient_bytes - sum(graph.storages[s] for s in tangents) + captured.handed_over_bytes
        old = max(0, own + others - made) if self.old_gradients else 0
        if self.accumulating:
            return graph.replace(resident_bytes=resident + old, forward_resident_bytes=0)
        return graph.replace(resident_bytes=resident, forward_resident_bytes=old)


def replay_bytes(captured: CapturedGraph) -> int:
    """Bytes of random states that are kept on the device if every recomputable random op is evaluated again."""
    return _state_bytes(captured.device) * sum(op.random and op.recomputable for op in captured.graph.ops)


def replayed_bytes(graph: ComputationGraph, schedule: Schedule) -> int:
    """The same for the random ops that one schedule evaluates again."""
    again = sum(graph.ops[op].random for op, count in schedule.evaluations.items() if count > 1)
    return _state_bytes(torch.device(graph.device or "cpu")) * again


def _state_bytes(device: torch.device) -> int:
    """Bytes of one random state on the device: states are in host memory, which counts for the CPU only."""
    return torch.get_rng_state().nbytes if device.type == "cpu" else 0


def _bytes(graph: ComputationGraph, role: TensorRole) -> int:
    storages = {graph.tensors[t].storage for t in graph.inputs if graph.tensors[t].role is role}
    return sum(graph.storages[s] for s in storages)


def _handed_over_bytes(earlier: Sequence[ComputationGraph], graph: ComputationGraph) -> int:
    """Bytes of the outputs and inputs of earlier graphs that are inputs of this one, and would otherwise count twice.

    They are matched by shape and dtype: graphs are captured separately, and there is nothing else to match by.
    """
    outputs = [
        (t.shape, t.dtype, other.storages[t.storage])
        for other in earlier
        for t in (other.tensors[i] for i in (*other.forward_outputs, *other.inputs))
        if t.role in (TensorRole.INTERMEDIATE, TensorRole.BATCH)
    ]
    found = 0
    for i in graph.inputs:
        tensor = graph.tensors[i]
        if tensor.role is TensorRole.BATCH:
            match = next((o for o in outputs if o[:2] == (tensor.shape, tensor.dtype)), None)
            if match is not None:
                outputs.remove(match)
                found += min(match[2], graph.storages[tensor.storage])
    return found
