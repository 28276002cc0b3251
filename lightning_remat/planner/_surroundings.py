"""What the device holds beside a captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from lightning_remat.capture import CapturedGraph
from lightning_remat.graph import ComputationGraph, TensorRole


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a training step holds on the device, captured or not, in bytes.

    Attributes:
        module_bytes: all parameters and buffers; 0 where they are not known (those of the graph are counted anyway).
        trainable_bytes: the parameters that get gradients, likewise.
        resident_bytes: anything else that is there all through the step (optimizer state).
        old_gradients: the gradients of the step before live through the forward.
        accumulating: they live through the backward too.
        held_bytes: what of all this the process holds already.
    """

    module_bytes: int = 0
    trainable_bytes: int = 0
    resident_bytes: int = 0
    old_gradients: bool = True
    accumulating: bool = False
    held_bytes: int = 0

    def put_around(
        self, captured: CapturedGraph, earlier: Sequence[ComputationGraph] = (), kept_bytes: int = 0
    ) -> ComputationGraph:
        """The captured graph with all this around it.

        Args:
            captured: one graph of the step.
            earlier: the graphs that ran before it in the same forward. What they keep is alive while this one runs; their
                backwards come after this one's, so that their gradients are not there yet.
            kept_bytes: what the forwards of those leave behind (`Timeline.saved_bytes`).
        """
        graph = captured.graph
        own = _bytes(graph, TensorRole.PARAMETER)
        before = sum(_bytes(other, TensorRole.PARAMETER) for other in earlier)
        others = max(0, self.trainable_bytes - own)  # gradients of parameters outside this graph
        later = max(0, others - before)  # made already when this graph's backward begins
        kept = kept_bytes + sum(_bytes(other, TensorRole.BATCH) for other in earlier)
        resident = (
            self.resident_bytes
            + max(0, self.module_bytes - captured.static_bytes)
            + later
            + max(0, kept - _handed_over_bytes(earlier, graph))
            + sum(_state_bytes(captured.device) for op in graph.ops if op.random and op.recomputable)
        )
        old = graph.gradient_bytes + others - later if self.old_gradients else 0
        if self.accumulating:
            return graph.replace(resident_bytes=resident + old, forward_resident_bytes=0)
        return graph.replace(resident_bytes=resident, forward_resident_bytes=old)


def _state_bytes(device: torch.device) -> int:
    """What is kept on the device of a random generator's state, so that an op can draw the same numbers again."""
    return torch.get_rng_state().nbytes if device.type == "cpu" else 0


def _bytes(graph: ComputationGraph, role: TensorRole) -> int:
    storages = {graph.tensors[t].storage for t in graph.inputs if graph.tensors[t].role is role}
    return sum(graph.storages[s] for s in storages)


def _handed_over_bytes(earlier: Sequence[ComputationGraph], graph: ComputationGraph) -> int:
    """Bytes of the outputs and inputs of earlier graphs that are inputs of this one, and would otherwise count twice.

    Matched by shape and dtype: the graphs are captured apart, and nothing else tells.
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
