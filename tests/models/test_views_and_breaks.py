"""Tensors that share memory, and graph breaks made by hand: what goes from one part of a step to the next, and out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.wild import Wild, assert_in_parts, assert_whole, model_name


class ReturnsViews(Wild):
    """More than the loss, of which some share memory; nothing of the second head is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.head(self.features(x))
        other = self.other(x)
        views = {
            "flat": logits.view(-1),
            "first": logits[0],
            "halves": (other[:, :4], other[:, 4:]),
            "weight": self.head.weight.t(),
        }
        return {"loss": functional.cross_entropy(logits, y), "logits": logits, **views}


class ViewsOverABreak(Wild):
    """Tensors that share memory, and one that is handed on, go from one part to the next."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        left, right = h[:, :8], h[:, 8:]
        torch._dynamo.graph_break()
        logits = self.head(torch.cat((right, left), 1))
        first = h[0]
        torch._dynamo.graph_break()
        return functional.cross_entropy(logits, y) + first.square().mean() + h.mean()


class WeightsOnBothSides(Wild):
    """Used twice before a graph break, and once after it."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(self.net(x).tanh())
        torch._dynamo.graph_break()
        return self.net(x.tanh())


class ResidualAroundABreak(Wild):
    """An activation is used twice in one graph, and once more in a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x).tanh()
        torch._dynamo.graph_break()
        mixed = self.query(h).tanh() * self.key(h).sin()
        torch._dynamo.graph_break()
        return mixed + h


class TransposedOverABreak(Wild):
    """What goes over the break lies transposed in memory; its gradient does not."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x).t()
        torch._dynamo.graph_break()
        return h.contiguous().sin().t()


WHOLE = [ReturnsViews]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_PARTS = [ViewsOverABreak, WeightsOnBothSides, ResidualAroundABreak, TransposedOverABreak]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)
