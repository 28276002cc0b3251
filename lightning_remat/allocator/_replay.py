"""A schedule's requests, run through the allocator's model for a few steps: what is reserved, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from lightning_remat.allocator._caching import (
    BLOCK,
    ROUND_SEGMENT,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    OutOfDeviceMemoryError,
    Segment,
)
from lightning_remat.allocator._settings import DEFAULTS, AllocatorSettings
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule import Allocations, Event, Schedule, allocations

STEPS = 3
"""Training steps run: old gradients and optimizer state exist from the second on; the third is like all that follow."""


class Arrangement(str, Enum):
    """How the device's memory is arranged for a run: by the user's settings as they are, or by one of two changes."""

    AS_IT_IS = "as it is"
    EXPANDABLE = "expandable segments"
    ARENA = "arena"
    """All that may be used is reserved in one piece, and given back to the cache, before the first planned step."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What the allocator does with a schedule, over `STEPS` training steps.

    Attributes:
        allocated_bytes: the most that blocks take, what was not split off included.
        reserved_bytes: the most that segments take.
        arrangement: of the memory.
        failed_at: the op whose memory could not be had within the limit; "" where all of it could.
        flushes: how often cached segments had to be given back in the last step; each time the device is waited for.
    """

    allocated_bytes: int
    reserved_bytes: int
    arrangement: Arrangement = Arrangement.AS_IT_IS
    failed_at: str = ""
    flushes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the steps ran within the limit."""
        return not self.failed_at

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return dataclasses.asdict(self) | {"arrangement": self.arrangement.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Footprint:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: for other data.
        """
        return cls(**{**data, "arrangement": Arrangement(data["arrangement"])})


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What lies on the device around a captured graph, as far as it decides where blocks lie.

    Attributes:
        settings: of the allocator, as the user has them.
        segments: what the allocator holds when the first step begins, with parameters, buffers and a batch in it, which
            stand for those of all steps. Without segments, parameters and buffers are allocated anew, one after the other, and
            a batch with each step.
        later_bytes: those of the graph's resident bytes that are allocated after the first step (the optimizer's
            state, and gradients to which each step adds).
    """

    settings: AllocatorSettings = DEFAULTS
    segments: tuple[Segment, ...] = ()
    later_bytes: int = 0


NOTHING = Holdings()
"""Default settings, and nothing on the device beside the graph, not even an optimizer's state."""


WORTH_IT = 0.01
"""What another arrangement must save over the first one to be taken instead, as a share of the reserved bytes."""


def best_footprint(
    graph: ComputationGraph,
    schedule: Schedule,
    limit_bytes: int | None,
    holdings: Holdings = Holdings(),
    arrangements: Iterable[Arrangement] = (Arrangement.AS_IT_IS,),
) -> Footprint:
    """The footprint in the arrangement that serves best.

    In this order: the steps fit; no cached segment is given back in the last step; the fewest bytes are reserved. Where
    the first two do not decide, the first arrangement that is named stays unless another saves more than `WORTH_IT`, or has
    fewer bytes allocated at the peak: then blocks hold there what was not split off, and how much that is depends on every
    request before.

    Args:
        graph: with what lies around it.
        schedule: a verified one.
        limit_bytes: the most that may be reserved; ``None`` for no limit.
        holdings: what lies on the device.
        arrangements: those that may be chosen, one at least.

    Raises:
        ScheduleError: as `footprint`.
    """
    return _best([footprint(graph, schedule, limit_bytes, holdings, arrangement) for arrangement in arrangements])


def _best(found: Sequence[Footprint]) -> Footprint:
    first = found[0]
    best = min(found, key=lambda one: (not one.fits, one.flushes > 0, one.reserved_bytes))
    if (first.fits, first.flushes > 0) != (best.fits, best.flushes > 0):
        return best
    alike = [one for one in found if (one.fits, one.flushes > 0) == (first.fits, first.flushes > 0)]
    smaller = [one for one in alike if one.allocated_bytes < first.allocated_bytes]
    if smaller:
        return min(smaller, key=lambda one: one.reserved_bytes)
    return first if first.reserved_bytes <= (1 + WORTH_IT) * best.reserved_bytes else best


def footprint(
    graph: ComputationGraph,
    schedule: Schedule,
    limit_bytes: int | None = None,
    holdings: Holdings = Holdings(),
    arrangement: Arrangement = Arrangement.AS_IT_IS,
) -> Footprint:
    """Run `STEPS` training steps of a schedule through the model of the allocator, in Lightning's order.

    Parameters and buffers are held from the beginning; each step has one batch; the old gradients live through
    the forward; the optimizer's state comes after the first step. What is only known as a number of bytes is taken to
    lie in blocks of the sizes of the parameters' and buffers'.

    Args:
        graph: with what lies around it.
        schedule: a verified one.
        limit_bytes: the most that may be reserved; ``None`` for no limit.
        holdings: what lies on the device.
        arrangement: of the device's memory.

    Raises:
        ScheduleError: when a step needs a tensor that is not present.
    """
    return _footprint_of(graph, allocations(graph, schedule), limit_bytes, holdings, arrangement)


def footprint_together(
    parts: Sequence[tuple[ComputationGraph, Schedule]],
    resident_bytes: int,
    limit_bytes: int | None = None,
    holdings: Holdings = NOTHING,
    arrangements: Iterable[Arrangement] = (Arrangement.AS_IT_IS,),
) -> Footprint:
    """The best footprint of a step that is several graphs, whose forwards run in order and whose backwards the other way round.

    Args:
        parts: the graphs, and their schedules.
        resident_bytes: what is held all through the step beside the first graph's inputs, gradients excepted.
        limit_bytes: the most that may be reserved; ``None`` for no limit.
        holdings: what lies on the device.
        arrangements: those that may be chosen, by the rules of `best_footprint`.

    Raises:
        ScheduleError: as `footprint`.
    """
    forward: list[Event] = []
    backward: list[Event] = []
    gradients: list[int] = []
    for number, (graph, schedule) in enumerate(parts):
        asked = allocations(graph, schedule)
        own = [[event._replace(block=event.block * len(parts) + number) for event in events] for events in asked[:2]]
        forward, backward = forward + own[0], own[1] + backward
        gradients += [block * len(parts) + number for block in asked.gradients]
    whole = Allocations(tuple(forward), tuple(backward), tuple(gradients))
    graph = parts[0][0].replace(resident_bytes=resident_bytes)
    return _best([_footprint_of(graph, whole, limit_bytes, holdings, one) for one in arrangements])


def _footprint_of(
    graph: ComputationGraph,
    asked: Allocations,
    limit_bytes: int | None,
    holdings: Holdings,
    arrangement: Arrangement,
) -> Footprint:
    settings = holdings.settings
    if arrangement is Arrangement.EXPANDABLE:
        settings = dataclasses.replace(settings, expandable_segments=True)
    allocator = CachingAllocator(settings, limit_bytes, holdings.segments)
    run = _Run(graph, allocator, holdings)
    flushes = 0
    try:
        run.begin()
        if arrangement is Arrangement.ARENA:
            allocator.free(allocator.allocate(run.arena_bytes(limit_bytes)))
            allocator.reset_peaks()
        for step in range(STEPS):
            before = allocator.flushes
            run.step(asked.forward, asked.backward, asked.gradients, first=step == 0)
            flushes = allocator.flushes - before
    except OutOfDeviceMemoryError:
        return Footprint(
            allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, arrangement, run.at or "the step's beginning"
        )
    beside = SMALL_SEGMENT if arrangement is Arrangement.EXPANDABLE else 0
    reserved_bytes = allocator.peak_reserved_bytes + beside
    return Footprint(allocator.peak_allocated_bytes, reserved_bytes, arrangement, flushes=flushes)


class _Run:
    """Training steps on an allocator.

    Attributes:
        at: the op that runs, or in words what is allocated outside of the graph.
    """

    def __init__(self, graph: ComputationGraph, allocator: CachingAllocator, holdings: Holdings) -> None:
        self.graph, self.allocator, self.holdings = graph, allocator, holdings
        self.at = ""
        storages: dict[int, TensorRole] = {}
        for t in graph.inputs:
            tensor = graph.tensors[t]
            if tensor.role is not TensorRole.TANGENT:
                storages.setdefault(tensor.storage, tensor.role)
        self._static = [graph.storages[s] for s, role in storages.items() if role is not TensorRole.BATCH]
        self._batch = [graph.storages[s] for s, role in storages.items() if role is TensorRole.BATCH]
        self._gradients: list[Block | None] = []

    def begin(self) -> None:
        """Allocate what is there before the first step."""
        self.at = "parameters and buffers"
        if not self.holdings.segments:
            others = max(0, self.graph.resident_bytes - self.holdings.later_bytes)
            for nbytes in (*self._static, *in_blocks_like(self._static, others)):
                self.allocator.allocate(nbytes)

    def arena_bytes(self, limit_bytes: int | None) -> int:
        """Bytes of one block that takes all that the limit leaves; 0 without a limit."""
        return max(0, (limit_bytes or 0) - self.allocator.reserved_bytes) // ROUND_SEGMENT * ROUND_SEGMENT

    def step(self, forward: Sequence[Event], backward: Sequence[Event], gradients: Sequence[int], first: bool) -> None:
        """One training step: batch, forward, old gradients go, backward, and the optimizer."""
        allocator = self.allocator
        self.at = "the batch"
        batch = [] if self.holdings.segments else [allocator.allocate(nbytes) for nbytes in self._batch]
        live: dict[int, Block | None] = {}
        self._play(forward, live)
        for block in self._gradients:
            allocator.free(block)
        self._play(backward, live)
        own = [live.pop(number) for number in gradients]
        for block in (*live.values(), *batch):
            allocator.free(block)
        if self.graph.forward_resident_bytes:
            outside = max(0, self.graph.forward_resident_bytes - sum(block.size for block in own if block))
            self._gradients = own + [allocator.allocate(n) for n in in_blocks_like(self._static, outside)]
        else:  # they are gone before the next forward, or were added to what is counted as resident
            for block in own:
                allocator.free(block)
        if first:
            self.at = "the optimizer's state, or gradients"
            for nbytes in in_blocks_like(self._static, self.holdings.later_bytes):
                allocator.allocate(nbytes)

    def _play(self, events: Sequence[Event], live: dict[int, Block | None]) -> None:
        for block, nbytes, op in events:
            if nbytes:
                self.at = op or "the gradient of the loss"
                live[block] = self.allocator.allocate(nbytes)
            else:
                self.allocator.free(live.pop(block))


def in_blocks_like(sizes: Sequence[int], total: int) -> list[int]:
    """Sizes of blocks that add up to ``total`` bytes: the given ones, over and over, and one block for what is left."""
    found: list[int] = []
    own = [size for size in sizes if size > 0]
    whole = sum(own)
    if whole:
        copies, total = divmod(total, whole)
        found = own * copies
        for size in own:
            if size > total:
                break
            found.append(size)
            total -= size
    return [*found, *([max(total, BLOCK)] if total > 0 else [])]
