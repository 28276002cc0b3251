"""What the parts have in common: whether bits are the same, what a plan says, and what a step really holds."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_remat import InfeasibleBudgetError, Plan, Rematerialized
from lightning_remat.measure import held_bytes, track_peak

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type for each size of an element."""

Named = Mapping[str, torch.Tensor]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits: not-a-numbers are equal, and zeros of two signs are not."""
    if one.dtype != other.dtype or one.shape != other.shape or one.is_complex():
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    kind = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def differing(found: Named, right: Named) -> list[str]:
    """Names of the tensors that only one has, or that differ in a bit."""
    both = [name for name in right if name in found]
    only = sorted(found.keys() ^ right.keys())
    return only + [name for name in both if not same_bits(found[name], right[name])]


def largest_difference(found: Named, right: Named, names: Iterable[str]) -> float:
    """Of these tensors the largest max|difference| / max|right|; infinite where one is missing or is not a number."""
    errors = [0.0]
    for name in names:
        if name not in found or name not in right or found[name].shape != right[name].shape:
            return math.inf
        size = right[name].double().abs().max().item()
        error = (found[name].double() - right[name].double()).abs().max().item()
        errors.append(math.inf if math.isnan(error) else error / size if size else (math.inf if error else 0.0))
    return max(errors)


@dataclasses.dataclass(frozen=True)
class Left:
    """What seeded training left: tensors by name, on the CPU."""

    losses: Named
    gradients: Named
    parameters: Named
    buffers: Named
    random_state: Named

    def differences(self, right: Left) -> dict[str, list[str]]:
        """Names of the tensors that are not ``right``'s bit for bit, by kind; kinds without any are left out."""
        kinds = [field.name for field in dataclasses.fields(self)]
        found = {kind: differing(getattr(self, kind), getattr(right, kind)) for kind in kinds}
        return {kind: names for kind, names in found.items() if names}

    def worst(self, right: Left) -> dict[str, float]:
        """The largest relative difference of each kind that differs."""
        return {
            kind: largest_difference(getattr(self, kind), getattr(right, kind), names)
            for kind, names in self.differences(right).items()
        }


def left_by(module: nn.Module, losses: Sequence[torch.Tensor]) -> Left:
    """What training left of a module (of what is distributed, this process's part), and the random state."""
    parameters = dict(module.named_parameters())
    random_state = {"cpu": torch.get_rng_state()}
    if any(one.is_cuda for one in parameters.values()):
        random_state["cuda"] = torch.cuda.get_rng_state()
    return Left(
        losses={str(number): one.detach().cpu() for number, one in enumerate(losses)},
        gradients={name: local(one.grad).cpu().clone() for name, one in parameters.items() if one.grad is not None},
        parameters={name: local(one.detach()).cpu().clone() for name, one in parameters.items()},
        buffers={name: local(one).cpu().clone() for name, one in module.named_buffers()},
        random_state=random_state,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plan_facts(plan: Plan | None) -> dict[str, Any]:
    """What a plan promises: plain data."""
    if plan is None:
        return {}
    return {
        "solver": plan.solver,
        "plan_status": plan.status.value,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_allocated_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes or None,
        "arrangement": plan.footprint.arrangement.value if plan.footprint is not None else None,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "rematerializes": plan.rematerializes,
        "planning_seconds": plan.cost_seconds + plan.solve_seconds,
    }


def not_captured(step: Rematerialized) -> str:
    """Why a step that ran shows nothing of this project; "" where all of it was captured as one graph."""
    if step.failures or step.plan is None:
        return f"not captured: {'; '.join(step.failures) or 'no plan was made'}"
    return "" if len(step.plans) == 1 else f"captured as {len(step.plans)} graphs"


def infeasible(error: InfeasibleBudgetError) -> dict[str, Any]:
    """What such an error says: plain data."""
    return {"budget_bytes": error.budget_bytes, "smallest_bytes": error.smallest_bytes, "set_by": error.op}


def peaks(
    step: Callable[[], object], module: nn.Module, batch: Sequence[torch.Tensor], device: torch.device
) -> dict[str, int | None]:
    """What one training step holds, measured: bytes.

    Returns:
        ``measured_peak_bytes``: what a plan predicts. On the CPU parameters, buffers, gradients and batch, and what the
        allocator held beyond them; on CUDA all that is allocated (cuBLAS's workspaces, say), and beside it
        ``reserved_peak_bytes``, from an empty cache.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held = held_bytes(module, batch, gradients=True, device=device.type)
    with track_peak(device) as peak:
        step()
    assert peak.peak_bytes is not None, peak.reason
    found = {"measured_peak_bytes": held + peak.peak_bytes}
    if device.type == "cuda":
        found |= {"measured_peak_bytes": peak.allocated_bytes, "reserved_peak_bytes": peak.reserved_bytes}
    return found


def cleared(device: torch.device) -> int:
    """Give up what nothing holds, and what is cached on the device; returns the bytes that are allocated there then.

    0 on the CPU.
    """
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def in_turns(
    steps: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, untimed: int
) -> dict[str, list[float]]:
    """Seconds of each step in each of so many rounds, in which they take turns, after some that are not timed."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(untimed + rounds):
        for name, step in steps.items():
            _wait(device)
            began = time.perf_counter()
            step()
            _wait(device)
            if number >= untimed:
                found[name].append(time.perf_counter() - began)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
