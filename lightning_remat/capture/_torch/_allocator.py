"""The settings of the device's caching allocator, which are read and changed while a program runs."""

from __future__ import annotations

import os

import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_settings() -> str:
    """The settings of the device's caching allocator, in the form of its environment variable.

    They are those set at run time, or else the environment variable's; "" where nothing is set.
    """
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", str)() or ""
    return asked or next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def set_allocator_settings(text: str) -> None:
    """Set the device's caching allocator, for what is allocated from now on.

    Args:
        text: settings in the form of its environment variable, such as ``"expandable_segments:True"``.

    Raises:
        RuntimeError: for what this release of torch does not accept.
    """
    torch._C._accelerator_setAllocatorSettings(text)
