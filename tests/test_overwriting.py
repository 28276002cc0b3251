"""Elementwise results take the memory of inputs that die: the same bits, and really no memory more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.capture._ops import overwriting
from lightning_remat.measure import peak_memory
from lightning_remat.schedule import Compute
from tests.helpers.training import assert_same

aten = torch.ops.aten
X, Y = torch.randn(64, 1024), torch.rand(64, 1024) + 0.5
CALLS = [
    (aten.mul.Tensor, (X, Y)),
    (aten.mul.Scalar, (X, 0.3)),
    (aten.add.Tensor, (X, Y), {"alpha": 0.7}),
    (aten.add.Scalar, (X, 2)),
    (aten.sub.Tensor, (X, Y)),
    (aten.div.Tensor, (X, Y)),
    (aten.div.Scalar, (X, 3.0)),
    (aten.neg.default, (X,)),
    (aten.exp.default, (X,)),
    (aten.log.default, (Y,)),
    (aten.sqrt.default, (Y,)),
    (aten.rsqrt.default, (Y,)),
    (aten.pow.Tensor_Scalar, (X, 3.0)),
    (aten.tanh.default, (X,)),
    (aten.tanh_backward.default, (X, Y)),
    (aten.sigmoid.default, (X,)),
    (aten.sigmoid_backward.default, (X, Y)),
    (aten.relu.default, (X,)),
    (aten.threshold_backward.default, (X, Y, 0)),
    (aten.gelu.default, (X,)),
    (aten.gelu_backward.default, (X, Y)),
    (aten.silu.default, (X,)),
    (aten.silu_backward.default, (X, Y)),
    (aten.hardtanh.default, (X, 0.0, 6.0)),
    (aten.leaky_relu.default, (X,)),
    (aten.elu.default, (X,)),
    (aten.clamp_min.default, (X, 0.0)),
    (aten.masked_fill.Scalar, (X, Y > 1, 0.0)),
    (aten.where.self, (Y > 1, X, Y)),
    (aten.addcmul.default, (X, X, Y)),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_overwriting_form_gives_the_same_bits_in_no_more_memory(call, dtype):
    target, args, kwargs = (*call, {})[:3]
    if torch.Tag.pointwise not in target.tags:  # torch 2.11 on leaky_relu
        pytest.skip("this torch does not say that the op is elementwise")
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    expected = target(*args, **kwargs)
    tried = 0
    for position, value in enumerate(args):
        form = overwriting(target, position == 0)
        if form is None or not isinstance(value, torch.Tensor) or value.dtype != expected.dtype:
            continue
        overload, out = form
        values = [value.clone() if i == position else a for i, a in enumerate(args)]
        over = values[position]
        result = []
        extra = {out: over} if out else {}
        used = peak_memory(lambda: result.append(overload(*values, **kwargs, **extra)))  # noqa: B023
        assert torch.equal(result[0], expected)
        assert result[0].data_ptr() == over.data_ptr()
        if dtype is torch.float32:
            assert used < over.nbytes / 8  # some kernels convert small pieces
        tried += 1
    assert tried


@pytest.mark.parametrize("target", [aten.clone.default, aten.mm.default, aten._softmax.default, aten.sum.default, max])
def test_others_have_none(target):
    assert overwriting(target, True) is None


class Elementwise(nn.Module):
    """Chains of elementwise ops on views of matrix products, with a residual that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = self.first(self.norm(x)).view(-1, 16, 16)
            h = (h * 0.5).tanh().add(1.0) * torch.sigmoid(h)
            x = x + self.dropout(self.second(h.view(-1, 256)))
        return (x * 2).square().mean()


@pytest.mark.parametrize("budget", [1.0, 0.5, "min"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_of_elementwise_chains(budget, autocast):
    results = []
    x = torch.randn(128, 64)
    for remat in (False, True):
        torch.manual_seed(0)
        module = Elementwise()
        step = rematerialize(module, budget=budget, cost_model="unit", time_limit=1.0) if remat else module
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = step(x)
            module.zero_grad()
            loss.backward()
        results.append({"loss": loss.detach(), "gradients": [p.grad for p in module.parameters()]})
    assert_same(*results)
    assert any(isinstance(s, Compute) and s.over >= 0 for s in step.plan.schedule.steps)


def test_backward_twice():
    """What the forward saved is not overwritten: ``retain_graph=True`` works as before."""
    torch.manual_seed(0)
    module = Elementwise().eval()
    step = rematerialize(module, budget=0.6, cost_model="unit", time_limit=1.0)
    loss = step(torch.randn(128, 64))
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), first, strict=True))


class Normed(nn.Module):
    """Batch norms: one alone, one called twice, one whose statistics are read besides, one that keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 256)
        self.alone, self.twice, self.read = nn.BatchNorm1d(256), nn.BatchNorm1d(256), nn.BatchNorm1d(256)
        self.none = nn.BatchNorm1d(256, track_running_stats=False)
        self.average = nn.BatchNorm1d(256, momentum=None)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.alone(self.first(x)).relu()
        h = self.twice(self.second(self.twice(h))).relu()
        h = self.dropout(self.none(h) + self.read.running_mean)
        h = self.average(self.second(self.read(h)).relu())
        return (h * self.read.running_var).square().mean()


@pytest.mark.parametrize("budget", [1.0, 0.6, "min"])
def test_running_statistics_are_those_of_eager(budget):
    results = []
    batches = [torch.randn(128, 64) for _ in range(3)]
    for remat in (False, True):
        torch.manual_seed(0)
        module = Normed()
        step = rematerialize(module, budget=budget, cost_model="unit", time_limit=1.0) if remat else module
        losses = []
        for x in batches:
            losses.append(step(x))
            module.zero_grad()
            losses[-1].backward()
        gradients = [p.grad for p in module.parameters()]
        results.append({"losses": losses, "gradients": gradients, "buffers": dict(module.named_buffers())})
    assert_same(*results)
    # Two graphs: the plan of either may be the one that rematerializes.
    ran = [plan for plan, runs in zip(step.plans, step.runs, strict=True) if runs]
    assert any(plan.rematerializes for plan in ran) == (budget != 1.0)


def test_running_statistics_take_no_memory_more():
    """Without rematerialization a network of batch norms peaks where eager does, to the byte."""
    peaks = []
    for remat in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())]
        module = nn.Sequential(*layers)
        step = rematerialize(module, budget=1.0, cost_model="unit", time_limit=1.0) if remat else module
        x = torch.randn(16, 512)

        def run(module=module, step=step, x=x):
            loss = step(x).square().sum()
            module.zero_grad()
            loss.backward()

        run()
        peaks.append(peak_memory(run))
    assert peaks[1] <= peaks[0]
