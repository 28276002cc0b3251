"""Rows of a batch that are picked, masked, or sent to experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.wild import Wild, assert_only_a_rest, assert_whole, assert_whole_in_several_ways, model_name


class PicksRows(Wild):
    """Boolean indexing: which rows remain is found before the step, and their number is a size."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        keep = y != 0
        return functional.cross_entropy(self.head(h[keep].sin()), y[keep])


class MasksRows(Wild):
    """Boolean assignment, and hard examples: all shapes are known."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x).clone()
        h[y == 0] = 0.5
        h[:, 0] += 1
        losses = functional.cross_entropy(self.head(h.masked_fill_(h > 2, 0.0)), y, reduction="none")
        mean = (losses * (y != 1)).sum() / (y != 1).sum()
        return mean + losses.topk(16).values.mean() + losses.sort().values[-8:].mean()


class Experts(Wild):
    """Top-2 of four experts; all rows go through all of them, with weights that are mostly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = (self.gate(x) + 0.01 * torch.randn(len(x), 4)).softmax(1)
        weights, chosen = scores.topk(2, dim=1)
        return scores, weights / weights.sum(1, keepdim=True), chosen

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        return sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = self.net(x)
        scores, weights, chosen = self.routed(x)
        balance = 4 * (functional.one_hot(chosen[:, 0], 4).float().mean(0) * scores.mean(0)).sum()
        return functional.cross_entropy(self.head(x + self.mixed(x, weights, chosen)), y) + 0.01 * balance


class ExpertsOfSomeRows(Experts):
    """Each expert sees its rows only: how many, the data say."""

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            mixed.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return mixed


WHOLE = [MasksRows, Experts]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(PicksRows, 2, {})]  # one for each number of rows


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)


A_REST = [ExpertsOfSomeRows]


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)
