"""Python floats that change from step to step: one graph holds for all of their values, with the bits of eager mode."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.planner import RematConfig
from lightning_remat.runtime import ScheduledStep
from lightning_remat.runtime._measuring import MEASURED
from tests.helpers.training import Classifier, compare, loader


def batches(number: int) -> Any:
    return lambda: loader(8 * number)


def mixed(batch: Any, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = batch
    order = torch.randperm(len(x))
    return share * x + (1 - share) * x[order], y, y[order]


def of_both(scores: torch.Tensor, one: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    return share * nn.functional.cross_entropy(scores, one) + (1 - share) * nn.functional.cross_entropy(scores, other)


class Mixup(Classifier):
    def __init__(self) -> None:
        super().__init__()
        np.random.seed(3)  # noqa: NPY002

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        share = np.random.beta(0.4, 0.4)  # noqa: NPY002
        x, one, other = mixed(batch, share)
        return of_both(self.net(x), one, other, share)


def mixed_by_numpy(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    share = np.random.beta(0.4, 0.4)  # noqa: NPY002
    return *mixed(batch, share), share


class MixupElsewhere(Mixup):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, one, other, share = mixed_by_numpy(batch)
        return of_both(self.net(x), one, other, share)


@pytest.mark.parametrize("make", [Mixup, MixupElsewhere])
def test_mixup_is_captured_once(make: Any) -> None:
    _, _, remat = compare(
        make, train=batches(50), plans=None
    )  # the draw is in front of the graph: it is measured beside it
    assert sum(remat.runs) == 50 and len({len(plan.graph.inputs) for plan in remat.plans}) == 1
    assert len(remat.plans) <= 1 + MEASURED


class Annealed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x) / self.temperature, y)
        self.temperature *= 0.99
        self.log("temperature", self.temperature)
        return loss


class AnnealedOutside(Annealed):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x) / self.temperature, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.temperature = max(0.5, self.temperature * 0.99)


class Averaged(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.last = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.temperature = 0.9 * self.temperature + 0.1 * self.last
        return loss / self.temperature

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = float(outputs["loss"])
        self.seen.append(self.temperature)


@pytest.mark.parametrize("make", [Annealed, AnnealedOutside, Averaged])
def test_floats_of_the_module(make: Any) -> None:
    plain, scheduled, remat = compare(make, train=batches(12), plans=2)  # with the first value, and for all values
    assert remat.runs == (1, 11)
    assert plain.module.temperature == scheduled.module.temperature


class Part(nn.Module):
    """``body`` is given what a small network makes of the input, and a number that changes."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 4)
        self.body, self.number, self.said = body, 1.0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(self.body(self, hidden, self.number)).square().mean()


def steps(module: Part, step: Any, state: Any, number: int) -> list[Any]:
    module.load_state_dict(state)
    module.number, module.said = 1.0, ""
    torch.manual_seed(0)
    found: list[Any] = []
    for _ in range(number):
        module.zero_grad()
        loss = step(torch.randn(8, 16, dtype=module.first.weight.dtype))
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        found += [*(b.clone() for b in module.buffers()), module.said]
        module.number *= 0.97
    return found


def run_as_eager(
    body: Any, dtype: torch.dtype = torch.float32, number: int = 5, cost_model: str = "unit"
) -> ScheduledStep:
    module = Part(body).to(dtype)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    plain = steps(module, module, state, number)
    step = ScheduledStep(module, RematConfig(budget=1.0, solver="greedy", cost_model=cost_model))
    torch._dynamo.reset()
    scheduled = steps(module, step, state, number)
    for one, other in zip(plain, scheduled, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert step.failures == []
    assert sum(step.runs) >= number
    return step


def in_another_order(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """What a simplification of the arithmetic would round otherwise, or not at all."""
    return hidden * ((t + 1e16) - 1e16 + 1) * ((t + 0.1) + 0.2) * (t + (0.1 + 0.2)) * (t * 0.1 * 0.7) * (t / 3 - 0.1)


def of_many_ops(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    made = torch.add(hidden, hidden.sin(), alpha=t).clamp(-t, t) + torch.full((16,), t)
    made = torch.where(made > t / 9, made, t) + (hidden.bfloat16() * t / (t + 1)).float()
    return torch.addcmul(made, hidden, hidden, value=t) / t


def branching(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    return hidden * 2 if (t + 0.1) * 0.5 + 0.2 > 0.6961 else hidden * t


def sized(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    width = 14 if t > 0.99 else int(t * 12)
    return nn.functional.pad(hidden[:, :width], (0, 16 - width))


def written_to(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    width = int(t * 8)
    hidden = hidden * 1
    hidden[:, :width] = hidden[:, -width:].detach()
    return hidden


def said(module: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    module.said = f"{t:.2f}, {t * 0.1!r}"
    return hidden * t


def of_functions(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """Functions that symbols do not know, one of another, of integers, and asked about."""
    share = 2 / (1 + math.exp(-10 * (1 - t))) - 1
    hidden = hidden * share + math.log(t + 1, 3) * math.pow(0.9, 7 * t) - math.hypot(t, share, 2)
    count = round((1 - t) * 100)
    hidden = hidden * (math.log1p(count) - math.erf(t) * math.atan2(t, 3)) + math.expm1(t) / math.gamma(t + 1)
    return hidden * 2 if math.exp(t) < 1 else hidden / math.degrees(t)


def of_numpy(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """What NumPy makes of floats is a ``np.float64``: it is raised to powers, rounded and divided by as NumPy does."""
    share = 2.0 / (1.0 + np.exp(-10 * (1 - t))) - 1
    hidden = (
        hidden * share + 0.5 * (1 + np.cos(np.pi * t)) * np.clip(t * 2 - 1, 0, 0.9) + np.interp(t, [0, 1], [2.0, 3])
    )
    hidden = hidden * max(0.1, np.tanh(share)) - abs(np.sin(t)) ** 2.5 / np.sqrt(t) + round(np.exp(t), 2)
    return hidden * float(np.minimum(1.0, 3 * t)) + int(np.ceil(t * 3)) * np.float64(t) ** share


def raised(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """An annealed focal loss; exponents that 32 bits do not hold, in place, and of numbers of 16 bits."""
    focal = (1 - hidden.sigmoid()) ** (t + 1) * nn.functional.logsigmoid(hidden)
    return focal + ((hidden.abs() + 0.1) * 2).pow_(t) + hidden.square().add(0.1).bfloat16().pow(t * 0.3).float()


def raised_twice(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """With a gradient of the gradient."""
    share = hidden.sigmoid()
    (slope,) = torch.autograd.grad((share ** (t + 1)).sum(), share, create_graph=True)
    return slope * hidden


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floats_are_rounded_as_python_does(dtype: torch.dtype) -> None:
    assert run_as_eager(in_another_order, dtype).runs == [1, 4]


@pytest.mark.parametrize("body", [of_many_ops, said, of_functions, of_numpy, raised])
def test_floats_in_ops(body: Any) -> None:
    assert run_as_eager(body).runs == [1, 4]


def test_powers_with_gradients_of_gradients() -> None:
    run_as_eager(raised_twice, number=4)  # captured each time before torch 2.14, whose Dynamo asks for the exponent


def test_python_may_decide_by_a_float() -> None:
    step = run_as_eager(branching)
    assert len(step.plans) == 2
    assert sorted(step.runs) == [1, 4]


def vanishing(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    """A power of 0 in the last step, whose gradient is 0 also where that of other powers is not finite."""
    return nn.functional.relu(hidden - hidden) ** (1.0 if t > 0.99 else round(t, 2) - 0.91) + hidden


def test_a_power_may_vanish() -> None:
    assert run_as_eager(vanishing, number=4).runs == [1, 2, 1]


def logarithms(_: Part, hidden: torch.Tensor, t: float) -> torch.Tensor:
    return hidden * math.log(t - 0.9) if math.log(t - 0.9) > -2.5 else hidden


def test_a_function_may_raise() -> None:
    """Guards ask it too; the error is that of the function, and training goes on."""
    module = Part(logarithms)
    step = ScheduledStep(module, RematConfig(budget=1.0, solver="greedy", cost_model="unit"))
    for number in (1.0, 0.99, 0.98, 0.8, 0.97, 0.9, 0.96):
        module.number = number
        if number > 0.9:
            step(torch.randn(8, 16)).backward()
            continue
        with pytest.raises(ValueError, match="math domain error"):
            step(torch.randn(8, 16))
    assert step.failures == []
    assert sum(step.runs) == 5


class Reversed(torch.autograd.Function):
    """Gradients are turned around, and scaled by a number that grows with each step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradients[0], None


class Adversarial(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scale = 2 / (1 + np.exp(-self.global_step)) - 1
        self.log("scale", scale)
        scores = self.net(x)
        return nn.functional.cross_entropy(scores, y) + Reversed.apply(scores, scale).square().mean()


def test_a_gradient_is_reversed() -> None:
    _, _, remat = compare(Adversarial, train=batches(9), plans=1)  # Lightning's counters vary, as is known
    assert remat.runs == (9,)


def test_sizes_that_come_from_floats() -> None:
    assert run_as_eager(sized, number=4).runs == [1, 2, 1]
    assert run_as_eager(written_to, cost_model="profile").runs == [1, 4]  # and each op can be measured


class Curriculum(Classifier):
    """The first rows alone, more of them from time to time, and a number that is no size."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        rows = min(len(x), 4 + 2 * (self.global_step // 8))
        return nn.functional.cross_entropy(self.net(x[:rows]), y[:rows]) * (1 + 0.1 * batch_idx)


class OfTwoSizes(Curriculum):
    """Sizes of a schedule that is rounded, and of every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        rows = round(3 + 4 * min(1.0, self.global_step / 1000))
        x = torch.cat([x[:rows], x.new_ones(1 + batch_idx % 2, *x.shape[1:])])
        x[rows:, : 1 + batch_idx % 2] = x[:1, -1 - batch_idx % 2 :]
        scores = self.net(x)
        return nn.functional.cross_entropy(scores[:rows], y[:rows]) + scores[rows:].mean()


def test_sizes_of_a_curriculum() -> None:
    _, _, remat = compare(Curriculum, train=batches(24), plans=3)
    assert remat.runs == (8, 8, 8)


def test_sizes_of_every_other_batch() -> None:
    _, _, remat = compare(OfTwoSizes, train=batches(12), plans=2)
    assert remat.runs == (6, 6)


class Widening(nn.Module):
    """With rows of many numbers, which become symbols, beside a width that follows from a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = 8 - self.calls % 2
        return self.net(nn.functional.pad(x[:, :width], (0, 8 - width))).square().mean() + x[self.calls % 2 :].mean()


def test_sizes_of_a_number_beside_symbolic_ones() -> None:
    torch.manual_seed(0)
    module = Widening()
    step = ScheduledStep(module, RematConfig(budget=1.0, solver="greedy", cost_model="unit"))
    for number, rows in enumerate((4, 5, 6, 7, 8, 9, 10, 11, 12, 13)):
        x = torch.randn(rows, 8)
        found = []
        for run in (module, step):
            module.calls = number
            module.zero_grad()
            loss = run(x)
            loss.backward()
            found.append((loss.detach().clone(), [p.grad.clone() for p in module.parameters()]))
        assert torch.equal(found[0][0], found[1][0])
        assert all(map(torch.equal, found[0][1], found[1][1]))
    assert step.failures == []
    # Three sizes each on its own, and all others in one graph for each width.
    assert len(step._plans.graphs) == 5


def test_what_the_process_has_compiled_before_does_not_matter() -> None:
    """Newer releases of torch read once a process whether floats become tensors, and keep that."""
    asked = getattr(torch._dynamo.utils, "_is_tensorify_enabled", None)
    if asked is not None:
        asked.cache_clear()
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.randn(3, 2))
    assert run_as_eager(of_many_ops).runs == [1, 4]
    assert asked is None or asked()


@pytest.mark.filterwarnings("ignore:.*torch has given up on what was captured")
def test_a_momentum_that_changes_with_each_step_is_soon_left() -> None:
    """torch's kernels want it known: each capture has made a constant of it, for both layers."""
    norms = [nn.BatchNorm1d(16, momentum=None) for _ in range(2)]
    module = nn.Sequential(nn.Linear(16, 16), norms[0], nn.Tanh(), nn.Linear(16, 16), norms[1], nn.Tanh())
    eager = copy.deepcopy(module)
    call = rematerialize(module, budget=1.0, cost_model="unit", solver="greedy")
    captures = []
    for seed in range(12):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for step in (call, eager):
            step(x).square().mean().backward()
        captures.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] > before)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), eager.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), eager.buffers(), strict=True))
    assert sum(captures) <= 8 and not any(captures[-3:])
