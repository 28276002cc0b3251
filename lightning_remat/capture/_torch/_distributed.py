"""The processes that train together, and their key-value store."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed


def processes() -> int:
    """How many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def default_store() -> Any:
    """The key-value store of the processes that train together.

    Raises:
        ValueError: where ``torch.distributed`` is not initialized.
    """
    return torch.distributed.distributed_c10d._get_default_store()
