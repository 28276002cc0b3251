"""Random ops evaluated again draw the numbers that they drew the first time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_remat.capture._torch import random_source


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random number generator, a small tensor of bytes on the CPU."""
    if device.type == "cuda":
        source = random_source()
        return torch.cuda.get_rng_state(device) if source is None else source.state(device)
    return torch.get_rng_state()


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def replaying(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target`` as a function of a device and a state before its own arguments.

    It draws with the generator in that state, and puts the generator back where it was.
    """

    def restored(device: torch.device, state: torch.Tensor, draw: Callable[[], Any]) -> Any:
        now = _state_of(device)
        _set_state(device, state)
        try:
            return draw()
        finally:
            _set_state(device, now)

    def replay(
        device: torch.device, state: torch.Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:  # an op has a `device` too
        draw = functools.partial(target, *args, **kwargs)
        source = random_source() if device.type == "cuda" else None
        if source is not None:
            return source.again(state, draw, functools.partial(restored, device, state, draw))
        return restored(device, state, draw)

    return replay


def _state_of(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
