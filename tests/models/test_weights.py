"""Weights that are used twice, computed of others, normed, pruned, or frozen for a while."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from tests.models.wild import Wild, assert_whole, assert_whole_in_several_ways, model_name


class TiedAutoencoder(Wild):
    """The decoder is the encoder transposed."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        code = self.net(x)
        for layer in reversed([part for part in self.net if isinstance(part, nn.Linear)]):
            code = functional.linear(code.tanh(), layer.weight.t())
        return functional.mse_loss(code, x)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


class Parametrized(Wild):
    """Parametrizations of torch's own and of one's own; one weight is used twice and computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = parametrizations.weight_norm(self.net[0])
        self.net[2] = parametrizations.spectral_norm(self.net[2])
        self.middle = nn.Linear(16, 16)
        parametrize.register_parametrization(self.middle, "weight", Symmetric())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.middle(self.middle(self.net(x)).tanh())


class NormedByHooks(Wild):
    """The older weight norm and spectral norm, and pruning: hooks that run before the layer."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still much used
            self.net[0] = nn.utils.weight_norm(self.net[0])
            self.net[2] = nn.utils.spectral_norm(self.net[2])
        prune.l1_unstructured(self.head, "weight", 0.5)


class Thawed(Wild):
    """The body is frozen for an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch > 0)


WHOLE = [TiedAutoencoder, Parametrized, NormedByHooks]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(Thawed, 2, {"max_epochs": 2})]


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)
