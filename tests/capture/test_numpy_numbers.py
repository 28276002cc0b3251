"""NumPy on sizes and constants: computed while a step is captured, by NumPy, and the step is one graph."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep

functional = nn.functional


def checked(shape: Any) -> None:
    """What MONAI's networks ask of the shape of an image."""
    remainder = (np.array(shape) % np.power(2, 3)) > 0
    if remainder.any():
        wrong = (np.where(remainder)[0] + 2).tolist()
        raise ValueError(f"dimensions {wrong} of {shape} cannot be divided by {2**3}")


def windows(hidden: torch.Tensor) -> torch.Tensor:
    checked(hidden.shape)
    whole = int(np.ceil(hidden.shape[1] / 7)) * 7
    parts = functional.pad(hidden, (0, whole - hidden.shape[1])).view(len(hidden), -1, 7)
    return parts.softmax(-1).flatten(1)[:, : hidden.shape[1]]


def scaled(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(int(np.prod(hidden.shape)))[: np.prod(hidden.shape[:1]) * 16]
    return rows.view(hidden.shape) / np.sqrt(hidden.shape[-1]) * math.floor(np.float64(2.5))


def in_single_precision(hidden: torch.Tensor) -> torch.Tensor:
    """What NumPy rounds to 32 bits on the way."""
    first, second, third = np.array([1, 2, 3]) * np.float32(0.1)
    return hidden * first + hidden * float(second * np.float32(0.3)) + np.float64(0.3) * hidden * third


def one_by_one(hidden: torch.Tensor) -> torch.Tensor:
    for rate in np.linspace(0, 0.3, 4):
        hidden = hidden * (1 - rate)
    return hidden * (2 if isinstance(np.ceil(1.5), np.floating) else 3)


def without_end(hidden: torch.Tensor) -> torch.Tensor:
    """Python would raise here; NumPy does not."""
    return hidden * float(np.isfinite(np.array([8.0]) / np.array([4.0])).all())


def by_attributes(hidden: torch.Tensor) -> torch.Tensor:
    rates = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    turned = rates.T
    return hidden * (float(turned[2].sum()) + rates.size + turned.shape[0] + rates[0, 1].real)


class Part(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop, self.last, self.body = nn.Dropout(0.2), nn.Linear(16, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.drop(torch.tanh(self.norm(self.first(x)))))
        return self.last(hidden).square().mean()


def steps(module: nn.Module, step: Any, state: Any, sizes: Any) -> list[torch.Tensor]:
    module.load_state_dict(state)
    torch.manual_seed(0)
    found = []
    for size in sizes:
        module.zero_grad()
        loss = step(torch.randn(size, 16))
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        found += [b.clone() for b in module.buffers()]
    return found


def run_as_eager(body: Any, sizes: Any = (8, 8), budget: float = 0.9) -> ScheduledStep:
    module = Part(body)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    plain = steps(module, module, state, sizes)
    step = ScheduledStep(module, RematConfig(budget=budget, solver="greedy", cost_model="unit"))
    torch._dynamo.reset()
    assert all(map(torch.equal, plain, steps(module, step, state, sizes)))
    assert step.failures == []
    assert sum(step.runs) >= len(sizes)
    return step


@pytest.mark.parametrize("body", [windows, scaled, in_single_precision, one_by_one, without_end, by_attributes])
def test_one_graph(body: Any) -> None:
    step = run_as_eager(body)
    assert step.runs == [2]
    assert step.plans[0].rematerializes


def test_sizes_that_vary() -> None:
    step = run_as_eager(windows, sizes=(8, 16, 24, 32))
    assert sum(step.runs) == 4


def test_an_error_is_the_users() -> None:
    with pytest.raises(ValueError, match=r"dimensions \[2\] of torch.Size\(\[12, 16\]\) cannot be divided by 8"):
        run_as_eager(windows, sizes=(12,))
    module = Part(windows)
    with pytest.raises(ValueError, match="cannot be divided by 8"):
        ScheduledStep(module, RematConfig(budget=1.0, solver="greedy", cost_model="unit"))(torch.randn(12, 16))


def written_to(hidden: torch.Tensor) -> torch.Tensor:
    weights, known = np.array([1.0, 2.0, 3.0]), np.sqrt(np.float64(2))
    weights[0] = 5
    return hidden * float(weights.sum()) * known


def drawn(hidden: torch.Tensor) -> torch.Tensor:
    draws = np.random.default_rng(0)
    return hidden * draws.uniform()


@pytest.mark.parametrize("body", [written_to, drawn])
def test_what_is_left_to_numpy(body: Any) -> None:
    assert len(run_as_eager(body, budget=1.0).plans) > 1


@pytest.mark.slow
def test_swin_unetr() -> None:
    networks = pytest.importorskip("monai.networks.nets", reason="pip install monai einops")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, eager mode does not repeat the gradient of an index
    try:
        torch.manual_seed(0)
        network = networks.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, drop_rate=0.1)
        x = torch.randn(1, 1, 64, 64, 64)

        def loss() -> torch.Tensor:
            value: torch.Tensor = network(x).square().mean()
            return value

        def numbers(step: Any) -> list[torch.Tensor]:
            network.zero_grad()
            torch.manual_seed(1)
            value = step()
            value.backward()
            return [value.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

        plain = numbers(loss)
        step = ScheduledStep(loss, RematConfig(budget=0.6, solver="greedy"))
        assert all(map(torch.equal, plain, numbers(step)))
        assert step.failures == []
        assert step.runs == [1]
        plan = step.plans[0]

        def trained() -> None:
            value = step()
            network.zero_grad()
            value.backward()

        peak_memory(trained)  # gives up what was allocated before anything was recorded
        measured = held_bytes(network, x, gradients=True) + peak_memory(trained)
        assert measured <= plan.budget_bytes
        assert abs(measured - plan.predicted_peak_bytes) <= 0.02 * measured
    finally:
        torch.set_num_threads(threads)


# -- what NumPy hands to the step ---------------------------------------------------------------------------------------


class Given:
    """Reads arrays and numbers of NumPy's: other ones in each step, and once one that was written to."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)
        self.array = np.arange(3)
        self.number: Any = np.float64(0.3)

    def next(self, step: int) -> None:
        if step % 2:
            self.array[:] = self.random.permutation(16)[:3]
        else:
            self.array = self.random.permutation(16)[:3]
        self.number = (np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True))[step // 2]


def drawn(hidden: torch.Tensor, given: Given) -> torch.Tensor:
    """As BigBird picks the blocks that attend to each other."""
    rows = np.stack([given.random.permutation(16)[:3], given.random.permutation(16)[:3]])
    return hidden + hidden[:, torch.tensor(rows).flatten()].sum(1, keepdim=True)


def summed(hidden: torch.Tensor, given: Given) -> torch.Tensor:
    mean = np.mean(given.array)
    hidden = hidden * (0.5 * mean + hidden.sum() * mean * 1e-3)
    torch._dynamo.graph_break()
    return hidden * float(mean.round(1)) + (1 - mean / 16) * hidden


def times_a_number(hidden: torch.Tensor, given: Given) -> torch.Tensor:
    """A tensor without dimensions stays one of 32 bits."""
    scale = given.number * hidden.sum()
    assert scale.dtype == torch.float32
    other = torch.tensor(given.number) * hidden.sum() + torch.tensor([np.float64(0.3)]) * 1e-3
    return (hidden * scale + np.sqrt(given.number) * hidden + other).float()


@pytest.mark.parametrize("body", [drawn, summed, times_a_number], ids=lambda body: body.__name__)
def test_given(body: Any) -> None:
    """What NumPy has made outside of the step is no constant of it."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        given, part = Given(), Part(None)
        part.body = lambda hidden, given=given: body(hidden, given)
        step: Any = ScheduledStep(part, RematConfig(budget="min", time_limit=0.1), name="given") if planned else part
        losses = []
        for i in range(8):
            given.next(i)
            part.zero_grad()
            loss = step(torch.randn(8, 16))
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in part.parameters())]
        found.append(losses)
    assert step.plans
    assert sum(step.runs) >= 8
    assert all(map(torch.equal, *found))
