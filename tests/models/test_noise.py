"""Random numbers of all generators: Python's, NumPy's, torch's and the module's own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.wild import Wild, assert_in_parts, assert_only_a_rest, assert_whole, model_name


class Seeded(Wild):
    """Python's and NumPy's generators are part of the result."""

    def on_train_start(self) -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002

    def on_train_end(self) -> None:
        self.seen += [random.random(), float(np.random.rand())]  # noqa: NPY002


class LayerDropByPython(Seeded):
    """Drawn in the middle, once a step."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        if self.training and random.random() < 0.5:
            h = self.net(h.tanh())
        return h.sin()


class LayerDropInALoop(Seeded):
    """Drawn for each layer: a loop that cannot be left and entered again."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            if not isinstance(layer, nn.GELU) or random.random() < 0.5:
                x = layer(x)
        return x


class LayerDropByTorch(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        if torch.rand(1).item() < 0.5:
            h = self.net(h.tanh())
        return h.sin()


class EveryNoise(Wild):
    """Noise of all kinds, and stochastic depth by a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.ModuleList([nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.RReLU()])
        self.channels = nn.Dropout1d(0.2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.net(x) * (torch.rand(len(x), 1) < 0.8) / 0.8
        for noise in self.noise:
            x = noise(x.tanh())
        x = self.channels(x.view(16, 4, 16)).reshape(-1, 16)
        x = x + torch.normal(0.0, 1.0, x.shape) * 0.01 + torch.empty_like(x).uniform_(-0.01, 0.01)
        return self.net(functional.gumbel_softmax(x, tau=0.7, hard=True))


class OwnGenerator(Wild):
    """Numbers from a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(11)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        noise = torch.randn(x.shape, generator=self.numbers).exp().sin()
        return (x * noise).tanh()

    def on_train_end(self) -> None:
        self.seen.append(self.numbers.get_state())


WHOLE = [EveryNoise]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_PARTS = [LayerDropByPython, LayerDropByTorch, OwnGenerator]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)


A_REST = [LayerDropInALoop]


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)
