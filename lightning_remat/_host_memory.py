"""Tensors in the host's memory, and copies of tensors between it and a device, beside what the device computes.

A step on the CPU does the same with a second buffer, so that one code runs on both. Such a buffer is the host's memory and
none of the step's device: it comes from numpy, and torch's allocator, by which peaks are measured, knows nothing of it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import warnings
import weakref
from typing import Any

import numpy
import torch

from lightning_remat.errors import RematWarning


@dataclasses.dataclass(eq=False)
class _Block:
    """Memory of the host, and the last copy that reads or writes it (on a GPU)."""

    memory: torch.Tensor
    event: torch.cuda.Event | None = None

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


_blocks: dict[int, _Block] = {}
"""All blocks that there are, by their addresses."""


class _Pool:
    """Blocks for the tensors of one device: what a step gives up is taken by the next, whose copies wait for it there.

    (torch's own pool of pinned memory gives a block again when the device is done with it, and a step is called long before:
    there would be blocks for several.) No more are kept than were ever used at a time.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._returned: collections.deque[_Block] = collections.deque()
        self._free: dict[int, list[_Block]] = {}  # by their bytes; those of the sizes given up last at the end
        self._used = self._kept = self._most = 0

    def take(self, nbytes: int) -> numpy.ndarray[Any, Any]:
        """Bytes, which are the pool's again when nobody holds the array."""
        with self._lock:
            while self._returned:
                self._give(self._returned.popleft())
            found = self._given(nbytes) if nbytes in self._free else None
            self._used += nbytes
            self._most = max(self._most, self._used)
            while self._used + self._kept > self._most:
                self._let_go(self._given(next(iter(self._free))))
        if found is None:
            found = _Block(_new(nbytes, self._device))
            _blocks[found.address] = found
        array = found.memory.numpy()
        weakref.finalize(array, self._returned.append, found).atexit = False
        return array

    def _give(self, block: _Block) -> None:
        nbytes = block.memory.nbytes
        self._used, self._kept = self._used - nbytes, self._kept + nbytes
        alike = self._free[nbytes] = self._free.pop(nbytes, [])
        alike.append(block)

    def _given(self, nbytes: int) -> _Block:
        alike = self._free[nbytes]
        block = alike.pop(0)  # which was read longest ago
        if not alike:
            del self._free[nbytes]
        self._kept -= nbytes
        return block

    @staticmethod
    def _let_go(block: _Block) -> None:
        if block.event is not None:
            block.event.synchronize()
        del _blocks[block.address]


_pool = functools.cache(_Pool)


def host_memory(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the host for a tensor of ``device``: pinned, if that is a GPU.

    Where none can be pinned, it is the usual memory: the same bits, more slowly; that is warned of once.
    """
    elements = 1 + sum(max(0, size - 1) * step for size, step in zip(shape, stride, strict=True))
    flat = torch.from_numpy(_pool(device).take(elements * dtype.itemsize))
    return flat.view(dtype).as_strided(shape, stride)


def _new(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        try:
            return pinned(nbytes)
        except RuntimeError as error:
            _warn_of_unpinned(str(error).partition("\n")[0])
    return torch.from_numpy(numpy.empty(nbytes, numpy.uint8))


def pinned(nbytes: int) -> torch.Tensor:
    """Pinned memory.

    Raises:
        RuntimeError: where there is none.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def on_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage was made by `host_memory`: also in a step on the CPU it is none of the device's memory then."""
    return bool(_blocks) and storage.data_ptr() in _blocks


@functools.cache
def _warn_of_unpinned(reason: str) -> None:
    warnings.warn(
        f"no memory of the host could be pinned ({reason}): tensors are copied to and from memory that is not, more "
        "slowly; give a smaller host_budget",
        RematWarning,
        stacklevel=3,
    )


class Transfer:
    """One copy of a tensor between host and device, which runs beside what the device computes until it is waited for.

    It begins with all that the device's current stream was given before. On the CPU, where nothing runs beside, it is made
    when it is waited for.

    Args:
        source, target: tensors of the same layout, one of them on the device.
        device: that device.
        to_device: the direction: copies in one direction wait for one another.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, device: torch.device, *, to_device: bool) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = source, target
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            beside = _stream(self._stream.device, to_device)
            beside.wait_stream(self._stream)  # what is copied is computed, what is written over has been read
            block = _blocks.get((source if to_device else target).data_ptr())
            if block is not None and block.event is not None:
                beside.wait_event(block.event)
            with torch.cuda.stream(beside):
                target.copy_(source, non_blocking=True)
                self._event = beside.record_event()
            if block is not None:
                block.event = self._event

    def wait(self) -> torch.Tensor:
        """The copy, which all that the current stream is given from now on finds there."""
        assert self._pair is not None, "it is waited for once"
        (source, target), self._pair = self._pair, None
        if self._event is None:
            target.copy_(source)
        else:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return target

    def __del__(self) -> None:
        # Of a step that ended in between (out of memory): nothing may take the tensors' memory before the copy has ended.
        if self._event is not None and self._pair is not None:
            self._stream.wait_event(self._event)


@functools.cache
def _stream(device: torch.device, to_device: bool) -> torch.cuda.Stream:
    """The stream on which tensors are copied in one direction."""
    del to_device  # there is one for each
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def begin_to_host(tensor: torch.Tensor) -> Transfer:
    """Begin to copy a tensor to the host, in memory of its own there; it must stay as it is until that is waited for."""
    target = host_memory(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return Transfer(tensor, target, tensor.device, to_device=False)


def begin_to_device(tensor: torch.Tensor, device: torch.device) -> Transfer:
    """Begin to fetch a tensor from the host: it has memory of its own on the device from now on."""
    target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return Transfer(tensor, target, device, to_device=True)


def copied(transfer: Transfer) -> torch.Tensor:
    """Wait until a copy has ended (see `Transfer.wait`)."""
    return transfer.wait()
