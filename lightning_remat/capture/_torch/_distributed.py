"""The key-value store of processes that train together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed


def default_store() -> Any:
    """The key-value store of the processes that train together.

    Raises:
        ValueError: where ``torch.distributed`` is not initialized.
    """
    return torch.distributed.distributed_c10d._get_default_store()
