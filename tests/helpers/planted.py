"""What tests of the check plant in a step, so that it has other bits than eager mode or raises, and its end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_remat.capture._nodes import module_path
from lightning_remat.capture._torch import in_backward
from lightning_remat.runtime import _backend, _graph

TANH_BACKWARD = (torch.ops.aten.tanh_backward.default, torch.ops.aten.tanh_backward.grad_input)
LEFT: list[None] = []
"""How often a step is still to raise: outside of what is put back."""


def wrong_tanh_backward(gradient: torch.Tensor, output: torch.Tensor, **over: torch.Tensor) -> torch.Tensor:
    wrong = TANH_BACKWARD[0](gradient, output) * (1 + 2**-20)
    return over["grad_input"].copy_(wrong) if over else wrong


def planting(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What is lowered for one module's tanh has a wrong gradient."""
    lower = _backend.lower

    def lowered(*args, **kwargs):
        modules = lower(*args, **kwargs)
        for node in modules.backward.graph.nodes:
            if node.target in TANH_BACKWARD and module_path(node) == module:
                node.target = wrong_tanh_backward
        return modules

    for place in (_backend, _graph):
        monkeypatch.setattr(place, "lower", lowered)


# A kernel of its own that has other bits while `Planted.drift` says so, on the same input.


class Planted:
    drift = 0.0
    per_call = 0.0
    in_backward = False


@torch.library.custom_op("lightning_remat_tests::planted", mutates_args=())
def planted(x: torch.Tensor) -> torch.Tensor:
    if in_backward() or not Planted.in_backward:
        Planted.drift += Planted.per_call
    return x * (2 + Planted.drift if in_backward() or not Planted.in_backward else 2)


@planted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


planted.register_autograd(lambda ctx, gradient: planted(gradient))


@pytest.fixture(autouse=True)
def steady() -> Iterator[None]:
    yield
    Planted.drift = Planted.per_call = 0.0
    Planted.in_backward = False
    LEFT.clear()
