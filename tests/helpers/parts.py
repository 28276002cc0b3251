"""A step in three parts that each use the same tensors in several ways."""

from __future__ import annotations

import torch
from torch import nn

USES = {
    "linear": lambda part, h, x: part.linear(h),
    "again": lambda part, h, x: part.linear(h.tanh()) + part.other(h),
    "residual": lambda part, h, x: h + part.drop(part.other(h).relu()),
    "scaled": lambda part, h, x: h * part.scale + x * part.scale,
    "shifted": lambda part, h, x: (h + x).sin() * (h + x).cos(),
    "two_sums": lambda part, h, x: (h + 1).tanh() * (x + h).exp().sigmoid() * (1 + x).cos(),
    "product": lambda part, h, x: h * x + x.tanh(),
    "gated": lambda part, h, x: (x > 0) * h + x.detach() * x,
    "viewed": lambda part, h, x: h.view(-1, 4).softmax(-1).view_as(h) + x.view(-1, 2).tanh().view_as(x),
}


class Parts(nn.Module):
    """Each part of the step does several things with what comes in, with what an earlier one got, and with the weights."""

    def __init__(self, parts: list[list[str]]) -> None:
        super().__init__()
        self.linear, self.other, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).sin()
        first, second, third = self.parts
        torch._dynamo.graph_break()
        h = self.part(first, x, x)
        torch._dynamo.graph_break()
        h = self.part(second, h, x)
        torch._dynamo.graph_break()
        return (self.part(third, h, x) * x).square().mean()

    def part(self, uses: list[str], h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for use in uses:
            h = USES[use](self, h, x)
        return h
