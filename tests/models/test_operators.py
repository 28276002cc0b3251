"""Operators that few models have: custom ones, Fourier transforms with complex weights, and linear algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.wild import Wild, assert_not_captured, assert_whole, model_name


@torch.library.custom_op("wild::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class CustomOp(Wild):
    """An operator of torch.library, with a backward."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return cube(cube(self.net(x).tanh()).sin())


@torch.library.custom_op("wild::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) + 0.5


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class RandomCustomOp(Wild):
    """An operator that draws random numbers, and has no tag that says so."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
            x = x * noise(x.detach()) * noise(x.detach())
        return x


@torch.library.custom_op("wild::count_", mutates_args=("counter",))
def count_(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter += 1
    return x.clone()


@count_.register_fake
def _(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class MutatingCustomOp(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(()))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        return x + count_(x.detach(), self.counter)


class Fourier(Wild):
    """FNet's mixing, FNO's products of low frequencies with complex weights, and a complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat) / 8)
        self.middle = nn.Linear(16, 16, dtype=torch.cfloat)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(16, 4, 16)
        x = self.net(functional.layer_norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real, (16,)))
        spectrum = torch.fft.rfft(x)
        product = torch.zeros_like(spectrum)
        product[:, :, :5] = torch.einsum("bix,iox->box", spectrum[:, :, :5], self.weight)
        z = self.middle(torch.complex(torch.fft.irfft(product, n=16), x))
        return torch.polar(z.abs().tanh(), z.angle()).real.reshape(-1, 16)


class LinearAlgebra(Wild):
    """Whitening: a Cholesky factor, a solve, a determinant."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        covariance = h.t() @ h / len(h) + torch.eye(16)
        factor = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(factor, h.t(), upper=False).t()
        return functional.cross_entropy(self.head(white), y) - 0.01 * torch.logdet(covariance)


class Products(Wild):
    """Products over a dimension, with zeros among some of their factors, and over all."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = 1 + self.net(x).tanh() / 4
        shares = x.view(-1, 4, 4).prod(1, dtype=torch.float64).float().tile(4)
        some, one, several = (x * (torch.arange(x.numel()).view_as(x) >= n) for n in (80, 1, 2))
        return x * x.prod(1, keepdim=True) + shares * (x.prod() + one.prod() + several.prod()) + some.prod(0)


class TransposedProducts(Wild):
    """Products of factors that lie transposed."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = 1 + self.net(x).tanh() / 4
        return x * x.t().prod(0)[:, None]


WHOLE = [CustomOp, RandomCustomOp, MutatingCustomOp, Fourier, LinearAlgebra, Products]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


def test_gradients_whose_way_cannot_be_told() -> None:
    assert_not_captured(TransposedProducts, "in which way eager mode computes the gradient of prod")
