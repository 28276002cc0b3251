"""On a CUDA device: steps whose runs of ops are compiled kernels have eager's bits, within their budgets."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import Fusing
from lightning_remat.measure import held_bytes, track_peak
from lightning_remat.planner._tiling import _TOLD
from tests.helpers.fused_forms import take_fused
from tests.test_gpu import DTYPES, Factory, conv_net, deterministic, gpt2
from tests.test_gpu_recordings import assert_same, recorded, trained

__all__ = ["deterministic"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def large(make: Factory, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A network with a batch large enough that its ops take longer than it does to launch them."""
    module, batch = make(dtype)
    return module, torch.cat([batch.roll(number, 0) for number in range(8)])


def runs(step: Rematerialized) -> int:
    """How many ops of a step's plan are compiled runs."""
    assert step.plan is not None and len(step.plans) == 1 and not step.failures
    return sum(op.target.startswith("fused_run") for op in step.plan.graph.ops)


@pytest.mark.parametrize("budget", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_fused_steps_have_the_bits_of_eager(make: Factory, dtype: torch.dtype, budget: float) -> None:
    eager, batch = large(make, dtype)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, fuse="exact", time_limit=3.0)
    assert all(map(torch.equal, trained(module, step, batch), trained(eager, eager, batch)))
    assert_same(module, eager)
    assert runs(step) > 0


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [gpt2, conv_net])
def test_under_autocast(make: Factory, half: torch.dtype, cuda_graphs: bool) -> None:
    eager, batch = large(make, torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=0.6, fuse="exact", cuda_graphs=cuda_graphs, time_limit=3.0)

    def context() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cuda", half)

    found, expected = trained(module, step, batch, 2, context), trained(eager, eager, batch, 2, context)
    assert all(map(torch.equal, found, expected))
    assert_same(module, eager)
    assert runs(step) > 0 and (not cuda_graphs or recorded(step) == 1)


@pytest.mark.parametrize("fuse", ["exact", "fast"])
def test_the_peak_is_within_the_budget(fuse: str) -> None:
    module, batch = large(gpt2, torch.bfloat16)
    step = rematerialize(module, budget=0.6, fuse=fuse, time_limit=3.0)
    for _ in range(3):
        loss = step(batch)
        module.zero_grad(set_to_none=True)
        loss.backward()
    assert runs(step) > 0 and step.plan is not None
    held = held_bytes(module, [batch], gradients=True, device="cuda")
    with track_peak(torch.device("cuda")) as peak:
        loss = step(batch)
        module.zero_grad(set_to_none=True)
        loss.backward()
    assert held < step.plan.predicted_peak_bytes
    assert peak.allocated_bytes is not None
    assert peak.allocated_bytes <= step.plan.budget_bytes
    assert peak.allocated_bytes == pytest.approx(step.plan.predicted_allocated_bytes, rel=0.01)


def loss_after(module: nn.Module, call: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """The loss of the last step of training."""
    return trained(module, call, batch)[-3]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    take_fused(monkeypatch)


@pytest.mark.usefixtures("fast")
def test_fast_runs_are_told_and_near() -> None:
    eager, batch = gpt2(torch.float32)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=1.0, fuse="fast", time_limit=3.0)
    torch.testing.assert_close(loss_after(module, step, batch), loss_after(eager, eager, batch), rtol=1e-3, atol=1e-3)
    assert runs(step) > 0 and step.plan is not None
    assert _TOLD[Fusing.FAST] in step.plan.notes
    assert not any("layer_norm" in op.target for op in step.plan.graph.ops)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_runs_have_batch_norm_in_them(dtype: torch.dtype, budget: float | str) -> None:
    eager, batch = large(conv_net, dtype)
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, fuse="fast", time_limit=3.0)
    near = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(loss_after(module, step, batch), loss_after(eager, eager, batch), **near)
    for one, other in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other, **near)
    assert runs(step) > 0 and step.plan is not None
    assert not any("batch_norm" in op.target for op in step.plan.graph.ops)


class Interpolating(nn.Module):
    """Called with images; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(self.first(images).relu(), scale_factor=2.0, mode="bilinear")
        return self.second(x).square().mean()


@pytest.mark.usefixtures("fast")
def test_deterministic_interpolation_adds_up_by_products() -> None:
    module, batch = Interpolating().to("cuda"), torch.randn(4, 3, 64, 64, device="cuda")
    step = rematerialize(module, budget=1.0, fuse="fast", time_limit=3.0)
    found, expected = (torch.autograd.grad(call(batch), list(module.parameters())) for call in (step, module))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)
    assert step.plan is not None and not step.failures
    assert any("added_in_grid" in op.target for op in step.plan.graph.ops)
