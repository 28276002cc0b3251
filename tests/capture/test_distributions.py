"""A divergence that is asked for the first time leaves a step in one graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributions, nn
from torch.distributions import kl
from torch.nn import functional

from lightning_remat import rematerialize


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(32, 16), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        code = distributions.Independent(distributions.Normal(mean, functional.softplus(spread)), 1)
        prior = distributions.Independent(distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        divergence = distributions.kl_divergence(code, prior).mean()
        return functional.mse_loss(self.decoder(code.rsample()), x) + divergence


def test_the_first_divergence() -> None:
    torch.manual_seed(0)
    eager = Autoencoder()
    other = copy.deepcopy(eager)
    before = dict(kl._KL_MEMOIZE)
    kl._KL_MEMOIZE.clear()
    try:
        step: Any = rematerialize(other, "min", cost_model="unit", solver="greedy", time_limit=0.05)
        for seed in range(3):
            for module, run in ((other, step), (eager, eager)):
                torch.manual_seed(seed)
                module.zero_grad()
                run(torch.randn(64, 32)).backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
        assert list(step.runs) == [3] and not step.failures
    finally:
        kl._KL_MEMOIZE.update(before)
