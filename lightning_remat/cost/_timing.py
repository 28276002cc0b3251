"""How long a function takes on a device, from a few calls after a warm-up."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

PASSES = 3
"""Times that all ops are gone through on the CPU. What else runs on a machine comes in bursts, which are longer than
the repeats of one op: spread over the time that all ops take, some of an op's repeats are hit, and not all."""
MIN_REPEATS = 3
MAX_REPEATS = 20
SECONDS_PER_OP = 0.02
"""An op is repeated until this is spent, in all passes together, within the two limits above. On the CPU, one whose call takes
a pass's share of this is called once in each pass: what a first call has to set up is little beside that, and the others
do without."""
MOST_SECONDS_PER_OP = 0.06
"""On the CPU, an op is not repeated beyond this, in all passes together, even if something else made its calls slow."""
NEIGHBOURS_BYTES = 16 * 2**20
"""Bytes that are written before each call on the CPU, as the ops before it write in a step: with its tensors still in
the caches from the call before, an elementwise op seems two to three times as fast as it is."""


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Typical time of one call of ``run``, in seconds, by one pass. Its result is dropped before the next call.

    Args:
        run: what to time; it must launch its work on the device's current stream.
        device: ``cpu`` or ``cuda``.
    """
    return _seconds_on_cuda(run, device) if device.type == "cuda" else _seconds_on_cpu(run)


def _seconds_on_cpu(run: Callable[[], object]) -> float:
    """The fastest of a few calls, the first of which warms up, each after `NEIGHBOURS_BYTES` have been written.

    Whatever else runs on the processor can only add to a call's time, and on a shared one it adds whole time slices (a
    parallel kernel waits for its slowest thread), often to more than half of the calls. So no mean, and no median.
    """
    fastest = math.inf
    spent = 0.0
    neighbours = torch.empty(NEIGHBOURS_BYTES, dtype=torch.uint8, device="cpu")
    for count in range(1, MAX_REPEATS // PASSES + 1):
        neighbours.zero_()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        fastest = min(fastest, seconds)
        spent += seconds
        enough = count * fastest >= SECONDS_PER_OP / PASSES or spent >= MOST_SECONDS_PER_OP / PASSES
        long = seconds >= SECONDS_PER_OP / PASSES
        if enough and (long or count >= MIN_REPEATS - 1):  # the first of short calls warms up
            break
    return fastest


def _seconds_on_cuda(run: Callable[[], object], device: torch.device) -> float:
    """The median of a few calls after a warm-up, queued without waiting in between, as they are in a training step.

    An event pair around each call therefore gives the kernel's own time where kernels are long, and the time of its
    launch where they are shorter than that, which is what such ops cost in a step.
    """
    run()
    torch.cuda.synchronize(device)
    (first,) = _event_seconds(run, device, 1)
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, math.ceil(SECONDS_PER_OP / max(first, 1e-9))))
    return statistics.median(_event_seconds(run, device, repeats))


def _event_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    stream = torch.cuda.current_stream(device)
    starts = [_timed_event() for _ in range(repeats)]
    ends = [_timed_event() for _ in range(repeats)]
    for start, end in zip(starts, ends, strict=True):
        start.record(stream)
        run()
        end.record(stream)
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
