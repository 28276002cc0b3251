"""Gradients that are accumulated over batches: added where they are made, as in eager mode, and in no more memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

import lightning_remat.strategies  # noqa: F401 - registers them
from lightning_remat import rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.planner import RematConfig, Surroundings
from lightning_remat.runtime import ScheduledStep
from lightning_remat.runtime._accumulate import Accumulator
from tests.helpers.training import (
    Classifier,
    assert_ran,
    assert_same,
    batches_of_lengths,
    callback,
    compare,
    fit,
    loader,
)

CPU = torch.device("cpu")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the gradients that a backward has added itself, in order."""
    found: list[int] = []
    add = Accumulator._added

    def counted(self: Accumulator, gradient: torch.Tensor, position: int) -> torch.Tensor | None:
        result = add(self, gradient, position)
        if result is None:
            found.append(position)
        return result

    monkeypatch.setattr(Accumulator, "_added", counted)
    return found


def hands_over(remat: RematCallback) -> bool:
    """Whether the plans hand gradients over as they are made."""
    return any(op.target == "accumulate_grad" for op in remat.plans[-1].graph.ops)


class Tied(Classifier):
    """A weight that is used twice, and layers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight = self.net[0].weight
        self.net[8].requires_grad_(False)


class Hooked(Classifier):
    """Somebody looks at two of the gradients on their way, and changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        self.net[4].weight.register_post_accumulate_grad_hook(clamp)


def clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


class Breaks(Classifier):
    """Two graphs, with weights that both use."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        features = self.net[:4](x)
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.net[4:](features), y)


class Together(Classifier):
    """Two graphs whose losses are added up outside of both."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        one = super().loss(batch)
        torch._dynamo.graph_break()
        other = nn.functional.cross_entropy(self.net(2 * x), y)
        torch._dynamo.graph_break()
        return outside(one, other)


@torch.compiler.disable
def outside(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other


class Before(Classifier):
    """A layer that is called in eager mode before everything else, and its weight is used again in what is captured."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(eagerly(self.net[0], x) @ self.net[0].weight), y)


@torch.compiler.disable
def eagerly(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


class After(Classifier):
    """Something is added to the loss in eager mode, that comes from a weight."""

    def loss(self, batch: Any) -> torch.Tensor:
        return outside(super().loss(batch), self.net[0].weight.square().sum())


class Dictionary(Classifier):
    """Returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Views(Dictionary):
    """Returns views of what was captured, which autograd sees apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        return {**found, "flat": found["logits"].view(-1), "first": found["logits"][0]}


class Unforeseen(Dictionary):
    """Returns what an eager layer made before: nothing says so while the rest is captured."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        early = eagerly(self.net[0], batch[0])
        return {**super().training_step(batch, batch_idx), "early": early}


class Looked(pl.Callback):
    """Asks for gradients before each backward, without adding them to any."""

    def __init__(self) -> None:
        self.norms: list[torch.Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        kept = [p.grad.clone() if p.grad is not None else None for p in parameters]
        found = torch.autograd.grad(loss, parameters[:3], retain_graph=True)
        for parameter, old in zip(parameters, kept, strict=True):
            assert parameter.grad is None if old is None else torch.equal(parameter.grad, old)
        self.norms.extend(gradient.norm() for gradient in found)


class OwnBackward(Classifier):
    """A loss with a part that the step knows nothing of."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        penalty = 0.01 * sum(p.square().sum() for p in self.parameters())
        (loss + penalty).backward()


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


LONG = {"train": lambda: loader(40), "max_epochs": 2, "budget": "min"}


def without_budget() -> dict[str, Any]:
    return {name: value for name, value in LONG.items() if name != "budget"}


@pytest.mark.parametrize("make", [Classifier, Tied])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2, "precision": "bf16-true", "detect_anomaly": True},
    ],
    ids=["three", "mixed", "half"],
)
def test_gradients_are_added_where_they_are_made(make: Any, options: dict[str, Any], added: list[int]) -> None:
    _, scheduled, remat = compare(make, plans=1, **LONG, **options)
    trained = sum(p.requires_grad for p in scheduled.module.parameters())
    steps = 10
    firsts = 2 * -(-5 // options["accumulate_grad_batches"])  # those after an optimizer's step find none to add to
    handed_over = [op for op in remat.plans[0].graph.ops if op.target == "accumulate_grad"]
    assert len(handed_over) == trained
    assert len(added) == (steps - firsts) * trained


def test_accumulation_that_begins_later(added: list[int]) -> None:
    callbacks = lambda: [GradientAccumulationScheduler({1: 2})]  # noqa: E731
    _, _, remat = compare(Classifier, plans=1, callbacks=callbacks, **LONG)
    assert hands_over(remat) and added


def test_with_symbolic_sizes(added: list[int]) -> None:
    remat = callback(0.6, solver="crossing")
    compare(Classifier, train=batches_of_lengths, plans=None, remat=remat, max_epochs=2, accumulate_grad_batches=2)
    assert len(remat.plans) < 12 and hands_over(remat)  # the last of them is one with symbols
    assert len(added) == 12 * sum(p.requires_grad for p in Classifier().parameters())


def test_hooks_see_their_gradients(added: list[int]) -> None:
    _, scheduled, remat = compare(Hooked, plans=1, accumulate_grad_batches=2, **LONG)
    trained = sum(p.requires_grad for p in scheduled.module.parameters())
    assert hands_over(remat) and len(added) == 4 * (trained - 2)


def test_gradients_that_are_only_asked_for_are_given(added: list[int]) -> None:
    seen = Looked(), Looked()
    plain = fit(Classifier, seen[0], accumulate_grad_batches=2, **without_budget())
    remat = callback("min")
    scheduled = fit(Classifier, seen[1], remat, accumulate_grad_batches=2, **without_budget())
    assert_ran(remat, 1)
    assert_same(plain.results, scheduled.results)
    assert_same(seen[0].norms, seen[1].norms)
    trained = sum(p.requires_grad for p in scheduled.module.parameters())
    assert hands_over(remat) and len(added) == 4 * trained and len(seen[1].norms) == 30


@pytest.mark.parametrize("make", [Dictionary, Views])
def test_a_step_that_returns_more_than_the_loss(make: Any, added: list[int]) -> None:
    _, _, remat = compare(make, plans=1, accumulate_grad_batches=2, **LONG)
    assert hands_over(remat) and added


@pytest.mark.parametrize("make", [Breaks, Before])
def test_several_parts_leave_it_to_autograd(make: Any, added: list[int]) -> None:
    _, _, remat = compare(make, plans=None, accumulate_grad_batches=2, **LONG)
    assert not any(op.target == "accumulate_grad" for plan in remat.plans for op in plan.graph.ops) and not added


def test_it_is_left_to_autograd_from_then_on(added: list[int]) -> None:
    _, _, remat = compare(Unforeseen, plans=None, accumulate_grad_batches=2, **LONG)
    first, *others = [any(op.target == "accumulate_grad" for op in plan.graph.ops) for plan in remat.plans]
    assert first and others and not any(others)
    assert remat.runs[0] == 1 and sum(remat.runs[1:]) == 9 and not added


@pytest.mark.long
@pytest.mark.parametrize("make", [Together, After])
def test_what_comes_after_leaves_it_to_autograd(make: Any, added: list[int]) -> None:
    _, _, remat = compare(make, plans=None, accumulate_grad_batches=2, **LONG)
    assert not hands_over(remat) and not added


def test_an_own_backward_leaves_it_to_autograd(added: list[int]) -> None:
    _, _, remat = compare(OwnBackward, plans=1, accumulate_grad_batches=2, **LONG)
    assert not hands_over(remat) and not added


def test_manual_optimization_leaves_it_to_autograd(added: list[int]) -> None:
    _, _, remat = compare(ByHand, plans=2, **LONG)  # the second one counts the gradients that are kept
    assert not hands_over(remat) and not added


def test_a_step_that_may_be_repeated_adds_them_too(added: list[int]) -> None:
    """A repeated backward leaves those alone that are added: see the tests of the strategies."""
    _, _, remat = compare(Classifier, plans=1, accumulate_grad_batches=2, strategy="remat", **LONG)
    assert hands_over(remat) and added


def test_without_accumulation_gradients_are_returned() -> None:
    _, _, remat = compare(Classifier, plans=1, **LONG)
    assert not hands_over(remat)


class Wide(nn.Module):
    """More bytes of gradients than of activations."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)
        ]
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def test_no_more_memory_than_eager() -> None:
    torch.manual_seed(0)
    plain = Wide()
    module = copy.deepcopy(plain)
    x = torch.randn(64, 512)
    around = Surroundings(
        module_bytes=held_bytes(module), trainable_bytes=held_bytes(module.parameters()), accumulating=True
    )
    step = ScheduledStep(
        module, RematConfig(budget=1.0, cost_model="profile"), surroundings=lambda: around, accumulates=lambda: True
    )

    def run(call: Any) -> None:
        torch.manual_seed(1)
        call(x).backward()

    peaks = []
    for call, net in ((plain, plain), (step, module)):
        run(call)
        run(call)
        peaks.append(held_bytes(net, [x], gradients=True) + peak_memory(functools.partial(run, call), CPU))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), module.parameters(), strict=True))
    eager, ours = peaks
    assert ours <= eager
    assert step.plans[0].predicted_peak_bytes == pytest.approx(ours, rel=0.01)


@pytest.mark.parametrize("zeroed", [False, True])
def test_rematerialize_counts_the_gradients_that_new_ones_are_added_to(zeroed):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())))
    step = rematerialize(lambda x: net(x).square().mean(), budget=0.6, cost_model="unit", accumulating=True)
    x = torch.randn(1024, 128)
    peaks = []
    for _ in range(3):
        held = held_bytes(net, [x], gradients=True)
        peaks.append(held + peak_memory(lambda: step(x).backward(), CPU))
        if zeroed:
            net.zero_grad(set_to_none=False)
    assert step.plan is not None and step.plan.rematerializes
    assert peaks[0] < peaks[1] == peaks[2] <= step.plan.budget_bytes
    assert peaks[1] == pytest.approx(step.plan.predicted_peak_bytes, rel=1e-3)
