"""The bits of a scheduled step against eager's: every network, tiny, in every precision, at two budgets."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import networks
from benchmarks.determinism import settle
from benchmarks.gpu.markdown import grid
from benchmarks.gpu.part import (
    FAILED,
    INAPPLICABLE,
    INFEASIBLE,
    MISMATCH,
    OK,
    OVER,
    UNREPEATABLE,
    Case,
    Part,
    Result,
    Settings,
    result,
)
from benchmarks.gpu.steps import Left, infeasible, left_by, not_captured, peaks, plan_facts
from lightning_remat import InfeasibleBudgetError, rematerialize

STEPS = 3
BUDGETS: tuple[float | str, ...] = (0.6, "min")
TIME_LIMIT = 5.0
"""Seconds of the planner: these graphs are small, and what it costs is not looked at."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """Types and memory format of a step: of weights and batch, and under autocast, where there is one."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format


PRECISIONS = {
    "float32": Precision(),
    "bfloat16": Precision(torch.bfloat16),
    "float16 autocast": Precision(autocast=torch.float16),
    "bfloat16 autocast": Precision(autocast=torch.bfloat16),
    "channels last": Precision(memory_format=torch.channels_last),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A network and its batch, and how its step runs."""

    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    precision: Precision

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self.batch[0].device

    def step(self, module: nn.Module, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        """One step in Lightning's order, of ``call`` on ``module``; returns the loss."""
        kind = self.precision.autocast
        with torch.autocast(self.device.type, kind) if kind else contextlib.nullcontext():
            loss = call(*self.batch)
        module.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def train(self, module: nn.Module, call: Callable[..., torch.Tensor] | None = None, steps: int = STEPS) -> Left:
        """Seeded steps of SGD with momentum; ``call`` stands for the module's own call."""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            losses.append(self.step(module, call or module))
            optimizer.step()
        return left_by(module, losses)


def training(network: str, precision: Precision, size: str, device: str) -> Training | None:
    """A network in a precision; ``None`` where it has no images to lay out otherwise."""
    workload = networks.build(network, size, device)
    laid_out = precision.memory_format
    images = [one for one in workload.batch if one.dim() == 4]
    if laid_out is not torch.contiguous_format and not images:
        return None
    batch = tuple(one.to(precision.weights) if one.is_floating_point() else one for one in workload.batch)
    return Training(
        workload.module.to(precision.weights).to(memory_format=laid_out),  # type: ignore[call-overload]
        tuple(one.contiguous(memory_format=laid_out) if one.dim() == 4 else one for one in batch),
        precision,
    )


def cases(settings: Settings) -> Sequence[Case]:
    """Every network in every precision at every budget; those of a network share a process."""
    return [
        Case(f"{name}, {precision}, {budget}", name, {"network": name, "precision": precision, "budget": budget})
        for name in settings.networks or networks.networks()
        for precision in PRECISIONS
        for budget in BUDGETS
    ]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Train eagerly, eagerly again, and scheduled, and compare; then measure the scheduled step's peak."""
    made = training(case["network"], PRECISIONS[case["precision"]], "tiny", settings.device)
    if made is None:
        return result(status=INAPPLICABLE)
    undetermined = settle(lambda: made.train(copy.deepcopy(made.module), steps=1))
    right = made.train(copy.deepcopy(made.module))
    repeats = not made.train(copy.deepcopy(made.module)).differences(right)
    module = copy.deepcopy(made.module)
    step = rematerialize(module, budget=case["budget"], **({"time_limit": TIME_LIMIT} | settings.options))
    try:
        found = made.train(module, step)
    except InfeasibleBudgetError as error:
        return result(status=INFEASIBLE, **infeasible(error))
    differences = found.differences(right)
    fields = {
        "nondeterministic": undetermined,
        "eager_repeats": repeats,
        "differing": {kind: [len(names), *names[:3]] for kind, names in differences.items()},
        "largest_difference": found.worst(right),
        **plan_facts(step.plan),
    }
    if reason := not_captured(step):
        return result(FAILED, error=reason, **fields)
    fields |= peaks(lambda: made.step(module, step), module, made.batch, made.device)
    wrong = [MISMATCH] if differences and repeats else []
    wrong += [OVER] if fields["measured_peak_bytes"] > fields["budget_bytes"] else []
    return result(*wrong, status=OK if repeats else UNREPEATABLE, **fields)


def _cell(found: Sequence[Result]) -> str:
    """Both budgets of a network in a precision."""
    return "; ".join(f"{one['case']['budget']}: {_word(one)}" for one in found)


def _word(one: Result) -> str:
    if one["status"] == INAPPLICABLE:
        return "-"
    if one["status"] == OK:
        return "=" if one["rematerializes"] else "= (nothing is recomputed)"
    if one["status"] == MISMATCH and "differing" in one:
        worst = max((size for size in one["largest_difference"].values() if size is not None), default=None)
        return f"**≠** {', '.join(one['differing'])}" + (f" ({worst:.0e})" if worst is not None else "")
    if one["status"] == OVER and "budget_bytes" in one:
        return f"=, **{one['measured_peak_bytes'] - one['budget_bytes']:+,} bytes over budget**"
    return f"**{one['status']}**"


def table(results: Mapping[str, Result]) -> str:
    """Networks by precisions."""
    return grid(results, "network", "precision", "network", _cell)


PART = Part(
    name="bits",
    title="Bits",
    about=f"Losses, gradients, parameters, buffers and random state after {STEPS} steps of SGD against eager's, tiny sizes. "
    "=: all bits are the same.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=180,
    workers=12,
)
