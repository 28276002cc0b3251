"""A module that keeps everything that a module can keep, and changes all of it."""

from __future__ import annotations

import collections
import random

import numpy as np
import torch
from torch import nn


class Meter:
    def __init__(self) -> None:
        self.total, self.history = 0.0, [1.0]


class Stateful(nn.Module):
    """Keeps everything that a module can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.zeros(4))
        self.count, self.name, self.nothing = 0, "first", None
        self.items, self.table, self.names, self.recent = [1, [2]], {"a": {"b": 1}}, {"x"}, collections.deque([1], 2)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.meter, self.array, self.plain = Meter(), np.zeros(3), torch.zeros(3)
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()

    def disturb(self) -> None:
        self.count, self.name, self.nothing, self.new = 1, "second", 1, 2
        self.items.append(3)
        self.items[1].append(4)
        self.table["a"]["b"] = 2
        self.names.add("y")
        self.recent.append(2)
        self.recent.append(3)
        self.ordered.move_to_end("a")
        self.meter.total = 1.0
        self.meter.history.append(2.0)
        self.array += 1
        self.plain += 1
        self.queue = self.queue + 1  # another tensor in its place
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.norm.running_mean.add_(1)
        self.linear.bias.requires_grad_(False)
        self.linear.train(False)

    def look(self) -> list[object]:
        own = [self.count, self.name, self.nothing, hasattr(self, "new"), self.items, self.table, self.names]
        own += [list(self.recent), list(self.ordered), self.meter.total, self.meter.history, self.array.tolist()]
        of_torch, of_numpy, of_python = self.generators
        drawn = [torch.rand(1, generator=of_torch).item(), of_numpy.random(), of_python.random()]
        drawn += [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
        flags = [self.linear.bias.requires_grad, self.linear.training, self.linear.weight.grad is None]
        return [*own, drawn, flags, self.plain.clone(), {name: one.clone() for name, one in self.state_dict().items()}]
