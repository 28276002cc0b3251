"""A function that is captured over and over is left alone, and the rest of the step stays planned."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_remat import RematWarning, rematerialize
from lightning_remat.runtime import _captures
from tests.helpers.cases import diagonal
from tests.helpers.training import measured

WIDTH = 32


class Perceptron(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.checkpointed = nn.Dropout(0.1), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.dropout(functional.gelu(self.wide(x))))


class Experts(nn.Module):
    """Each token goes to one of them: how many each has is another number in every step."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Perceptron(**options) for _ in range(count))
        self.shared = Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            (where,) = torch.where(chosen == number)
            result.index_add_(0, where, self.experts[number](tokens[where]) * weights[where, None])
        return result.view_as(x) + self.shared(x)


class Block(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.before, self.after, self.norm = Perceptron(), after, nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before(self.norm(x))
        return x + self.after(self.norm(x))


class Mixture(nn.Module):
    """A block without experts, and one with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(Perceptron()), Block(Experts(2, **options)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def trained(module: nn.Module, call: Any, steps: int) -> dict[str, torch.Tensor]:
    """Losses, gradients, parameters and the random state of steps on batches of their own."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(module.parameters(), 0.05), {}
    for step in range(steps):
        loss = call(torch.randn(8, 16, WIDTH))
        optimizer.zero_grad()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} {k}": p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | dict(module.named_parameters()) | {"random": torch.get_rng_state()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.long
def test_experts_are_left_alone_and_what_is_around_them_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_captures, "MOST_CAPTURES", 2)
    torch.manual_seed(0)
    module, steps = Mixture(), 8
    other = copy.deepcopy(module)
    step = rematerialize(other, budget=0.6, cost_model="unit", solver="greedy")
    expected = trained(module, module, steps)
    with pytest.warns(RematWarning, match=r"Perceptron\.forward .* for the same shapes.*stays planned"):
        ours = trained(other, step, steps)
    assert_same(expected, ours)
    assert len(step.failures) == 1
    plans, before = len(step.plans), step.runs
    trained(other, step, 3)
    assert len(step.plans) == plans  # nothing is captured any more, and nothing planned
    last = [plan for plan, now, then in zip(step.plans, step.runs, before, strict=True) if now == then + 3]
    assert sum(step.runs) - sum(before) == 3 * len(last) and any(plan.rematerializes for plan in last)
    left = step.scheduled.left_out(other)
    assert left and all(".experts." in name for name in left)  # the shared ones are of the same code, and stay planned

    def peak(call: Any) -> int:
        return measured(call, other, torch.randn(8, 16, WIDTH), lambda loss: loss)

    assert step.plan is not None
    planned, plain = [peak(step) for _ in range(3)], [peak(other) for _ in range(3)]
    assert max(planned) <= step.plan.budget_bytes < 0.95 * min(plain)
    assert step.plan.predicted_peak_bytes == pytest.approx(max(planned), rel=0.05)


@pytest.mark.long
def test_what_eager_mode_runs_twice_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_captures, "MOST_CAPTURES", 2)
    torch.manual_seed(0)
    module, steps = Mixture(checkpointed=True), 8
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit", solver="greedy")
    expected = trained(module, module, steps)
    with pytest.warns(RematWarning, match="it was captured .* for the same shapes"):
        ours = trained(other, step, steps)
    assert_same(expected, ours)


def scaled(_module: nn.Module, *given: Any) -> torch.Tensor:
    """What a hook makes of the last that it is given."""
    last = given[-1]
    return (last[0] if isinstance(last, tuple) else last) * 0.5


class Alike(nn.Module):
    """Blocks that are alike: all but the first are copied from it when the step is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(Perceptron()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize(
    ("path", "kind"), diagonal(["", "blocks.0", "blocks.2.after.wide"], ["forward", "forward_pre"])
)
def test_a_hook_that_is_registered_later_runs(path: str, kind: str) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module, x = Alike(), torch.randn(4, 8, WIDTH)
        step: Any = rematerialize(module, budget="min", cost_model="unit") if wrap else module
        losses = []
        for number in range(4):
            if number in (1, 2):  # added after the first step
                handle = getattr(module.get_submodule(path), f"register_{kind}_hook")(scaled)
            torch.manual_seed(number)
            losses.append(step(x).detach())
            if number in (1, 2):
                handle.remove()
        results.append(losses)
    assert results[0][0] != results[0][1] and all(map(torch.equal, *results))
    assert not step.failures and step.runs == (2, 2)  # without the hook, and with it


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x, x, x, need_weights=False)[0]
        return x.square().mean()


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0].square().mean()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(
    ("make", "switched"),
    [
        (Attention, lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)),
        pytest.param(Recurrent, lambda: torch.backends.mkldnn.flags(enabled=False), marks=pytest.mark.slow),
    ],
)
def test_other_kernels_are_chosen_later(make: type[nn.Module], switched: Any) -> None:
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        module = make()
        step: Any = rematerialize(module, budget="min", solver="greedy", cost_model="unit") if planned else module
        results.append([])
        for number in range(4):
            module.zero_grad()
            with switched() if number % 2 else contextlib.nullcontext():
                step(torch.randn(4, 6, WIDTH)).backward()
            results[-1] += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    assert all(map(torch.equal, *results))
    assert step.runs == (2, 2) and not step.failures
