"""Sizes that change from call to call: captured with symbols, few plans for all of them, and the same bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_remat import InfeasibleBudgetError, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.runtime import _backend
from lightning_remat.runtime._captures import STATIC_CAPTURES
from lightning_remat.runtime._sized_plans import STEPS_A_DOUBLING, rounded_up
from tests.helpers.cases import slow_but
from tests.helpers.training import LENGTHS, Classifier, batches_of_lengths, callback, compare


class Encoder(nn.Module):
    """Tokens of shape (batch, time) to the loss of the next one, with attention, layer norm and dropout."""

    def __init__(self, width: int = 32, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits = self.head(self.encoder(hidden, mask=mask, is_causal=True))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Images(nn.Module):
    """Images of any size, with convolutions, batch norm, pooling and an upsampled skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.2))
        self.up = nn.Conv2d(8, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small = self.down(images)
        small = small + self.middle(small)
        return (self.up(functional.interpolate(small, size=images.shape[-2:], mode="nearest")) - images).square().mean()


def tokens(length: int, batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def steps(module: nn.Module, call: Any, batches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Loss, gradients and buffers of a step on each batch, seeded each."""
    found = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        loss = call(batch)
        module.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients, *(b.clone() for b in module.buffers()), torch.rand(1)])
    return found


def compared(module: nn.Module, batches: Sequence[torch.Tensor], **options: Any) -> Any:
    """Both runs have the same bits; returns what `rematerialize` gave."""
    other = copy.deepcopy(module)
    step = rematerialize(other, **{"cost_model": "unit", "solver": "crossing", "time_limit": 1.0, **options})
    ours, eager = steps(other, step, batches), steps(module, module, batches)
    for number, (one, two) in enumerate(zip(ours, eager, strict=True)):
        assert len(one) == len(two)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), f"batch {number}: other bits"
    assert not step.failures
    assert sum(step.runs) >= len(batches)  # a call that is captured in parts runs several
    return step


def graphs(step: Any) -> int:
    return len(step._step._plans.graphs)


@pytest.mark.long
@pytest.mark.parametrize("budget", slow_but({0.5}, [1.0, 0.5]))
def test_sequences_of_many_lengths(budget: float) -> None:
    step = compared(Encoder(), [tokens(n) for n in LENGTHS], budget=budget)
    assert graphs(step) == STATIC_CAPTURES + 1
    assert len(step.plans) < len(LENGTHS)
    assert any(plan.rematerializes for plan in step.plans) == (budget < 1)


def test_images_of_many_sizes() -> None:
    sizes = [(16, 16), (24, 16), (16, 32), (32, 32), (40, 24), (18, 22), (40, 40)]
    images = [torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)) for size in sizes]
    step = compared(Images(), images, budget=0.7)
    assert graphs(step) == STATIC_CAPTURES + 1
    assert any(plan.rematerializes for plan in step.plans[STATIC_CAPTURES:])


@pytest.mark.long
def test_batches_and_lengths_vary() -> None:
    batches = [tokens(n, batch=2 + n % 5) for n in LENGTHS]
    step = compared(Encoder(), batches, budget=0.5)
    assert graphs(step) <= STATIC_CAPTURES + 2


@pytest.mark.long
def test_sizes_that_are_equal_by_chance() -> None:
    """As long as the width, the batch or the vocabulary: what lies on what must not be decided by that."""
    step = compared(Encoder(width=32), [tokens(n, batch=12) for n in (20, 22, 24, 32, 12, 64, 50, 33)], budget=0.5)
    assert graphs(step) <= STATIC_CAPTURES + 2


@pytest.mark.long
def test_one_budget_for_all() -> None:
    """In bytes: short ones run as they are, long ones fit, and peaks are those that were predicted."""
    torch.manual_seed(0)
    module = Encoder(width=64)
    plain = rematerialize(copy.deepcopy(module), budget=1.0, cost_model="unit", solver="crossing")
    plain(tokens(64, batch=16)).backward()
    budget = int(0.6 * plain.plan.baseline_peak_bytes)
    step = rematerialize(module, budget=budget, cost_model="profile", solver="crossing", time_limit=0.4)
    kinds = set()
    for length in (60, 10, 20, 33, 64, 21, 48, 63):
        batch = tokens(length, batch=16)

        def once(batch: torch.Tensor = batch) -> None:
            loss = step(batch)
            module.zero_grad()
            loss.backward()

        once()
        measured = held_bytes(module, batch, gradients=True) + peak_memory(once, torch.device("cpu"))
        plan = step.plan
        assert measured <= plan.budget_bytes == budget
        assert plan.predicted_peak_bytes >= 0.97 * measured
        kinds.add(plan.rematerializes)
    assert kinds == {True, False}
    assert len(step.plans) <= STATIC_CAPTURES + 6


@pytest.mark.long
def test_what_is_infeasible_is_told_and_shorter_ones_go_on() -> None:
    module = Encoder(width=64)
    least = rematerialize(copy.deepcopy(module), budget="min", cost_model="unit", solver="crossing", time_limit=1)
    least(tokens(32, batch=16)).backward()
    step = rematerialize(
        module, budget=least.plan.predicted_peak_bytes, cost_model="unit", solver="crossing", time_limit=1
    )
    for length in (10, 12, 14, 20):
        step(tokens(length, batch=16)).backward()
    with pytest.raises(InfeasibleBudgetError, match="smallest"):
        step(tokens(64, batch=16))
    step(tokens(21, batch=16)).backward()
    assert graphs(step) == STATIC_CAPTURES + 1


class Decides(Encoder):
    """Reads its length as a number: nothing symbolic is left of it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] in LENGTHS:
            return super().forward(tokens) * (1 + hash(int(tokens.shape[1])) % 3)
        return super().forward(tokens)


class Breaks(Encoder):
    """Two graphs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        torch._dynamo.graph_break()
        return loss * self.head.bias.sum().exp()


@pytest.mark.long
@pytest.mark.parametrize("make", slow_but({Breaks}, [Decides, Breaks]))
def test_where_sizes_cannot_be_symbols_each_is_captured(make: type[Encoder]) -> None:
    step = compared(make(), [tokens(n) for n in LENGTHS[: STATIC_CAPTURES + 1]], budget=0.7)
    assert graphs(step) >= STATIC_CAPTURES + 1


@pytest.mark.long
def test_less_memory_than_was_thought() -> None:
    """After an out-of-memory error the plans for all sizes are made again, within less."""
    module = Encoder(width=64)
    step = rematerialize(module, budget="64MiB", cost_model="unit", solver="crossing")
    for length in (10, 12, 14, 60, 40):
        step(tokens(length, batch=16)).backward()
    before = step.plan.predicted_peak_bytes
    budget = step._step.tighten()
    assert budget is not None and budget < before
    for length in (40, 41, 36):
        loss = step(tokens(length, batch=16))
        loss.backward()
        assert step.plan.rematerializes and step.plan.predicted_peak_bytes <= budget
    assert graphs(step) == STATIC_CAPTURES + 1


@pytest.mark.long
def test_less_memory_at_a_point_of_the_grid() -> None:
    """The plan that was made for just these sizes is over what there is now: another is made."""
    step = rematerialize(Encoder(width=64), budget="64MiB", cost_model="unit", solver="crossing")
    for length in (10, 12, 14, 64):
        step(tokens(length, batch=16)).backward()
    before = step.plan.predicted_peak_bytes
    budget = step._step.tighten()
    assert budget is not None and budget < before
    step(tokens(64, batch=16)).backward()
    assert step.plan.rematerializes and step.plan.predicted_peak_bytes <= budget


def left_alone(budget: str | int) -> tuple[Any, Encoder]:
    """A step that runs as it is where it fits, as in a `Trainer`, and its module."""
    torch.manual_seed(0)
    module = Encoder()
    step = rematerialize(module, budget=budget, cost_model="unit", solver="greedy")
    step.scheduled.leave_alone = True
    return step, module


def test_what_must_fit_at_other_sizes_is_not_captured() -> None:
    """Nothing that a step holds grows faster than with the third power of the sizes of what it is given."""
    step, module = left_alone("1GiB")
    eager = copy.deepcopy(module)
    for number, length in enumerate((24, 10, 25, 60, 31, 24)):
        torch.manual_seed(number)
        step(tokens(length)).backward()
        torch.manual_seed(number)
        eager(tokens(length)).backward()
    assert step.runs == (1,) and graphs(step) == 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), eager.parameters(), strict=True))


def test_what_may_not_fit_at_other_sizes_is_captured() -> None:
    step, _ = left_alone("1GiB")
    step(tokens(24)).backward()
    step, _ = left_alone(int(1.25 * 1.5 * step.plan.baseline_peak_bytes))
    for length, plans in ((24, 1), (20, 1), (26, 1), (40, 2), (24, 2), (27, 2)):
        step(tokens(length)).backward()
        assert len(step.plans) == plans, length


def test_sizes_that_were_taken_to_fit_and_did_not_are_captured() -> None:
    step, _ = left_alone("1GiB")
    for length in (24, 26):
        step(tokens(length)).backward()
    budget = step._step.tighten()  # out of memory
    assert budget == 2**30 and step.runs == (1,)
    step(tokens(26)).backward()
    assert step.runs == (1, 1)


def test_in_a_trainer() -> None:
    _, _, remat = compare(
        Classifier, train=batches_of_lengths, plans=None, remat=callback(0.5, solver="crossing"), max_epochs=2
    )
    assert len(remat.plans) < 12 and sum(remat.runs) == 24


@given(st.integers(2, 1 << 20))
def test_the_grid(size: int) -> None:
    found = rounded_up(size)
    assert size <= found <= size * 2 ** (1 / STEPS_A_DOUBLING) + 1
    assert rounded_up(found) == found
    assert rounded_up(size, size + 1) <= size + 1


class Draws(nn.Module):
    """Draws, counts, and breaks the graph, before what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + torch.randn(x.shape)
        torch._dynamo.graph_break()
        return self.layer(x).square().mean()


def test_what_comes_before_a_graph_break_runs_once_where_symbols_fail_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured, failed = _backend._Handed.captured, []

    def without_symbols(handed: Any) -> Any:
        if any(map(internals.is_size_of_tensor, handed._inputs)):
            failed.append(handed)
            raise RuntimeError("no symbols here")
        return captured(handed)

    monkeypatch.setattr(_backend._Handed, "captured", without_symbols)
    found = []
    for run in (False, True):
        torch.manual_seed(0)
        module, seen = Draws(), []
        call = rematerialize(module, budget=1.0, cost_model="unit", solver="greedy") if run else module
        for number in range(STATIC_CAPTURES + 3):
            module.zero_grad()
            call(torch.ones(3, 7 + number, 8)).backward()
            seen.append((module.layer.weight.grad, torch.get_rng_state(), torch.tensor(module.calls)))
        found.append(seen)
        assert not run or (sum(call.runs) == STATIC_CAPTURES + 2 and failed)  # all but that call
    assert all(torch.equal(a, b) for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
