"""The settings of the device's caching allocator: expandable segments are switched on while a scheduled step runs."""

from __future__ import annotations

import os

import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_settings() -> str:
    """What is set of the device's caching allocator, as in its environment variable: at run time, or else there."""
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", str)() or ""
    return asked or next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def set_allocator_settings(text: str) -> None:
    """Set the caching allocator while it runs: what is allocated from now on follows it.

    Raises:
        RuntimeError: for what this release of torch does not accept.
    """
    torch._C._accelerator_setAllocatorSettings(text)
