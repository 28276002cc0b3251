"""What an architecture is, a module with its loss inside, and the losses that several libraries' models have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and on what.

    Attributes:
        module: called with ``**batch`` it returns the scalar loss.
        batch: the inputs by name.
    """

    module: nn.Module
    batch: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One to be built: its library (a distribution's name), its own name, and what makes it."""

    library: str
    name: str
    build: Callable[[], Training]


class WithLoss(nn.Module):
    """A model, and the loss of what it returns: its own where it has one, or ``loss(output, **targets)``."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, targets: Mapping[str, Any] | None = None, **inputs: Any) -> torch.Tensor:
        output = self.model(**inputs)
        loss: torch.Tensor = output.loss if self.loss is None else self.loss(output, **(targets or {}))
        return loss


class OfPositions(nn.Module):
    """A model whose forward takes its inputs by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(*inputs.values())


def cross_entropy(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Of networks that return a number a class."""
    return functional.cross_entropy(output, classes)
