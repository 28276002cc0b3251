"""Times from FLOPs, bytes and a device's peak figures (Williams, Waterman and Patterson, "Roofline", 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lightning_remat.capture import OpCall, TensorSpec
from lightning_remat.cost._device_spec import DeviceSpec, device_spec
from lightning_remat.cost._flops import flop_count, touched
from lightning_remat.cost._op_cost import FREE, OpCost


def roofline(calls: Sequence[OpCall | None], spec: DeviceSpec | str) -> list[OpCost]:
    """The least time that each call can take, in seconds: a launch, and the longer of computing and moving its bytes.

    A lower estimate: kernels seldom reach a device's peak. Workspaces are not modelled: 0 bytes each.

    Args:
        calls: what to estimate; ``None`` costs nothing.
        spec: a device's figures, or its name in the table (see `device_specs`).

    Raises:
        ConfigError: for a name that is not in the table.
    """
    figures = device_spec(spec) if isinstance(spec, str) else spec
    return [FREE if call is None else OpCost(_seconds(call, figures), 0) for call in calls]


def _seconds(call: OpCall, spec: DeviceSpec) -> float:
    tensors = touched(call)
    moved = sum(_bytes_moved(tensor) for tensor in tensors)
    dtype = next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), torch.float32)
    return spec.launch_seconds + max(flop_count(call) / spec.flops_of(dtype), moved / spec.bytes_per_second)


def _bytes_moved(spec: TensorSpec) -> int:
    """An expanded tensor is read once, and a slice without the gaps between its rows."""
    return min(spec.nbytes, math.prod(spec.shape) * spec.dtype.itemsize)
