"""Regions of autocast, and inference mode, as a captured graph holds them.

* ``_enter_autocast``, ``_exit_autocast``: what a region is in a graph of Dynamo's (see ``capture._autocast``).
* ``_enter_inference_mode``: torch before 2.13 cannot capture it (see ``capture._inference``).
"""

from __future__ import annotations

from typing import Any

import torch

enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode

enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""What a region of autocast is in a graph of Dynamo's: its begin, with its settings, and its end."""


def autocast_region(kind: str) -> Any:
    """Tells regions of autocast apart: what it caches for each, a node of autograd's graph that casts a tensor of our own."""
    if kind not in _CASTED:
        _CASTED[kind] = tuple(torch.zeros(1, 1, device=kind, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        return torch.mm(*_CASTED[kind]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


_CASTED: dict[str, tuple[torch.Tensor, ...]] = {}
"""By the type of the device."""
