"""Costs measured on the device, one distinct call of an operation at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from lightning_remat.capture import OpCall, same_device
from lightning_remat.cost._cache import CostCache
from lightning_remat.cost._device_spec import device_spec
from lightning_remat.cost._materialize import materialize
from lightning_remat.cost._op_cost import FREE, OpCost
from lightning_remat.cost._roofline import roofline
from lightning_remat.cost._timing import PASSES, seconds_of
from lightning_remat.cost._workspace import Memory, ProfilerInUseError, cpu_memory, cuda_memory
from lightning_remat.errors import ConfigError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def profile(
    calls: Sequence[OpCall | None],
    device: torch.device,
    *,
    cache: CostCache | None = None,
    progress: Progress | None = None,
    quick: bool = False,
) -> list[OpCost]:
    """Time and workspace of every call, measured on ``device``.

    Each distinct call (by `OpCall.key`) is measured once, on tensors made for it, and everything it held is dropped
    before the next: the memory needed is that of the largest single op (and on the CPU 16 MiB, see `seconds_of`), so a
    step that does not fit can be profiled. Inputs that only another op can give (`OpCall.sources`) come from a real run of
    that op, which is done first and on its own; nothing else of its results is held.
    The user's random numbers stay as they are, on the CPU and on ``device``. Gradients and autocast are off. On CUDA
    the device's peak memory statistics are reset, and cached blocks are given back at the end.

    A call that raises, or whose sources do, gets its `roofline` estimate and a workspace of 0, and a warning in the log
    says so, once for each target. On the CPU, where a torch profiler runs already, workspaces count as 0 bytes, with a
    warning too. Neither is cached.

    Args:
        calls: what to measure; ``None`` stands for what costs nothing (views). Tensors are made where their specs say.
        device: where memory is counted, ``cpu`` or ``cuda``. A call is timed there if it has a tensor there, else on another
            CUDA device that it has one on, else on the CPU.
        cache: costs measured before, read first and added to; ``None`` measures everything.
        progress: told after each timed op how many are timed, and how many there are to time.
        quick: whether ops are timed in one pass on the CPU, not in three: what else runs there may then seem to be theirs.

    Returns:
        One `OpCost` a call, in seconds and bytes.

    Raises:
        ConfigError: for another kind of device.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"ops can be profiled on cpu and cuda, and {device} was given: use the cost model 'roofline:<device>', "
            "'flops' or 'unit' there"
        )
    device = torch.empty(0, device=device).device  # with its index
    distinct = {call.key: call for call in calls if call is not None}
    costs = {key: cost for key, cost in (cache.load(device) if cache is not None else {}).items() if key in distinct}
    missing = {key: call for key, call in distinct.items() if key not in costs}
    if missing:
        with _undisturbed(device, {where for call in missing.values() for where in _devices(call)}):
            measured, estimated = _measure(missing, device, progress, 1 if quick or device.type == "cuda" else PASSES)
        costs.update(measured)
        costs.update(estimated)
        if cache is not None:
            cache.store(device, [missing[key] for key in measured], measured.values())
    return [FREE if call is None else costs[call.key] for call in calls]


def _measure(
    calls: dict[str, OpCall], device: torch.device, progress: Progress | None, passes: int
) -> tuple[dict[str, OpCost], dict[str, OpCost]]:
    """Costs by key: those that were measured, and those that had to be estimated."""
    failures = _Failures(device)
    seconds: dict[str, float] = {}
    memory: dict[str, Memory] = {}
    every = [(key, call) for _ in range(passes) for key, call in calls.items()]
    for done, (key, call) in enumerate(every, start=1):
        if key not in failures:
            try:
                found, memory[key] = _time_one(call, device)
            except Exception as error:  # noqa: BLE001 - anything may be called, so anything may be raised
                failures.add(call, error)
                seconds.pop(key, None)
            else:
                seconds[key] = min(found, seconds.get(key, found))
        if progress is not None and done % passes == 0:
            progress(done // passes, len(calls))
    unknown_workspaces: set[str] = set()
    if device.type == "cpu":
        try:
            memory = cpu_memory((calls[key] for key in seconds), failures.add)
        except ProfilerInUseError as error:
            log.warning(
                "Op workspaces were not measured, and count as 0 bytes: %s. Predicted peaks will be too low; plan the "
                "step before the profiler starts.",
                error,
            )
            unknown_workspaces = set(seconds)
    measured = {key: OpCost(seconds[key], *dataclasses.astuple(memory[key])) for key in seconds if key in memory}
    estimated = {key: measured.pop(key) for key in unknown_workspaces}
    estimated.update(failures.estimates())
    return measured, estimated


def _time_one(call: OpCall, device: torch.device) -> tuple[float, Memory]:
    """Seconds of a call, and its memory on CUDA. (On the CPU that takes a profiler, which slows ops: `cpu_memory`.)"""
    args, kwargs = materialize(call)
    run = functools.partial(call.target, *args, **kwargs)
    seconds = seconds_of(run, _timed_on(call, device))
    return seconds, cuda_memory(call, args, kwargs, device) if device.type == "cuda" else Memory()


def _timed_on(call: OpCall, device: torch.device) -> torch.device:
    """``device`` if the call has a tensor there, else another CUDA device that it has one on, else the CPU."""
    devices = _devices(call)
    if any(same_device(where, device) for where in devices):
        return device
    return next((where for where in devices if where.type == "cuda"), torch.device("cpu"))


def _devices(call: OpCall) -> list[torch.device]:
    """Where the call's tensors are, each once, in order."""
    return list(dict.fromkeys(spec.device for spec in (*call.inputs(), *call.outputs)))


class _Failures:
    """Calls that cannot be run on made-up inputs: warned of once a target, and estimated instead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[str, OpCall] = {}
        self._targets: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._calls

    def add(self, call: OpCall, error: Exception) -> None:
        """Note the call; log the first one of each target."""
        self._calls[call.key] = call
        target = str(call.target)
        if target not in self._targets:
            self._targets.add(target)
            log.warning(
                "%s could not be profiled on %s (%s: %s): its roofline estimate stands in.",
                target,
                self._device,
                type(error).__name__,
                str(error).strip(),
            )

    def estimates(self) -> dict[str, OpCost]:
        """A roofline estimate for each failed call, by key."""
        if not self._calls:
            return {}
        return dict(zip(self._calls, roofline(list(self._calls.values()), device_spec(self._device)), strict=True))


@contextlib.contextmanager
def _undisturbed(device: torch.device, others: Iterable[torch.device]) -> Iterator[None]:
    """While open, ops run without gradients, autocast and garbage collection; random states are put back at the end.

    Args:
        device: where memory is counted.
        others: devices that calls have tensors on.
    """
    collecting = gc.isenabled()
    on_cuda = dict.fromkeys(torch.empty(0, device=one).device for one in (device, *others) if one.type == "cuda")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(on_cuda)))
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", device.type, *(one.type for one in on_cuda)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.callback(torch.cuda.empty_cache)
        gc.disable()  # a collection would be timed, and would free what the op does not hold
        try:
            yield
        finally:
            if collecting:
                gc.enable()
