"""Cost models by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from lightning_remat.capture import OpCall
from lightning_remat.cost._cache import CostCache
from lightning_remat.cost._device_spec import device_spec, device_specs
from lightning_remat.cost._flops import flops
from lightning_remat.cost._op_cost import OpCost
from lightning_remat.cost._profile import Progress, profile
from lightning_remat.cost._roofline import roofline
from lightning_remat.cost._unit import unit
from lightning_remat.errors import ConfigError

CostModel: TypeAlias = Callable[[Sequence[OpCall | None], torch.device], list[OpCost]]
"""From the calls of a step, ``None`` for what costs nothing, and the device it runs on, to one cost a call."""


def cost_model(
    name: str, *, cache: CostCache | None = None, progress: Progress | None = None, quick: bool = False
) -> CostModel:
    """The cost model of this name.

    Args:
        name: ``"profile"`` (measured on the device, in seconds), ``"roofline"`` (estimated for the device, in seconds),
            ``"roofline:<device>"`` (estimated for a device of the table, such as ``"roofline:A100-80"``), ``"flops"``
            (FLOPs in place of seconds) or ``"unit"`` (1 an op).
        cache: for ``"profile"``: where measured costs are kept.
        progress: for ``"profile"``: told how many ops are timed, and how many there are to time.
        quick: for ``"profile"``: see `profile`.

    Returns:
        The model: given the calls of a step and a device, it returns one `OpCost` a call.

    Raises:
        ConfigError: for another name, or a device that the table does not have. (The model of ``"roofline"`` raises it
            for a device without figures, and that of ``"profile"`` for one that is neither ``cpu`` nor ``cuda``.)

    Example:
        >>> cost_model("unit")([None], torch.device("cpu"))
        [OpCost(seconds=0.0, workspace_bytes=0, real_bytes=(), real_strides=())]
    """
    kind, separator, device_name = name.partition(":")
    if kind == "roofline" and separator:
        spec = device_spec(device_name)
        return lambda calls, _device: roofline(calls, spec)
    models: dict[str, CostModel] = {
        "profile": lambda calls, device: profile(calls, device, cache=cache, progress=progress, quick=quick),
        "roofline": lambda calls, device: roofline(calls, device_spec(device)),
        "flops": lambda calls, _device: flops(calls),
        "unit": lambda calls, _device: unit(calls),
    }
    if name not in models:
        raise ConfigError(
            f"unknown cost model {name!r}: give one of {', '.join(models)} or roofline:<device>, where "
            f"<device> is one of {', '.join(device_specs())}"
        )
    return models[name]
