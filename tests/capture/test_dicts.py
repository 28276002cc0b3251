"""Dicts that the step takes items of, and that others put items in: it takes no more out of them than eager mode does."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep


class Keeping(nn.Module):
    """It takes an item out of a dict that another keeps items in as well, as an optimizer around another one does."""

    def __init__(self, take: Callable[[Any], Any], kind: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.take, self.kept = nn.Linear(8, 8), take, kind()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return (hidden * self.take(self.kept)).sum()


def moved(kept: Any) -> Any:
    kept.move_to_end("scale")
    return kept["scale"]


def where_it_is(kept: Any) -> Any:
    return kept.pop("scale") if "scale" in kept else 1.0


def in_parts(kept: Any) -> Any:
    found = kept["scale"]
    del kept["scale"]
    return found


def written(kept: Any) -> Any:
    found = kept.pop("scale")
    kept["last"] = found
    return found


def steps(module: Keeping, call: Callable[[Tensor], Tensor]) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for number in range(4):
        module.kept["scale"] = torch.full((), 1.0 + number)
        module.zero_grad()
        loss = call(torch.randn(4, 8))
        loss.backward()
        module.kept["others"] = module.kept.get("others", 0) + 1
        found += [loss.detach().clone(), module.first.weight.grad, list(module.kept), module.kept["others"]]
    return found


TAKEN = (lambda kept: kept.pop("scale"), lambda kept: kept.popitem()[1], where_it_is, in_parts, written)
KINDS = (dict, collections.OrderedDict, lambda: collections.defaultdict(int))


@pytest.mark.parametrize(("take", "kind"), [*itertools.product(TAKEN, KINDS), (moved, collections.OrderedDict)])
def test_what_others_keep_stays(take: Callable[[Any], Any], kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = Keeping(take, kind)
    plain = steps(module, module)
    module.kept.clear()
    step = ScheduledStep(module, RematConfig(budget=1.0, solver="greedy", cost_model="unit"))
    scheduled = steps(module, step)
    for one, other in zip(plain, scheduled, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert step.failures == []
    assert sum(step.runs) == 4
