"""Calls that take less time in more memory, where tensors are small and a schedule's peak has room for them.

What lowers a peak costs calls: `split_convolution_backward` makes two of one, and `batch_norm_backward` takes some 20
microseconds more than the op. For small tensors that is more than the kernels take. Away from the peak, the
backward runs them as eager mode does, and holds no more at its peak. (On the CPU alone: how an allocator of a device is
left by other calls than those planned for was not tried.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import CapturedGraph
from lightning_remat.capture._overwriting import batch_norm_backward
from lightning_remat.schedule import Compute, Copy, Schedule, simulate

SMALL_BYTES = 512 << 10
"""A small tensor's largest size. Larger ones are not worth it: their kernels take longer, most of all in memory that is new."""

APART = 8
"""How many steps may lie between the two calls that become one."""


@dataclasses.dataclass(frozen=True)
class Room:
    """Steps of a schedule's backward for which there is room.

    Attributes:
        plain: steps whose op runs in its own form, though it could be given memory, or overwrite an input.
        joined: steps that compute what a later step does, too: the op of that step.
        done: those later steps.
    """

    plain: frozenset[int] = frozenset()
    joined: dict[int, int] = dataclasses.field(default_factory=dict)
    done: frozenset[int] = frozenset()


def room(captured: CapturedGraph, schedule: Schedule) -> Room:
    """Where the backward of ``schedule`` may hold more, and still no more than at its peak.

    Args:
        captured: the graph, with measured workspaces.
        schedule: by which it runs; verified.
    """
    small = {index for index in range(len(captured.nodes)) if _is_small(captured, index)}
    copies = any(isinstance(step, Copy) for step in schedule.steps)
    if captured.device.type != "cpu" or captured.symbols or copies or not small:
        return Room()
    return _Finder(captured, schedule, small).find()


def _is_small(captured: CapturedGraph, index: int) -> bool:
    """Whether this op is one of those above, and the gradient that it computes is small."""
    node, op = captured.nodes[index], captured.graph.ops[index]
    if node is None or not (node.target is batch_norm_backward or "remat_half" in node.meta):
        return False
    return _bytes_made(captured, index) <= SMALL_BYTES and len(op.outputs) > 0


def _bytes_made(captured: CapturedGraph, index: int) -> int:
    graph = captured.graph
    return sum(graph.storages[s] for s in {graph.tensors[t].storage for t in graph.ops[index].outputs})


class _Finder:
    """Goes through the backward of a schedule, and notes what is held besides where it finds room."""

    def __init__(self, captured: CapturedGraph, schedule: Schedule, small: set[int]) -> None:
        self.captured, self.schedule, self.small = captured, schedule, small
        self.evaluations = schedule.evaluations
        self.held = simulate(captured.graph, schedule).during
        self.most = int(self.held[schedule.boundary :].max(initial=0))

    def find(self) -> Room:
        plain: set[int] = set()
        joined: dict[int, int] = {}
        done: set[int] = set()
        steps = self.schedule.steps
        for number in range(self.schedule.boundary, len(steps)):
            step = steps[number]
            if number in done or not isinstance(step, Compute) or step.op not in self.small:
                continue
            if self.captured.nodes[step.op].target is batch_norm_backward:  # type: ignore[union-attr]
                if self._fits(number, number + 1, self._bytes_of_copy(step)):
                    plain.add(number)
            elif (later := self._other_half(number)) is not None:
                other = steps[later].op  # type: ignore[union-attr]
                if self._fits(number, later, _bytes_made(self.captured, other) + self._workspace(other)):
                    joined[number] = other
                    done.add(later)
        return Room(frozenset(plain), joined, frozenset(done))

    def _fits(self, first: int, end: int, nbytes: int) -> bool:
        """Whether so much may be held besides during these steps; it is noted where it may."""
        if int(self.held[first:end].max()) + nbytes > self.most:
            return False
        self.held[first:end] += nbytes
        return True

    def _bytes_of_copy(self, step: Compute) -> int:
        """What batch norm's own op allocates besides: the gradient twice, and a third one where it would overwrite."""
        nbytes: int = self.captured.nodes[step.op].args[0].meta["val"].nbytes  # type: ignore[union-attr]
        return nbytes * (2 if step.over >= 0 else 1)

    def _workspace(self, op: int) -> int:
        return self.captured.graph.ops[op].workspace_bytes

    def _other_half(self, number: int) -> int | None:
        """The step that computes the other half of this step's convolution, if all that it reads is here by now."""
        steps, ops = self.schedule.steps, self.captured.graph.ops
        half = self.captured.nodes[steps[number].op].meta["remat_half"]  # type: ignore[union-attr]
        made: set[int] = set()
        for later in range(number + 1, min(number + 1 + APART, len(steps))):
            step = steps[later]
            if not isinstance(step, Compute):
                continue
            node = self.captured.nodes[step.op]
            if step.op in self.small and node is not None and node.meta.get("remat_half") == half:
                once = self.evaluations[step.op] == self.evaluations[steps[number].op] == 1  # type: ignore[union-attr]
                return later if once and made.isdisjoint(ops[step.op].inputs) else None
            made.update(ops[step.op].outputs)
        return None


def whole_convolution(weights: torch.fx.Node, data: torch.fx.Node) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The two halves of a convolution's backward as one call: its arguments, and what it returns (as ``meta["val"]`` has it).

    Args:
        weights: the half that computes the gradients of the weights, from the input itself.
        data: the half that computes the input's, and may read a stand-in for it.
    """
    *args, wanted = weights.args
    return (*args, [True, *wanted[1:]]), (data.meta["val"][0], *weights.meta["val"][1:])  # type: ignore[index, misc]
