"""The memory of a network of which each process holds a shard (``fully_shard``, FSDP2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from lightning_remat.capture import _torch as internals
from lightning_remat.measure import held_bytes
from lightning_remat.planner._surroundings import Surroundings

PASSING = 2
"""Units of which the parameters or gradients pass through memory beside those of the unit at work: one is gathered for the next
unit while the gradients of the last one are reduced."""


def with_shards(around: Surroundings, modules: Sequence[nn.Module], device: torch.device | None) -> Surroundings:
    """What is held beside a graph of a sharded network; the same as ``around`` where nothing of the network is sharded.

    A unit's hooks gather its parameters before its forward and its backward, so that its graph has them whole, and let them go
    again; its gradients are reduced to shards when its backward is done. Whole parameters that are there when this is asked
    (those of the graph itself, and of the units around it) count in ``module_bytes``; shards, and gradients as shards, in
    ``module_bytes`` and ``resident_bytes``. What passes through memory at any time is estimated here, and measured later
    (see `runtime.Measuring`).

    Args:
        around: what is held beside the same network, if it were not sharded.
        modules: the network.
        device: the device that the graph runs on.
    """
    shards = internals.shards_of(modules)
    if not shards:
        return around
    parameters = [shard.parameter for shard in shards]
    managed = {id(part) for shard in shards for part in (shard.parameter, shard.whole)}
    others = [p for module in modules for p in module.parameters() if id(p) not in managed]
    trained = [p for p in (*parameters, *others) if p.requires_grad]
    everything = (*modules, parameters)
    by_unit: dict[int, int] = {}
    for shard in shards:
        by_unit[shard.unit] = by_unit.get(shard.unit, 0) + shard.whole_bytes
    return dataclasses.replace(
        around,
        module_bytes=held_bytes(*everything, device=device),
        trainable_bytes=0,
        resident_bytes=around.resident_bytes
        + held_bytes(trained, device=device)
        + PASSING * max(by_unit.values(), default=0),
        old_gradients=False,
        accumulating=False,
        held_bytes=around.held_bytes
        + held_bytes(*everything, gradients=True, device=device)
        - held_bytes(*modules, gradients=True, device=device),
        sharded=True,
    )
