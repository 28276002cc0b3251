"""The device's memory as its allocator sees it: blocks, segments, and what is reserved beyond what is allocated.

* ``_settings``: the user's settings of torch's CUDA caching allocator.
* ``_caching``: a model of that allocator, without a device.
* ``_replay``: a schedule's requests, run through the model for a few training steps.
"""

from lightning_remat.allocator._caching import CachingAllocator, OutOfDeviceMemoryError, Segment, rounded
from lightning_remat.allocator._replay import (
    NOTHING,
    Arrangement,
    Footprint,
    Holdings,
    best_footprint,
    footprint,
    footprint_together,
)
from lightning_remat.allocator._settings import DEFAULTS, AllocatorSettings

__all__ = [
    "DEFAULTS",
    "NOTHING",
    "AllocatorSettings",
    "Arrangement",
    "CachingAllocator",
    "Footprint",
    "Holdings",
    "OutOfDeviceMemoryError",
    "Segment",
    "best_footprint",
    "footprint",
    "footprint_together",
    "rounded",
]
