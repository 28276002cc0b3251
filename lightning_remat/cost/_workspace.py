"""How much memory an operation takes for itself, its workspace: its peak above its inputs and outputs.

What counts as output is what the computation graph counts, the span of each tensor: padding that a kernel adds to a storage
is workspace here. Where an output is other than `OpCall.outputs` says (another dtype or shape, or on another device), the
real one counts, and its bytes are reported for the graph; where it lies otherwise, its strides are. Memory that the allocator
does not know of (scratch that oneDNN or cuBLAS allocates for itself, once) is not seen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lightning_remat._blocks import CUDA_BLOCK_BYTES, block_bytes
from lightning_remat._profiler import QuietReleases, make_way, profiler_in_use, quiet_profiler
from lightning_remat.capture import OpCall, TensorSpec, same_device
from lightning_remat.capture import _torch as internals
from lightning_remat.cost._materialize import materialize, tensors_in

log = logging.getLogger(__name__)

_MARK = "lightning_remat.cost:"


class ProfilerInUseError(RuntimeError):
    """A torch profiler already runs; a second one would end it."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that one call takes, and how its results lie there: see the attributes of these names of `OpCost`."""

    workspace_bytes: int = 0
    real_bytes: tuple[tuple[int, int], ...] = ()
    real_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()


def cuda_memory(call: OpCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Memory:
    """The memory that one call takes on ``device``, in blocks of the caching allocator.

    It makes the call, and resets the device's peak statistics.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    result = call.target(*args, **kwargs)
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    outputs = Outputs.of(call, result, args, kwargs, device)
    blocks = sum(block_bytes(nbytes, device.type) for nbytes in outputs.storages)
    beside = temporary_bytes(before, after, sum(outputs.storages), blocks)
    return Memory(max(0, beside + blocks - outputs.counted), outputs.real_bytes, outputs.real_strides)


def temporary_bytes(before: Mapping[str, int], after: Mapping[str, int], requested: int, blocks: int) -> int:
    """Bytes of the blocks that a call held at its peak beside its outputs.

    The allocator's count of its blocks has slack where it found a large one and did not split it: how much depends on what
    was freed before. Then the bytes that were asked for count instead, rounded once.

    Args:
        before: ``torch.cuda.memory_stats`` when the peaks were reset.
        after: the same after the call.
        requested: bytes asked for of the outputs' storages.
        blocks: bytes of the blocks that hold these.
    """

    def grown(kind: str) -> int:
        return int(after.get(f"{kind}.all.peak", 0)) - int(before.get(f"{kind}.all.current", 0))

    in_blocks = max(0, grown("allocated_bytes") - blocks)
    if not after.get("requested_bytes.all.peak"):  # an allocator that does not count them
        return in_blocks
    asked_for = max(0, grown("requested_bytes") - requested)
    allocations = int(after.get("allocation.all.allocated", 0)) - int(before.get("allocation.all.allocated", 0))
    rounded = in_blocks <= asked_for + allocations * (CUDA_BLOCK_BYTES - 1)
    return in_blocks if rounded else block_bytes(asked_for, "cuda")


def cpu_memory(calls: Iterable[OpCall], on_error: Callable[[OpCall, Exception], None]) -> dict[str, Memory]:
    """The memory that one call of each takes, by ``OpCall.key``.

    All calls run under one profiler, one after the other, each on arguments that are dropped before the next.

    Args:
        calls: distinct calls.
        on_error: told of a call that raised, which is then left out of the answer.

    Raises:
        ProfilerInUseError: when the user profiles already: torch cannot profile twice, and ends the first profiler.
    """
    make_way()
    if profiler_in_use():
        raise ProfilerInUseError("a torch profiler is running")
    found: list[tuple[str, Outputs | None]] = []
    quiet = QuietReleases(0)  # the garbage collector may release older ones at any moment
    with (
        quiet_profiler(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # without it, torch 2.11 warns
        ) as profiler,
    ):
        quiet.start()
        for call in calls:
            try:
                outputs = _run_marked(call, f"{_MARK}{len(found)}")
            except Exception as error:  # noqa: BLE001 - anything may be called, so anything may be raised
                on_error(call, error)
                outputs = None
            found.append((call.key, outputs))
    peaks = _peaks(*internals.marked(profiler, _MARK))
    return {
        key: Memory(max(0, peaks.get(i, 0) - outputs.counted), outputs.real_bytes, outputs.real_strides)
        for i, (key, outputs) in enumerate(found)
        if outputs is not None
    }


def _run_marked(call: OpCall, mark: str) -> Outputs:
    """Make a call between the start and the end of the profiler's mark."""
    args, kwargs = materialize(call)
    with torch.profiler.record_function(mark):
        result = call.target(*args, **kwargs)
    return Outputs.of(call, result, args, kwargs, torch.device("cpu"))


def _peaks(windows: list[tuple[int, int, int]], changes: list[tuple[int, int]]) -> dict[int, int]:
    """The highest running sum of allocations within each mark, in bytes, by the mark's number.

    Args:
        windows: start, end and number of each mark; see `marked`.
        changes: moments and bytes of allocations and releases; see `marked`.
    """
    changes.sort(key=lambda change: change[0])
    windows.sort()
    peaks: dict[int, int] = {}
    at = 0
    for start, end, number in windows:
        while at < len(changes) and changes[at][0] < start:
            at += 1
        held = peak = 0
        while at < len(changes) and changes[at][0] <= end:
            held += changes[at][1]
            peak = max(peak, held)
            at += 1
        peaks[number] = peak
    return peaks


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The storages on a device that a call's results have and its arguments do not, each once.

    Attributes:
        storages: bytes of each.
        counted: bytes that the computation graph counts for all of them.
        real_bytes: see `OpCost.real_bytes`.
        real_strides: see `OpCost.real_strides`.
    """

    storages: tuple[int, ...]
    counted: int
    real_bytes: tuple[tuple[int, int], ...]
    real_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(
        cls, call: OpCall, result: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> Outputs:
        """Those of one call's ``result``."""
        known = {_storage(tensor) for tensor in tensors_in((args, dict(kwargs)))}
        returned = list(tensors_in(result))
        storages: dict[int, int] = {}
        counted: dict[int, int] = {}
        real_bytes: list[tuple[int, int]] = []
        real_strides: list[tuple[int, tuple[int, ...]]] = []
        for place, tensor in enumerate(returned):
            storage, spec = _storage(tensor), TensorSpec.of(tensor)
            if storage in known:
                continue
            if same_device(spec.device, device):
                storages[storage] = tensor.untyped_storage().nbytes()
                counted[storage] = max(counted.get(storage, 0), spec.bytes_on(device))
            if len(call.outputs) == len(returned):
                announced = call.outputs[place]
                if not _alike(spec, announced):
                    log.debug("%s returns %s where %s was announced", call.target, spec, announced)
                if spec.bytes_on(device) != announced.bytes_on(device):
                    real_bytes.append((place, spec.bytes_on(device)))
                if spec.shape == announced.shape and not spec.lies_as(announced):
                    real_strides.append((place, spec.stride))
        return cls(tuple(storages.values()), sum(counted.values()), tuple(real_bytes), tuple(real_strides))


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    same = (one.shape, one.dtype, one.nbytes) == (other.shape, other.dtype, other.nbytes)
    return same and same_device(one.device, other.device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
