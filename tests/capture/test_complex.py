"""Complex numbers on the CPU: products over memory that they read are rounded otherwise, so none is put there or taken away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import RematWarning, rematerialize
from lightning_remat.capture.rewritings import _products

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NEW: dict[str, Call] = {
    "diagonal": lambda z, _: torch.diag(z[0]),
    "log": lambda z, _: z.log(),
    "product": lambda z, w: z * w[..., 0] * z,
    "quotient": lambda z, w: (z / w[..., 0]) / z,
    "cumprod": lambda z, _: z.cumprod(0),
    "tanh": lambda z, w: z.tanh() * w[..., 0].sigmoid(),
    "addcmul": lambda z, w: torch.addcmul(z, z, w[..., 0], value=0.3),
    "spectrum": lambda z, _: torch.fft.hfft(z, 10, 1, "ortho"),
}
IN_PLACE: dict[str, Call] = {
    "product": lambda z, w: (z + 1).mul_(w[..., 0]),
    "broadcast": lambda z, w: (z + 1).mul_(w[:1, :, 0].contiguous()),
    "part": lambda z, w: (z + 1)[:, 2:].mul_(w[:, 2:, 0].contiguous()),
    "quotient": lambda z, w: (z + 1).div_(w[..., 0].contiguous()),
    "scaled sum": lambda z, w: (z + 1).add_(w[..., 0], alpha=0.3 + 0.2j),
}
ALIKE: dict[str, Call] = {
    "sum": lambda z, w: (z + 1)[1:].add_(w[1:, :, 0]),
    "in vectors": lambda z, w: (z + 1).mul_(w[..., 0].contiguous()),
    "real numbers": lambda z, w: torch.view_as_real(z + 1).mul_(w[..., :1].real),
}


class Net(nn.Module):
    """A function of complex parameters, of which one has gaps."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.z = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.w = nn.Parameter(torch.randn(5, 7, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.call(self.z * self.scale, self.w)
        parts = torch.view_as_real(out) if out.is_complex() else out
        return (parts * parts.detach().cos()).sum() * x.sum() + (parts * 0.5).tanh().sum()


def steps(call: Call, budget: float | str) -> tuple[Any, list[list[torch.Tensor]]]:
    torch.manual_seed(0)
    eager = Net(call)
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=budget, cost_model="unit", solver="greedy", time_limit=0.05)
    found = []
    for module, run in ((eager, eager), (other, step)):
        results = []
        for _ in range(2):
            module.zero_grad()
            loss = run(torch.full((2,), 0.7))
            loss.backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            results += [loss.detach(), *(torch.view_as_real(g) if g.is_complex() else g for g in grads)]
        found.append(results)
    return step, found


def same(found: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("name", NEW)
def test_no_result_is_put_over_what_it_is_a_product_of(name: str, budget: float | str) -> None:
    if name == "cumprod" and not _products._traces_running_products_as_run():  # torch before 2.13
        with pytest.warns(RematWarning, match="this release of torch computes the gradient of cumprod"):
            assert same(steps(NEW[name], budget)[1])
        return
    step, found = steps(NEW[name], budget)
    assert same(found)
    assert len(step.plans) == 1 and not step.failures


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_eager_mode_computes_over_its_input_runs_as_before(name: str) -> None:
    with pytest.warns(RematWarning, match="writes over complex numbers on the CPU"):
        step, found = steps(IN_PLACE[name], 1.0)
    assert same(found)
    assert not step.plans


@pytest.mark.parametrize("name", ALIKE)
def test_what_rounds_alike_in_place_is_captured(name: str) -> None:
    step, found = steps(ALIKE[name], "min")
    assert same(found)
    assert len(step.plans) == 1 and not step.failures
