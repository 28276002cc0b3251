"""Regions of autocast, and inference mode, as a captured graph holds them.

* ``_enter_autocast``, ``_exit_autocast``: the calls by which a graph of Dynamo's has a region (see
  ``capture.gradients._autocast``).
* ``_DisableAutocast``: autocast is off where AOTAutograd runs what it has captured under autocast.
* ``_enter_inference_mode``, ``_exit_inference_mode``, ``_set_grad_enabled``: inference mode is captured as the absence of
  gradients (see ``capture.tracing._inference``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
set_grad_enabled = torch._C._set_grad_enabled

enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""The calls by which a graph of Dynamo's has a region of autocast: its begin, with its settings, and its end."""


def autocast_region(kind: str) -> Any:
    """An object that identifies the present region of autocast, for this type of device.

    It is the node of autograd's graph that casts a certain tensor, which takes no memory: autocast casts a tensor once in a
    region.
    """
    if kind not in _CASTED:
        _CASTED[kind] = tuple(torch.zeros(shape, device=kind, requires_grad=True) for shape in ((0, 1), (1, 0)))
    with torch.enable_grad():
        return torch.mm(*_CASTED[kind]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


_CASTED: dict[str, tuple[torch.Tensor, ...]] = {}
"""The tensors that are cast for that, by the type of the device."""


def as_autocast_is() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes contexts in which autocast is off, if it is kept from anything at present, and left alone otherwise."""
    off = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutocastCPU)
    return torch._C._DisableAutocast if off else contextlib.nullcontext
