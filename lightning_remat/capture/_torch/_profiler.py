"""torch's profiler: whether one runs, since only one can (see ``lightning_remat._profiler``), and what it has recorded.

``kineto_results`` and its events are documented nowhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler


def profiling() -> bool:
    """Whether a torch profiler records on this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def profiling_anywhere() -> bool:
    """Whether one records on any thread."""
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))


def profilers_counting() -> Collection[str]:
    """Names of what counts steps for torch's profilers at the moment: ``"ProfilerStep"`` is a profiler itself."""
    return dict(getattr(autograd_profiler.KinetoStepTracker, "_step_dict", {}))


def allocations(recorder: Any) -> list[tuple[int, int, int]]:
    """What a ``torch.autograd.profiler.profile`` has recorded of the CPU's memory, in no order.

    Returns:
        For each allocation and release: the moment in nanoseconds, the address, and the bytes (negative: released).
    """
    waiting, found = list(recorder.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return found


def marked(profiler: torch.profiler.profile, mark: str) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """What a profiler has recorded of blocks under ``torch.profiler.record_function``, and of memory, in no order.

    Args:
        profiler: one that has ended.
        mark: what the names of the blocks begin with; a number follows it.

    Returns:
        For each block its beginning and end, in nanoseconds, and its number; for each allocation and release the
        moment, in nanoseconds, and the bytes (negative: released).
    """
    windows: list[tuple[int, int, int]] = []
    changes: list[tuple[int, int]] = []
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events: Any = results.events() if results is not None else ()
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(mark):
            windows.append((event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name()[len(mark) :])))
    return windows, changes
