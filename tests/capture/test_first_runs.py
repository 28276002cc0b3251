"""In the first run of a captured step AOTAutograd looks at each op where one is an operator of others, and at none else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd import runtime_wrappers

from lightning_remat import rematerialize


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.first_runs.twice(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


@pytest.mark.parametrize("others", [False, True])
def test_operators_of_others_are_looked_at(others, monkeypatch):
    seen: list[Any] = []
    mode = runtime_wrappers._AnalyzeCustomOpInputOutputMode
    own = mode.__torch_dispatch__
    monkeypatch.setattr(
        mode, "__torch_dispatch__", lambda self, func, *args: seen.append(func) or own(self, func, *args)
    )
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = layer(x).relu()
        return (Twice.apply(hidden) if others else hidden * 2).sum()  # type: ignore[no-untyped-call]

    with torch.library._scoped_library("first_runs", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        call = rematerialize(step, "100%")
        for number in range(3):
            seen.clear()
            found = call(x)
            assert bool(seen) is (others and number == 0)
            found.backward()
            assert torch.equal(found, step(x))
