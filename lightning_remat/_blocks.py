"""How many bytes a device's allocator takes for a storage of a given size."""

from __future__ import annotations

CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator's unit, in bytes: every block is a multiple of it."""


def block_bytes(nbytes: int, device_type: str) -> int:
    """Bytes that the allocator of a device of this type takes for a storage of ``nbytes``; 0 for an empty one.

    On CUDA these are whole blocks of the caching allocator with its default settings (``roundup_power2_divisions``
    would round further).
    """
    if device_type != "cuda":
        return nbytes
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
