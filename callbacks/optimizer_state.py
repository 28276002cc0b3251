"""How many bytes an optimizer's state will take, before its first step."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lightning_remat.measure import held_bytes
from lightning_remat.planner import RematWarning


def optimizer_state_bytes(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> int:
    """Bytes of optimizer state on ``device`` once every parameter has been updated.

    State that exists is counted as it is. Where there is none yet, a copy of the optimizer takes a step on stand-ins
    for its parameters, one of each shape at a time, and the state that it has then is counted: nothing depends on the
    optimizer's name.

    Args:
        optimizers: as configured; they and their parameters are not changed.
        device: only bytes on this device are counted.

    Returns:
        Bytes; 0 (with a warning) for an optimizer whose step cannot be tried, such as one that wants a closure.
    """
    return sum(_bytes_of(optimizer, device) for optimizer in optimizers)


def _bytes_of(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    existing = held_bytes(optimizer, device=device)
    if existing:
        return existing
    alike: dict[Any, list[torch.Tensor]] = collections.defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.device.type == device.type:
                alike[number, parameter.device, parameter.dtype, parameter.shape, parameter.stride()].append(parameter)
    try:
        random_devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(random_devices, device_type=device.type), torch.no_grad():
            return sum(len(some) * _bytes_for(optimizer, some[0], device) for some in alike.values())
    except Exception as error:  # noqa: BLE001 - any optimizer may be given, and none may stop the run
        warnings.warn(
            f"the memory of {type(optimizer).__name__}'s state cannot be found before its first step "
            f"({type(error).__name__}: {error}); the budget does not count it. Give RematCallback(reserve=...) its size.",
            RematWarning,
            stacklevel=2,
        )
        return 0


def _bytes_for(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, device: torch.device) -> int:
    """State bytes of one parameter: a copy of the optimizer steps with a zero gradient, where only this one has any."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for other in group["params"]:
            memo[id(other)] = torch.nn.Parameter(torch.empty_like(other, device="meta"), other.requires_grad)
    stand_in = memo[id(parameter)] = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    rehearsal = object.__new__(type(optimizer))
    # Without what others have put on the instance: hooks, and a `step` that a scheduler has wrapped.
    own = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks") and name != "step"}
    rehearsal.__dict__.update(copy.deepcopy(own, memo))
    for name in vars(optimizer).keys() - own.keys() - {"step"}:
        setattr(rehearsal, name, collections.OrderedDict())
    type(optimizer).step(rehearsal)
    return held_bytes(rehearsal, device=device)
