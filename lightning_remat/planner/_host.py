"""The host's memory that a graph is planned with: how fast copies are there, and how many bytes may lie there."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings

import torch

from lightning_remat.budget import host_bytes
from lightning_remat.cost import CostCache, copy_speeds
from lightning_remat.errors import RematError, RematWarning
from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.planner._config import RematConfig

log = logging.getLogger(__name__)


def found_host(device: torch.device, config: RematConfig, cache: CostCache, processes: int = 1) -> Host | None:
    """The host's memory for steps on a device; ``None``, with a warning, where none can be had.

    Args:
        device: where steps run.
        config: says how many bytes may lie there.
        cache: of measured costs.
        processes: that train together; how many of them share this machine, their launcher may say.
    """
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or processes)
        return dataclasses.replace(copy_speeds(device, cache), bytes=host_bytes(config.host_budget, local))
    except (RuntimeError, RematError) as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"offload='host' has no effect: the host's memory cannot be used for copies of tensors ({reason})",
            RematWarning,
            stacklevel=2,
        )
        return None


def with_host(graph: ComputationGraph, host: Host | None) -> ComputationGraph:
    """The graph with that memory, of which it can use no more than its own tensors have bytes."""
    if host is None:
        return graph
    return graph.replace(host=dataclasses.replace(host, bytes=min(host.bytes, sum(graph.storages))))


def why_not(*, symbolic: bool, whole: bool, sharded: bool) -> str:
    """Why a graph's tensors stay on the device although they might be copied; "" where they may be.

    Args:
        symbolic: whether its sizes vary.
        whole: whether it is the only graph of a call.
        sharded: whether parameters are shards.
    """
    if sharded:
        return "its parameters are shards"
    if not whole:
        return "it is captured as several graphs"
    return "its sizes vary" if symbolic else ""
