"""How much memory an operation takes for itself: its peak above its inputs and outputs.

What counts as output is what the computation graph counts, the storages of ``OpCall.outputs``: padding that a kernel
adds to a storage is workspace here. Memory that the allocator does not know of (scratch that oneDNN or cuBLAS allocates
for itself, once) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lightning_remat._profiler import profiler_in_use, quiet_profiler
from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost._materialize import materialize

_MARK = "lightning_remat.cost:"


class ProfilerInUseError(RuntimeError):
    """A torch profiler already runs; a second one would end it."""


def cuda_workspace(call: OpCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> int:
    """Bytes at the peak of one call on ``device``, above inputs and outputs. Resets the device's peak statistics.

    Counts the bytes that were asked for, not the blocks that the caching allocator found for them, whose sizes depend
    on what was freed before.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    statistics = torch.cuda.memory_stats(device)
    kind = "requested_bytes" if statistics.get("requested_bytes.all.current") else "allocated_bytes"
    before = statistics.get(f"{kind}.all.current", 0)
    result = call.target(*args, **kwargs)
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device).get(f"{kind}.all.peak", 0)
    return max(0, int(peak) - int(before) - output_bytes(call, result, args, kwargs))


def cpu_workspaces(calls: Iterable[OpCall], on_error: Callable[[OpCall, Exception], None]) -> dict[str, int]:
    """Bytes at the peak of one call of each, above inputs and outputs, by ``OpCall.key``.

    All calls run under one profiler, one after the other, each on arguments that are dropped before the next.

    Args:
        calls: distinct calls.
        on_error: told of a call that raised, which is then left out of the answer.

    Raises:
        ProfilerInUseError: when the user profiles already: torch cannot profile twice, and ends the first profiler.
    """
    if profiler_in_use():
        raise ProfilerInUseError("a torch profiler is running")
    outputs: list[tuple[str, int]] = []
    with (
        quiet_profiler(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # without it, torch 2.11 warns
        ) as profiler,
    ):
        for call in calls:
            try:
                held = _run_marked(call, f"{_MARK}{len(outputs)}")
            except Exception as error:  # noqa: BLE001 - anything may be called, so anything may be raised
                on_error(call, error)
                held = -1
            outputs.append((call.key, held))
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    peaks = _peaks(results.events()) if results is not None else {}
    return {key: max(0, peaks.get(i, 0) - held) for i, (key, held) in enumerate(outputs) if held >= 0}


def _run_marked(call: OpCall, mark: str) -> int:
    """Call once between the marker's start and end; bytes of fresh outputs held at the end."""
    args, kwargs = materialize(call)
    with torch.profiler.record_function(mark):
        result = call.target(*args, **kwargs)
    return output_bytes(call, result, args, kwargs)


def _peaks(events: Iterable[Any]) -> dict[int, int]:
    """The highest running sum of allocations within each marker, by its number."""
    windows: list[tuple[int, int, int]] = []
    changes: list[tuple[int, int]] = []
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            windows.append((event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name()[len(_MARK) :])))
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


def output_bytes(call: OpCall, result: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the storages that ``result`` has and the arguments do not, as the graph counts them, each once."""
    known = {_storage(tensor) for tensor in tensors_in((args, dict(kwargs)))}
    returned = list(tensors_in(result))
    specs = call.outputs if len(call.outputs) == len(returned) else tuple(TensorSpec.of(tensor) for tensor in returned)
    fresh: dict[int, int] = {}
    for tensor, spec in zip(returned, specs, strict=True):
        storage = _storage(tensor)
        if storage not in known:
            fresh[storage] = max(fresh.get(storage, 0), spec.nbytes)
    return sum(fresh.values())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
