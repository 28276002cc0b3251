"""Training on several devices: one plan in all processes, within the smallest budget of any, gradient buckets counted."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_remat.budget import BudgetKind, device_bytes, parse_budget
from lightning_remat.measure import held_bytes
from lightning_remat.planner import RematConfig
from lightning_remat.runtime import Agreement


def agreement(trainer: pl.Trainer) -> Agreement | None:
    """How the processes of this fit agree on plans; ``None`` where there is only one process."""
    if trainer.world_size == 1:
        return None
    return Agreement(trainer.strategy.broadcast(uuid.uuid4().hex), processes=trainer.world_size)


def agreed_config(trainer: pl.Trainer, module: pl.LightningModule, config: RematConfig) -> RematConfig:
    """Options that are the same in all processes: ``"auto"`` becomes the smallest budget of any device, in bytes."""
    if trainer.world_size == 1:
        return config
    if parse_budget(config.budget).kind is not BudgetKind.AUTO:
        return config
    return dataclasses.replace(config, budget=smallest_of_all(trainer, available_bytes(trainer, module, config.margin)))


def available_bytes(trainer: pl.Trainer, module: pl.LightningModule, margin: float) -> int:
    """What ``budget="auto"`` is in this process, in bytes."""
    strategy = trainer.strategy
    local: int = getattr(strategy, "num_processes", 1)
    return device_bytes(strategy.root_device, margin, held_on_device(trainer, module), processes=local)


def smallest_of_all(trainer: pl.Trainer, number: int) -> int:
    """The smallest of the numbers that the processes give."""
    if trainer.world_size == 1:
        return number
    value = torch.tensor(number, dtype=torch.int64, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(value, reduce_op="min"))


def held_on_device(trainer: pl.Trainer, module: pl.LightningModule, *beside: Any) -> int:
    """Bytes on the device of the module, its gradients, DDP's buckets, the optimizers' state, and ``beside``."""
    device, gradients = trainer.strategy.root_device, own_gradients(trainer, module.parameters())
    return held_bytes(module, trainer.optimizers, *beside, gradients, device=device) + bucket_bytes(trainer)


def own_gradients(trainer: pl.Trainer, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that some parameters have, less those that lie in DDP's buckets."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [one for one in gradients if not one._is_view()] if gradients_in_buckets(trainer) else gradients


def bucket_bytes(trainer: pl.Trainer) -> int:
    """Bytes of the buckets in which DDP reduces gradients: they are there all the time; 0 without DDP."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return 0
    return held_bytes([p for p in model.parameters() if p.requires_grad], device=trainer.strategy.root_device)


def steps_before_buckets(trainer: pl.Trainer) -> int:
    """Optimizer steps after which DDP makes its buckets anew, once it knows in which order gradients arrive; 0 without DDP.

    With a static graph it looks at the second step, since all gradients of the first are reduced at its end.
    """
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return 0
    return 2 if model.static_graph else 1


def gradients_in_buckets(trainer: pl.Trainer) -> bool:
    """Whether gradients are views of DDP's buckets (``gradient_as_bucket_view=True``), without memory of their own.

    Those that are accumulated before they are reduced are none until then.
    """
    model = trainer.strategy.model
    return isinstance(model, DistributedDataParallel) and bool(model.gradient_as_bucket_view)


def reduces_gradients(model: Any) -> bool:
    """Whether DDP reduces the gradients of the step that runs now."""
    return isinstance(model, DistributedDataParallel) and bool(model.require_backward_grad_sync)


def unsynchronized(model: Any) -> contextlib.AbstractContextManager[None]:
    """While open, DDP does not reduce gradients, and no process waits for another."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
