"""A CUDA device's memory around a plan: what the caching allocator reserves for it, and how that is configured.

A plan's peak counts allocated bytes. The allocator reserves segments from the device, in which free blocks lie between
used ones: by fragmentation a step may run out of memory with gigabytes free. So a schedule's allocations are run
through a model of the allocator (`lightning_remat.allocator`), under each `Arrangement` that may be used, and
``budget="auto"`` takes a schedule only if it fits by that model.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_remat.allocator import (
    NOTHING,
    AllocatorSettings,
    Arrangement,
    Footprint,
    Holdings,
    Segment,
    best_footprint,
    footprint,
)
from lightning_remat.budget import device_bytes
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import ConfigError, InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Solution, Status

log = logging.getLogger(__name__)

TRIES = 5
"""Solves within ever smaller budgets, at most, until a schedule fits by the allocator's model."""

LEAST_STEP = 0.01
"""Share of the bytes between the floor and the last try's budget that the next try gives up, at least."""

SETTLED_BY_USERS = ("expandable_segments", "max_split_size_mb", "backend")
"""Settings of the user's with which expandable segments are not switched on: they decide it, or exclude it."""


_Found = tuple[ComputationGraph, Solution, Footprint]


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What is known of a CUDA device's memory when a graph is planned.

    Attributes:
        holdings: the allocator's settings, and what it holds beside the graph.
        arrangements: the ways in which memory may be arranged.
        limit_bytes: the most that the process may reserve; ``None`` where that is not known.
    """

    holdings: Holdings = NOTHING
    arrangements: tuple[Arrangement, ...] = (Arrangement.AS_IT_IS,)
    limit_bytes: int | None = None

    def footprint(
        self,
        graph: ComputationGraph,
        schedule: Schedule,
        limit_bytes: int | None = None,
        allocated_bytes: int | None = None,
    ) -> Footprint:
        """What the allocator does with a schedule in the best arrangement, within a limit (by default the device's).

        Where a schedule evaluates nothing again and fits without a new arrangement, memory stays as it is: where no more is
        reserved than the limit, and no more allocated than ``allocated_bytes`` (``None`` for any number).
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        if max(schedule.evaluations.values(), default=0) <= 1:
            plain = footprint(graph, schedule, limit, self.holdings, self.arrangements[0])
            within = allocated_bytes is None or plain.allocated_bytes <= allocated_bytes
            if plain.fits and not plain.flushes and within:
                return plain
        return best_footprint(graph, schedule, limit, self.holdings, self.arrangements)

    def settle(
        self,
        graph: ComputationGraph,
        solution: Solution,
        budget_bytes: int,
        reserved: bool,
        again: Callable[[int], tuple[ComputationGraph, Solution]],
    ) -> _Found:
        """A solution whose footprint is within the budget: the given one, or one that is found within a smaller budget.

        Args:
            graph: the graph to schedule.
            solution: a schedule for it whose tensors are within the budget.
            budget_bytes: what the step may use.
            reserved: whether the budget is one of reserved bytes (``"auto"``), not of allocated ones.
            again: solves within fewer bytes; raises `InfeasibleBudgetError` where nothing is found, and `ScheduleError`
                where the verifier refuses what is found.

        Returns:
            The graph, its solution and its footprint: where none was found that is within the budget, the one that comes
            closest, with a note (and a warning in the log).
        """
        assert solution.schedule is not None
        limits = (budget_bytes, None) if reserved else (None, budget_bytes)
        first = solution
        within = min(budget_bytes, max(solution.peak_bytes, graph.floor_bytes))
        best = graph, solution, self.footprint(graph, solution.schedule, *limits)
        for _ in range(TRIES):
            if self._excess(best, budget_bytes, reserved) <= 0:
                return _bounded(best, first)
            within = less(within, graph.floor_bytes, self._excess(best, budget_bytes, reserved))
            try:
                graph, solution = again(within)
            except (InfeasibleBudgetError, ScheduleError):
                break
            assert solution.schedule is not None
            found = graph, solution, self.footprint(graph, solution.schedule, *limits)
            if self._excess(found, budget_bytes, reserved) < self._excess(best, budget_bytes, reserved):
                best = found
            within = min(within, solution.peak_bytes)
        excess = self._excess(best, budget_bytes, reserved)
        if excess <= 0:
            return _bounded(best, first)
        graph, solution, closest = _bounded(best, first)
        words = (
            f"the device's memory is fragmented by this step: by the allocator's model it takes some {excess:,} bytes over the "
            "budget, and no schedule was found that does with less"
        )
        log.warning("%s. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller budget.", words)
        return graph, dataclasses.replace(solution, notes=(*solution.notes, words)), closest

    def _excess(self, found: _Found, budget_bytes: int, reserved: bool) -> int:
        """How many bytes a solution is over the budget, by the allocator's model; 0 or less where it is within."""
        graph, solution, taken = found
        if not reserved:
            return taken.allocated_bytes - budget_bytes
        if taken.fits:
            return taken.reserved_bytes - budget_bytes
        assert solution.schedule is not None
        free = best_footprint(graph, solution.schedule, None, self.holdings, self.arrangements)
        return max(1, free.reserved_bytes - budget_bytes)


def less(within: int, floor_bytes: int, excess: int) -> int:
    """The bytes to solve within next, after a schedule within ``within`` took ``excess`` bytes too much.

    At most half of what lies above the floor is given up at once.
    """
    room = max(0, within - floor_bytes)
    return within - max(1, int(LEAST_STEP * room), min(excess, room // 2))


def _bounded(found: _Found, first: Solution) -> _Found:
    """The solution with the lower bound of the first one, which was solved within the whole budget."""
    graph, solution, taken = found
    if solution is first:
        return found
    assert first.schedule is not None
    note = f"solved again within {solution.peak_bytes:,} bytes, for what the allocator reserves beside"
    solution = dataclasses.replace(
        solution,
        status=Status.FEASIBLE,
        lower_bound_seconds=min(first.lower_bound_seconds, solution.seconds),
        bound_scope=first.bound_scope,
        notes=(*solution.notes, note),
    )
    return graph, solution, taken


class DeviceAllocator:
    """Reads the CUDA caching allocator when a graph is planned, and arranges it while plans run, until `put_back`.

    Args:
        option: ``"auto"`` arranges it where a step then fits in less; ``"leave"`` leaves it as it is.
    """

    def __init__(self, option: str = "auto") -> None:
        self._option = option
        self._before: str | None = None

    def memory(self, device: torch.device, *, later_bytes: int = 0, begins: bool = True) -> DeviceMemory | None:
        """What is known of a device's memory now; ``None`` on the CPU, and for an allocator that is not torch's own.

        Args:
            device: where the step runs.
            later_bytes: bytes that will be taken there for good after the first step (see `Surroundings.later_bytes`).
            begins: no step has run yet: what the allocator holds now is what a step holds throughout, and the batch.
        """
        if device.type != "cuda" or not _is_torchs_own():
            return None
        text = internals.allocator_settings()
        try:
            settings = AllocatorSettings.parse(text)
        except ConfigError as error:
            log.warning("What the allocator reserves is not predicted: %s", error)
            return None
        torch.cuda.empty_cache()  # free segments of earlier work are no part of the step
        return DeviceMemory(
            holdings=Holdings(settings, held_segments(device) if begins else (), later_bytes),
            arrangements=arrangements(self._option, text if self._before is None else self._before),
            limit_bytes=device_bytes(device, margin=0),
        )

    def arrange(self, footprint: Footprint | None, device: torch.device) -> None:
        """Arrange the device's memory in the way that a plan's footprint names, until `put_back`."""
        if footprint is None or footprint.arrangement is Arrangement.AS_IT_IS or self._option == "leave":
            return
        torch.cuda.empty_cache()
        if footprint.arrangement is Arrangement.ARENA:
            free = footprint.reserved_bytes - torch.cuda.memory_reserved(device)
            if free > 0:
                torch.empty(free, dtype=torch.uint8, device=device)
        elif self._before is None:
            before = internals.allocator_settings()
            internals.set_allocator_settings(with_expandable_segments(before, True))
            self._before = before
            log.info("expandable segments are switched on while the scheduled step is trained")

    def put_back(self) -> None:
        """Give the allocator the settings back that it had."""
        if self._before is not None:
            internals.set_allocator_settings(with_expandable_segments(self._before, False))
            self._before = None


def arrangements(option: str, settings: str) -> tuple[Arrangement, ...]:
    """The ways in which memory may be arranged, given the user's settings (``internals.allocator_settings()``)."""
    if option == "leave":
        return (Arrangement.AS_IT_IS,)
    named = {part.partition(":")[0].strip() for part in settings.split(",")}
    if named.intersection(SETTLED_BY_USERS):
        return (Arrangement.AS_IT_IS, Arrangement.ARENA)
    return (Arrangement.AS_IT_IS, Arrangement.EXPANDABLE, Arrangement.ARENA)


def with_expandable_segments(settings: str, value: bool) -> str:
    """The text of the allocator's settings, with expandable segments switched on or off in it."""
    others = [part for part in settings.split(",") if part and not part.strip().startswith("expandable_segments")]
    return ",".join([*others, f"expandable_segments:{value}"])


def allocated_bytes(device: torch.device) -> int:
    """Bytes allocated on a CUDA device now, with cuBLAS's and cuBLASLt's workspaces of the forward's and backward's threads.

    Each of the two libraries allocates a workspace with its first matrix product in a thread, and keeps it; cuBLASLt's products
    are those with a bias. A layer's forward, in a plan, may run in the backward's thread. So products of both kinds run in both
    threads here first.
    """
    try:
        _multiply_in_both_threads(device)
    except RuntimeError as error:  # "Deterministic behavior was enabled ...", but CUBLAS_WORKSPACE_CONFIG is not set
        log.info("cuBLAS's workspaces are not counted: %s", error)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def workspace_bytes(device: torch.device) -> int:
    """Bytes of the workspaces that `allocated_bytes` counts: they are given up here, and taken anew."""
    internals.clear_workspaces()
    torch.cuda.synchronize(device)
    without = torch.cuda.memory_allocated(device)
    return allocated_bytes(device) - without


def _multiply_in_both_threads(device: torch.device) -> None:
    # Where a graph is captured, which is when this is called, AOTAutograd has backwards run in the thread that starts them.
    with (
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autograd.set_multithreading_enabled(True),
    ):
        ones = torch.ones(16, 16, device=device, requires_grad=True)
        _multiply(ones)
        ones.register_hook(_multiply)  # type: ignore[no-untyped-call]
        (ones @ ones).sum().backward()  # type: ignore[no-untyped-call]


def _multiply(square: torch.Tensor) -> None:
    """A matrix product, and one with a bias, of a square matrix, in the thread that calls this."""
    with torch.no_grad():
        torch.addmm(square[0], square, square @ square)


def held_segments(device: torch.device) -> tuple[Segment, ...]:
    """The segments that the allocator has reserved on a CUDA device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return tuple(segment_of(one) for one in found if one["device"] == index)


def segment_of(snapshot: Mapping[str, Any]) -> Segment:
    """A segment, from its entry in ``torch.cuda.memory_snapshot()``."""
    blocks = tuple((int(block["size"]), block["state"] != "inactive") for block in snapshot["blocks"])
    return Segment(
        address=int(snapshot["address"]),
        nbytes=int(snapshot["total_size"]),
        small=snapshot["segment_type"] == "small",
        blocks=blocks,
        expandable=bool(snapshot.get("is_expandable")),
    )


def _is_torchs_own() -> bool:
    return torch.cuda.get_allocator_backend() == "native"
