"""Peak memory as the allocator saw it: the check on every number that a plan predicts.

On CUDA the caching allocator keeps the peak itself. On CPU there is no such counter: torch's profiler records every
allocation, and every release of what was allocated while it ran; weak references note releases of older storages; and
the peak is the largest running sum of these. Both count bytes *relative to the start of the call*: what was held before
counts as zero, and releasing some of it makes room that later allocations fill without raising the peak.

What is outside torch's allocators (Python objects, a library's own scratch space; for a step on the CPU, tensors that wait on
the host) is not seen; on CPU neither are a storage that existed before and is resized in place, and threads other than the
calling one and autograd's (what these allocate and another one releases counts until its memory is allocated again, unless
it was given to a collective of ``torch.distributed``, or allocated by one: in a measured block one returns when its tensors
have been let go of, and what it has allocated itself is free then).
"""

from __future__ import annotations

import atexit
import bisect
import dataclasses
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as autograd_profiler

from lightning_remat._blocks import block_bytes
from lightning_remat._collectives import seen_collectives
from lightning_remat._host_memory import on_host
from lightning_remat._profiler import (
    QuietReleases,
    cpu_allocations,
    giving_way,
    make_way,
    profiler_in_use,
    profiler_running,
    quiet_profiler,
)
from lightning_remat.errors import RematError

PROFILER_RUNS = (
    "another torch profiler is running, and two cannot run at once: the allocator's peak on CPU was not measured. "
    "Measure a step that is not profiled."
)


class Stretch(NamedTuple):
    """The memory of a part of a measured block, in bytes beyond what was held when the block began (or negative).

    Attributes:
        begin_bytes: what is held when it begins.
        peak_bytes: the most that is held at any moment of it.
    """

    begin_bytes: int
    peak_bytes: int


@dataclasses.dataclass
class PeakMemory:
    """What `track_peak` found; filled in when its block ends.

    Attributes:
        device: where it was measured.
        peak_bytes: the most that the allocator held at any moment of the block, beyond what it held when the block began
            (never negative); ``None`` until the block ends, and where it could not be measured.
        allocated_bytes, reserved_bytes: on CUDA, the most that was allocated, and reserved, during the block, in bytes,
            including what was there before; ``None`` on the CPU.
        reserved_more: whether more was reserved during the block than when it began.
        reason: why it could not be measured ("" where it could).
        stretches: the parts of the block, between calls of `mark`: one more than there are calls. Empty until the block
            ends, and where it was not measured.
    """

    device: torch.device
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_more: bool = False
    reason: str = ""
    stretches: list[Stretch] = dataclasses.field(default_factory=list)
    _mark: Callable[[], None] = lambda: None

    def mark(self) -> None:
        """Begin a new stretch."""
        self._mark()


def peak_memory(fn: Callable[[], object], device: torch.device | str | None = None) -> int:
    """Call ``fn`` and return the most memory its device's allocator held meanwhile, beyond what it held before.

    Unreachable Python objects are collected first: tensors that die while ``fn`` runs would otherwise count as room
    that ``fn`` made.

    Args:
        fn: takes no arguments; what it returns is dropped.
        device: ``"cpu"`` or a CUDA device; by default the current CUDA device where there is one, else the CPU. On CUDA
            the allocator's own peak statistics are reset.

    Returns:
        Bytes, at least 0.

    Raises:
        RematError: when the device is of another kind, or when the CPU is measured while another torch profiler runs.

    Example:
        >>> import torch
        >>> peak_memory(lambda: torch.empty(1024, dtype=torch.uint8) + 1, device="cpu") >= 2048
        True
    """
    with track_peak(device) as peak:
        if peak.reason:
            raise RematError(peak.reason)
        fn()
    if peak.peak_bytes is None:
        raise RematError(peak.reason)
    return peak.peak_bytes


@contextmanager
def track_peak(
    device: torch.device | str | None = None, *, give_way: Callable[[], None] | None = None
) -> Iterator[PeakMemory]:
    """Measure the peak of a ``with`` block; see `peak_memory` for what is counted.

    On CPU this needs torch's profiler, of which only one can run. Where another one runs, or is set up to start with a
    later step, the block runs unmeasured: ``peak_bytes`` stays ``None`` and ``reason`` says why.

    Args:
        device: as for `peak_memory`.
        give_way: called when something else is to be measured on the CPU while the block is open; it must end the
            block. By default the block goes on, and the other measurement is not made.

    Yields:
        A `PeakMemory`, whose ``peak_bytes`` is set when the block ends, by an exception too.

    Raises:
        RematError: for a device that is neither CPU nor CUDA.
    """
    where = _device(device)
    peak = PeakMemory(where)
    with _track_cuda(peak) if where.type == "cuda" else _track_cpu(peak, give_way):
        yield peak


def held_bytes(*objects: object, gradients: bool = False, device: torch.device | str | None = None) -> int:
    """Bytes of the distinct storages of the tensors in ``objects``; on CUDA, of the allocator's blocks for them.

    A storage counts once and whole, however many tensors share it and however little of it they view. Tensors that hold
    no memory (meta, fake, lazy) count nothing.

    Args:
        *objects: tensors; modules (their parameters and buffers); optimizers (their state, not the parameters they
            update); mappings (their values), sequences, sets, iterators and dataclass instances of such, nested at will.
            Anything else holds nothing. Iterators are consumed.
        gradients: count the ``.grad`` of each tensor too.
        device: count only what lies on this device (``"cuda"``: on any CUDA device).

    Returns:
        Bytes.
    """
    only = torch.device(device) if device is not None else None
    found: dict[tuple[torch.device, int], int] = {}
    for tensor in _tensors(objects, set()):
        grad = tensor.grad if gradients and tensor.is_leaf else None
        for one in (tensor, grad):
            for storage in _storages(one) if one is not None else ():
                place = storage.device
                if only is None or (place.type == only.type and only.index in (None, place.index)):
                    key = place, storage.data_ptr()
                    found[key] = max(found.get(key, 0), storage.nbytes())
    return sum(block_bytes(nbytes, place.type) for (place, _), nbytes in found.items())


# -- CUDA -------------------------------------------------------------------------------------------------------------


_on_cuda: list[_CudaPeak] = []
"""The blocks that are tracked now: they share the allocator's one peak counter, which is reset for each stretch."""


class _CudaPeak:
    """The peaks of one block and its stretches, kept while the allocator's counter is reset for other blocks too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = torch.cuda.memory_allocated(device)
        self.reserved_at_start = torch.cuda.memory_reserved(device)
        self.allocated = self.reserved = 0
        self.stretches: list[Stretch] = []
        self._begin, self._peak = self.start, 0

    def note(self) -> None:
        """Take over the allocator's peak, before it is reset."""
        allocated = torch.cuda.max_memory_allocated(self.device)
        self._peak, self.allocated = max(self._peak, allocated), max(self.allocated, allocated)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))

    def mark(self) -> None:
        """A stretch ends, and the next one begins."""
        _reset_cuda(self.device)
        self.stretches.append(Stretch(self._begin - self.start, self._peak - self.start))
        self._begin, self._peak = torch.cuda.memory_allocated(self.device), 0


def _reset_cuda(device: torch.device) -> None:
    for other in _on_cuda:
        if other.device == device:
            other.note()
    torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _track_cuda(peak: PeakMemory) -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize(peak.device)
    _reset_cuda(peak.device)
    own = _CudaPeak(peak.device)
    _on_cuda.append(own)
    peak._mark = own.mark
    try:
        yield
    finally:
        torch.cuda.synchronize(peak.device)
        own.mark()
        _on_cuda.remove(own)
        peak._mark = lambda: None
        peak.allocated_bytes = own.allocated
        peak.peak_bytes = peak.allocated_bytes - own.start
        peak.reserved_bytes = own.reserved
        peak.reserved_more = peak.reserved_bytes > own.reserved_at_start
        peak.stretches = own.stretches


# -- CPU --------------------------------------------------------------------------------------------------------------


@contextmanager
def _track_cpu(peak: PeakMemory, give_way: Callable[[], None] | None) -> Iterator[None]:
    make_way()
    if profiler_in_use():
        peak.reason = PROFILER_RUNS
        yield
        return
    gc.collect()  # garbage that is collected during the block would count as room that the block made
    changes: list[_Change] = []
    marks: list[int] = []
    elsewhere: list[_Allocation] = []
    collectives: list[tuple[int, int]] = []
    peak._mark = lambda: marks.append(time.time_ns())
    older = _storages_on_cpu()
    quiet = QuietReleases(len(older))
    watches = _watch_releases(older, changes, quiet)
    del older

    def watch(tensor: torch.Tensor) -> None:
        """Gloo's threads, which the profiler does not record, may be the last to hold what is sent asynchronously."""
        for storage in _storages(tensor):
            if storage.device.type == "cpu":
                note = partial(_note_release, elsewhere, storage.data_ptr(), storage.nbytes())
                watches.append(weakref.ref(storage, note))

    recorder: Any = autograd_profiler.profile(use_cpu=True, profile_memory=True)

    def stop() -> None:
        if profiler_running():
            recorder.__exit__(None, None, None)

    with quiet_profiler():
        recorder.__enter__()
    quiet.start()
    atexit.register(stop)  # a process that ends while a profiler runs crashes
    try:
        with giving_way(give_way), seen_collectives(watch, lambda *moments: collectives.append(moments)):
            yield
    finally:
        atexit.unregister(stop)
        peak._mark = lambda: None
        if profiler_running():
            recorder.__exit__(None, None, None)
            del watches
            seen = cpu_allocations(recorder)
            changes += _recorded([*seen, *elsewhere, *_gone_with(collectives, seen)])
            peak.stretches = _stretches(changes, marks)
            peak.peak_bytes = max(0, *(stretch.peak_bytes for stretch in peak.stretches))
        else:  # the block started a profiler of its own, which ended this one
            peak.reason = PROFILER_RUNS


_Change = tuple[int, int]
"""Nanoseconds on the system's clock, and bytes allocated (or, negative, released) at that moment."""

_Allocation = tuple[int, int, int]
"""The moment, the address, and the bytes (negative if released)."""


def _stretches(changes: Iterable[_Change], marks: Sequence[int]) -> list[Stretch]:
    """The running sum of all changes, up to each mark and from the last one on."""
    waiting = sorted(changes, key=lambda change: change[0])[::-1]
    held, found = 0, []
    for end in (*marks, math.inf):
        begin = peak = held
        while waiting and waiting[-1][0] < end:
            held += waiting.pop()[1]
            peak = max(peak, held)
        found.append(Stretch(begin, peak))
    return found


def _recorded(allocations: Iterable[_Allocation]) -> Iterator[_Change]:
    """Allocations of the profiled block, and the releases of what it allocated, of all that the profiler has recorded.

    Releases of anything else are left out: the profiler does not see most of them, and takes the sizes of some from
    whatever lay at that address when it last ran. It does not see either what a thread releases that it does not record:
    such memory has been released when it is allocated again.
    """
    live: dict[int, int] = {}
    addresses: list[int] = []  # of these blocks, in order
    for moment, address, nbytes in sorted(allocations, key=lambda change: change[0]):
        at = bisect.bisect_left(addresses, address)
        if nbytes > 0:
            first = at - 1 if at and addresses[at - 1] + live[addresses[at - 1]] > address else at
            last = bisect.bisect_left(addresses, address + nbytes, lo=at)
            for gone in addresses[first:last]:
                yield moment, -live.pop(gone)
            addresses[first:last] = [address]
            live[address] = nbytes
            yield moment, nbytes
        elif nbytes < 0 and address in live:
            del addresses[at]
            yield moment, -live.pop(address)


def _gone_with(collectives: Iterable[tuple[int, int]], allocations: Iterable[_Allocation]) -> Iterator[_Allocation]:
    """Releases of what was allocated between these moments, at their ends.

    The profiler sees such a release only where the calling thread, not gloo's, was the last to hold the collective.
    """
    made = sorted(one for one in allocations if one[2] > 0)
    for begin, end in collectives:
        for _, address, nbytes in made[bisect.bisect_left(made, (begin,)) : bisect.bisect_right(made, (end,))]:
            yield end, address, -nbytes


def _note_release(releases: list[_Allocation], address: int, nbytes: int, _: object) -> None:
    releases.append((time.time_ns(), address, -nbytes))


def _storages_on_cpu() -> list[torch.UntypedStorage]:
    """The CPU storages that exist now and that a Python object holds."""
    storages: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, _gradient(thing)):
                for storage in _storages(tensor) if tensor is not None else ():
                    # These are all tensors of the process, and a subclass may return something that is no storage.
                    ours = isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu"
                    if ours and not storage.is_shared() and not on_host(storage):
                        storages[id(storage)] = storage
    return list(storages.values())


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view that was written to where autograd forbids that: nobody can use it any more
        return None


def _watch_releases(
    storages: Iterable[torch.UntypedStorage], changes: list[_Change], quiet: QuietReleases
) -> list[weakref.ref[torch.UntypedStorage]]:
    """Note into ``changes`` when one of the storages is released, as long as the result is kept.

    The previous step's gradients are such storages: they are dropped in the middle of a step. A storage's Python object
    lives as long as the storage does, whoever holds it. The profiler's clock and `time.time_ns` are the same.
    """

    def note(nbytes: int, _: object) -> None:
        changes.append((time.time_ns(), nbytes))
        quiet.released()

    return [weakref.ref(storage, partial(note, -storage.nbytes())) for storage in storages]


# -- what holds memory ------------------------------------------------------------------------------------------------


def _tensors(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in ``thing``; containers on the way are entered once."""
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts = _parts(thing)
    if parts is None or id(thing) in seen:
        return
    seen.add(id(thing))
    for part in parts:
        yield from _tensors(part, seen)


def _parts(thing: object) -> Iterable[object] | None:
    if isinstance(thing, torch.nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if isinstance(thing, torch.optim.Optimizer):
        return list(thing.state.values())
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, Iterator):
        return list(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name, None) for field in dataclasses.fields(thing)]
    return None


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor: several for sparse tensors and for wrappers such as a distributed tensor."""
    if torch.nn.parameter.is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        names: list[str] = tensor.__tensor_flatten__()[0]
        inner: list[Any] = [getattr(tensor, name) for name in names]  # a distributed tensor's mesh is among them
        parts = [part for part in inner if isinstance(part, torch.Tensor)]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # an opaque layout (mkldnn): its memory cannot be told from outside
            return
        if storage.device.type != "meta":
            yield storage
        return
    for part in parts:
        yield from _storages(part)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise RematError(f"memory of a {where.type!r} device cannot be measured: give 'cpu' or a CUDA device")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where
