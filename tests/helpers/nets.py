"""A module whose forward each test gives, and a few steps of it to compare: without `rematerialize`, and with it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat._rematerialize import Rematerialized


class Net(nn.Module):
    """Two linear layers, `first` (8 to 32) and `last` (32 to 4), and whatever else; ``forward`` is given."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def plain(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.last(functional.dropout(self.first(x).tanh().sin(), 0.15)).square().mean()


def net(forward: Callable[..., Any] = plain, **parts: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(forward, **parts)


def inputs(rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        output = output["loss"]
    elif dataclasses.is_dataclass(output):
        output = output.loss
    elif isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, torch.Tensor)
    return output


def train(
    module: nn.Module, step: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> dict[str, Any]:
    """Losses, gradients, the state and the random state of a few SGD steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    found: dict[str, Any] = {}
    for number, (args, kwargs) in enumerate(calls):
        loss = loss_of(step(*args, **kwargs))
        optimizer.zero_grad()
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for name, parameter in module.named_parameters():
            found[f"gradient {number} of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
    found["random state"] = torch.get_rng_state()
    return found | {f"state {name}": value.clone() for name, value in module.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse or other.is_sparse:
        return bool(one.is_sparse and other.is_sparse) and torch.equal(one.to_dense(), other.to_dense())
    return one.dtype == other.dtype and torch.equal(one, other)


def check(
    module: nn.Module, *args: Any, steps: int = 2, budget: Any = "min", kwargs: dict[str, Any] | None = None
) -> Rematerialized:
    """Train with and without; the results must be the same. Returns the rematerialized step for further questions."""
    other = copy.deepcopy(module)
    right = train(module, module, [copy.deepcopy((args, kwargs or {}))] * steps)
    step = rematerialize(other, budget=budget, cost_model="unit", time_limit=0.5)
    got = train(other, step, [copy.deepcopy((args, kwargs or {}))] * steps)
    assert right.keys() == got.keys(), right.keys() ^ got.keys()
    different = [name for name, value in right.items() if not same(value, got[name])]
    assert not different, different
    return step


def captured_whole(step: Rematerialized, steps: int = 2) -> bool:
    return step.runs == (steps,) and not step.failures
