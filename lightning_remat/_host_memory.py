"""Tensors in the host's memory, and copies of tensors between it and a device, beside what the device computes.

A step on the CPU does the same with a second buffer, so that one code runs on both. Such a buffer is the host's memory and
none of the step's device: it comes from numpy, and torch's allocator, by which peaks are measured, knows nothing of it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy
import torch

from lightning_remat.errors import RematWarning


def host_memory(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the host for a tensor of ``device``: pinned, if that is a GPU. torch keeps pinned memory for the next one.

    Where none can be pinned, it is the usual memory: the same bits, more slowly; that is warned of once.
    """
    if device.type == "cuda":
        try:
            made = pinned(shape, stride, dtype)
        except RuntimeError as error:
            _warn_of_unpinned(str(error).partition("\n")[0])
            made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        elements = 1 + sum(max(0, size - 1) * step for size, step in zip(shape, stride, strict=True))
        flat = torch.from_numpy(numpy.empty(elements * dtype.itemsize, numpy.uint8))
        made = flat.view(dtype).as_strided(shape, stride)
    vars(made.untyped_storage())[_MARK] = True
    return made


def pinned(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pinned memory for a tensor.

    Raises:
        RuntimeError: where there is none.
    """
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False  # by the CPU: it takes long
    try:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu", pin_memory=True)
    finally:
        settings.fill_uninitialized_memory = fills


def on_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage was made by `host_memory`: also in a step on the CPU it is none of the device's memory then."""
    return _MARK in getattr(storage, "__dict__", ())


_MARK = "_lightning_remat_host"


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
            with torch.cuda.stream(beside):
                target.copy_(source, non_blocking=True)
                self._event = beside.record_event()

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
