"""Random ops evaluated again draw the numbers that they drew the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random number generator, a small tensor of bytes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
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

    def replay(
        device: torch.device, state: torch.Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:  # an op has a `device` too
        now = random_state(device)
        _set_state(device, state)
        try:
            return target(*args, **kwargs)
        finally:
            _set_state(device, now)

    return replay
