"""The device's memory as its allocator sees it: blocks, segments, and what is reserved beyond what is allocated."""

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
