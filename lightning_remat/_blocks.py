"""What the allocator of a device makes of a size."""

from __future__ import annotations

CUDA_BLOCK_BYTES = 512
"""The caching allocator's unit: every block is a multiple of it."""


def block_bytes(nbytes: int, device_type: str) -> int:
    """Bytes of the block that holds a storage of ``nbytes`` on a device of this type; nothing takes none.

    On CUDA it is that of the caching allocator with its own settings (``roundup_power2_divisions`` rounds further).
    """
    if device_type != "cuda":
        return nbytes
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
