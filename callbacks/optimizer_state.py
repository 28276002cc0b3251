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


def optimizer_state_bytes(
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    untried: list[torch.optim.Optimizer] | None = None,
) -> int:
    """Bytes of optimizer state on ``device`` once every parameter has been updated.

    State that exists is counted as it is. For a parameter that has none yet (before the first step, or since it was added or
    asks for gradients later on), a copy of the optimizer takes a step on stand-ins, one for each shape at a time, and the
    state that it has then is counted: nothing depends on the optimizer's name.

    Args:
        optimizers: as configured; they and their parameters are not changed.
        device: only bytes on this device are counted.
        untried: a list that optimizers are added to whose state is not known before their first step.

    Returns:
        Bytes; those that exist (with a warning where they belong to other parameters) for an optimizer whose step cannot be
        tried, such as one that wants a closure.
    """
    unknown = untried if untried is not None else []
    return sum(_bytes_of(optimizer, device, unknown) for optimizer in optimizers)


def _bytes_of(optimizer: torch.optim.Optimizer, device: torch.device, untried: list[torch.optim.Optimizer]) -> int:
    existing = held_bytes(optimizer, device=device)
    updated = [
        [held_bytes(optimizer.state.get(p), device=device) > 0 for p in g["params"]] for g in optimizer.param_groups
    ]
    if existing and not any(map(any, updated)):
        return existing  # none of it is kept by parameter
    alike: dict[Any, list[torch.Tensor]] = collections.defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter, known in zip(group["params"], updated[number], strict=True):
            if parameter.requires_grad and parameter.device.type == device.type and not known:
                alike[number, parameter.device, parameter.dtype, parameter.shape, parameter.stride()].append(parameter)
    try:
        random_devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(random_devices, device_type=device.type), torch.no_grad():
            return existing + sum(len(some) * _bytes_for(optimizer, some[0], device) for some in alike.values())
    except Exception as error:  # noqa: BLE001 - any optimizer may be given, and none may stop the run
        untried.append(optimizer)
        if all(map(any, updated)):
            return existing  # a group's first parameter may keep the state of them all, as with LBFGS
        warnings.warn(
            f"the memory of {type(optimizer).__name__}'s state cannot be found before its first step "
            f"({type(error).__name__}: {error}); the budget counts it from then on, which plans once more. To have it counted "
            "at once, give RematCallback(reserve=...) its size.",
            RematWarning,
            stacklevel=2,
        )
        return existing


def _bytes_for(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, device: torch.device) -> int:
    """State bytes of one parameter: a copy of the optimizer steps with a zero gradient, where only this one has any.

    The copy has no state, and neither have optimizers that it wraps: to copy what exists would take as much memory again.
    """
    own_and_wrapped = [one for one in (optimizer, *vars(optimizer).values()) if isinstance(one, torch.optim.Optimizer)]
    memo: dict[int, Any] = {id(one.state): collections.defaultdict(dict) for one in own_and_wrapped}
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
