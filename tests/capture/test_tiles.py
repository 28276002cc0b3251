"""Losses over classes, computed in slices of rows: eager's bits, without the tensors as large as the logits between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_remat import InfeasibleBudgetError, Plan, Rematerialized, rematerialize
from lightning_remat.capture.tiling import _losses
from lightning_remat.capture.tiling._losses import Box, gradient_of_rows, loss_of_rows
from lightning_remat.measure import held_bytes, peak_memory
from tests.helpers.cases import diagonal
from tests.helpers.training import Classifier, callback, compare, seeded_losses

aten = torch.ops.aten
LAST = 9223372036854775807
CLASSES = 517
"""No multiple of a vector's elements."""


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_losses.LEAST_BYTES, "cpu", 1 << 12)


# -- the two ops --------------------------------------------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return None
    return tuple(draw(st.sampled_from([(0, LAST), (0, -1), (1, LAST), (0, size), (1, 2)])) for size in shape)


@settings(max_examples=200)
@given(st.data())
def test_slices_have_the_bits_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(2, 5), st.integers(2, 40)) | st.tuples(st.integers(2, 130)))
    classes = data.draw(st.sampled_from([1, 2, 7, 64, 257, 1000]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    reduction, ignored = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([-100, 0, 3]))
    box = data.draw(boxes(shape))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(*shape, classes, dtype=dtype).mul_(data.draw(st.sampled_from([0.1, 3.0, 60.0])))
    place = tuple(slice(*one) for one in box) if box is not None else ...
    rows = logits[place].reshape(-1, classes).to(computed)
    target = torch.randint(0, classes, (len(rows),))
    target[:: data.draw(st.sampled_from([1, 2, 5]))] = ignored

    if ignored >= classes:  # no class, and not ignored by anyone's rows but these
        target.clamp_(max=classes - 1)
    normalized = aten._log_softmax(rows, 1, False)
    loss, weight = aten.nll_loss_forward(normalized, target, None, reduction, ignored)
    gradient = torch.randn_like(loss)
    made = aten.nll_loss_backward(gradient, normalized, target, None, reduction, ignored, weight)
    expected = torch.zeros_like(logits)
    own = aten._log_softmax_backward_data(made, normalized, 1, computed).to(dtype)
    expected[place] = own.view(expected[place].shape)

    found = loss_of_rows(logits, target, reduction, ignored, box, computed)
    assert same(found[0], loss) and same(found[1], weight)
    rest = (target, reduction, ignored, found[1], box, computed)
    assert same(gradient_of_rows(gradient, logits, *rest), expected)
    assert same(gradient_of_rows(gradient, logits, *rest, out=logits), expected)
    assert same(logits, expected)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and value; not-a-numbers are equal."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(one.isnan(), other.isnan())


def test_a_slice_lies_as_its_rows_do_among_all() -> None:
    """CUDA's kernels read rows in vectors from the first aligned address on."""
    rows, room = torch.empty(7, 1003, dtype=torch.bfloat16), torch.empty(7 * 1003 + 4)
    for begin in range(20):
        made = _losses._as_it_would_lie(rows, begin, room)
        assert made.shape == rows.shape and made.dtype is torch.float32 and made.is_contiguous()
        assert made.data_ptr() % 16 == begin * 1003 * 4 % 16


def test_no_rows() -> None:
    logits, target = torch.empty(2, 0, 5), torch.empty(0, dtype=torch.int64)
    loss, weight = loss_of_rows(logits, target, 2, -100, None, torch.float32)
    assert loss == 0
    assert gradient_of_rows(loss, logits, target, 2, -100, weight, None, torch.float32).shape == (2, 0, 5)


# -- steps --------------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Tokens of shape (batch, time) to a loss over classes."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], width: int = 24) -> None:
        super().__init__()
        self.loss = loss
        self.embed = nn.Embedding(CLASSES, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1)
        return self.loss(self.head(x), tokens)


def plain(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def in_float32(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().view(-1, CLASSES), tokens.view(-1))


def the_next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def the_next_token_first(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As transformers of before 4.46 had it."""
    logits = logits.float()[..., :-1, :].contiguous()
    return functional.cross_entropy(logits.view(-1, CLASSES), tokens[..., 1:].contiguous().view(-1))


def of_some_samples(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[1:, 2:-1].reshape(-1, CLASSES), tokens[1:, 2:-1].reshape(-1))


def summed_with_ignored(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    target = torch.where(tokens % 3 == 0, -100, tokens).flatten()
    return functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / (target != -100).sum()


def each_row(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).mean()


def by_its_parts(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.nll_loss(functional.log_softmax(logits.flatten(0, 1), -1), tokens.flatten(), ignore_index=0)


def twice(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return plain(logits, tokens) + 0.5 * plain(logits * 0.9, tokens.flip(1))


def smoothed(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1)


def weighted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), torch.linspace(0.5, 1.5, CLASSES))


def with_a_penalty(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Something else reads what lies between."""
    normalized = functional.log_softmax(logits.flatten(0, 1), -1)
    return functional.nll_loss(normalized, tokens.flatten()) + normalized.square().mean() * 1e-3


def against_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), functional.one_hot(tokens.flatten(), CLASSES).to(logits))


TILED = [
    plain,
    in_float32,
    the_next_token,
    the_next_token_first,
    of_some_samples,
    summed_with_ignored,
    each_row,
    by_its_parts,
    twice,
]
AS_IT_IS = [smoothed, weighted, with_a_penalty, against_probabilities]


def compared(
    loss: Callable[..., torch.Tensor],
    budget: float | str,
    half: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: str,
) -> Rematerialized:
    """Train with and without a plan, and compare all bits."""
    torch.manual_seed(0)
    eager, tokens = Head(loss).to(dtype), torch.randint(0, CLASSES, (12, 30))
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget=budget, time_limit=0.5, cost_model="flops", **options)
    assert all(map(torch.equal, seeded_losses(module, step, tokens, half), seeded_losses(eager, eager, tokens, half)))
    for (name, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), name
    assert len(step.plans) == 1 and not step.failures
    return step


def is_tiled(step: Rematerialized) -> bool:
    assert step.plan is not None
    targets = {op.target for op in step.plan.graph.ops}
    assert ("loss_of_rows" in targets) == ("gradient_of_rows" in targets)
    return "loss_of_rows" in targets


@pytest.mark.parametrize(("loss", "kind"), diagonal(TILED, ["autocast", "float32", "bfloat16"]))
def test_losses_are_computed_in_slices_where_a_peak_needs_it(loss: Callable[..., torch.Tensor], kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    step = compared(loss, "min", kind == "autocast", dtype)
    if loss is by_its_parts and kind == "autocast":  # which casts what lies between
        assert not is_tiled(step)
        return
    assert is_tiled(step) and step.plan is not None
    targets = {op.target for op in step.plan.graph.ops}
    assert not targets & {"aten._log_softmax.default", "aten.nll_loss_backward.default"}
    read = {step.plan.graph.tensors[op.inputs[0]].dtype for op in step.plan.graph.ops if op.target == "loss_of_rows"}
    assert read == {"float32" if kind == "float32" else "bfloat16"}, "a cast is part of the slices"


@pytest.mark.parametrize("loss", AS_IT_IS)
def test_others_stay_whole(loss: Callable[..., torch.Tensor]) -> None:
    assert not is_tiled(compared(loss, "min"))


def test_what_fits_stays_whole() -> None:
    assert not is_tiled(compared(plain, 1.0))
    assert not is_tiled(compared(plain, "1GiB"))


def test_tiling_can_be_turned_off(tmp_path: Path) -> None:
    off, on = compared(plain, "min", tiling="off"), compared(plain, "min")
    assert is_tiled(on) and not is_tiled(off)
    assert off.plan is not None and on.plan is not None
    assert on.plan.predicted_peak_bytes < off.plan.predicted_peak_bytes
    # What it is held against is the step as it was captured.
    assert on.plan.baseline_peak_bytes == off.plan.baseline_peak_bytes
    assert on.plan.baseline_seconds == off.plan.baseline_seconds
    assert on.plan.bound_scope == off.plan.bound_scope + ", of the step in this form"
    assert (
        on.plan.baseline_timeline().peak_bytes == on.plan.baseline_peak_bytes == off.plan.baseline_timeline().peak_bytes
    )
    on.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == on.plan


def test_the_lower_bound_is_that_of_the_form_that_is_planned() -> None:
    torch.manual_seed(0)
    module = Head(plain, width=64)
    module.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
    step = rematerialize(module, budget="40%", time_limit=2.0, cost_model="flops")
    step(torch.randint(0, CLASSES, (12, 30))).backward()
    assert is_tiled(step) and step.plan is not None
    assert (
        step.plan.gap < step.plan.overhead / 2
    )  # that of the step without rematerialization would leave all of it open
    assert step.plan.bound_scope.endswith("of the step in this form")


def test_what_is_infeasible_whole_is_planned_in_slices() -> None:
    least = compared(plain, "min", tiling="off").plan
    assert least is not None
    budget = f"{least.predicted_peak_bytes - 1}B"
    with pytest.raises(InfeasibleBudgetError):
        compared(plain, budget, tiling="off")
    step = compared(plain, budget)
    assert is_tiled(step) and step.plan is not None and step.plan.predicted_peak_bytes < least.predicted_peak_bytes


@pytest.mark.parametrize("loss", [plain, the_next_token])
def test_the_peak_is_as_predicted(loss: Callable[..., torch.Tensor]) -> None:
    """Little more than the logits: their gradient is written over them."""
    torch.manual_seed(0)
    module, tokens = Head(loss), torch.randint(0, CLASSES, (32, 64))
    step = rematerialize(module, budget="min", time_limit=0.5)

    def training_step() -> None:
        value = step(tokens)
        module.zero_grad(set_to_none=True)
        value.backward()

    training_step()
    training_step()
    held = held_bytes(module, (tokens,), gradients=True, device="cpu")
    above = peak_memory(training_step, "cpu")
    assert step.plan is not None and is_tiled(step)
    assert held + above <= step.plan.budget_bytes
    assert held + above == pytest.approx(step.plan.predicted_peak_bytes, rel=0.01)
    assert above < 1.15 * tokens.numel() * CLASSES * 4


def test_logits_that_are_returned_are_not_written_over() -> None:
    class WithLogits(Head):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            logits = self.head(self.embed(tokens))
            return plain(logits, tokens), logits  # type: ignore[return-value]

    torch.manual_seed(0)
    eager, tokens = WithLogits(plain), torch.randint(0, CLASSES, (6, 20))
    module = copy.deepcopy(eager)
    step = rematerialize(module, budget="min", time_limit=0.5)
    right, given = eager(tokens)
    for _ in range(2):
        loss, logits = step(tokens)
        loss.backward()
        assert torch.equal(loss, right) and torch.equal(logits, given)
    assert is_tiled(step)


def test_a_gradient_that_arrives_in_another_layout() -> None:
    """The graph is traced again for it, and is tiled again."""
    torch.manual_seed(0)
    eager, tokens = Head(lambda logits, tokens: logits), torch.randint(0, CLASSES, (6, 20))
    module = copy.deepcopy(eager)

    def losses(one: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = one(batch)
        return functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="none"), logits.mean(-1)

    step = rematerialize(lambda batch: losses(module, batch), "min", time_limit=0.5)
    for make in (
        lambda rows, means: rows.mean() + means.sum(),
        lambda rows, means: (means.t() @ rows.view(6, 20)).sum(),
    ):
        torch.manual_seed(2)
        make(*step(tokens)).backward()
        torch.manual_seed(2)
        make(*losses(eager, tokens)).backward()
        for one, other in zip(module.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert is_tiled(step)


def test_sizes_that_vary_are_planned_whole() -> None:
    torch.manual_seed(0)
    eager = Head(the_next_token)
    module = copy.deepcopy(eager)
    step = rematerialize(module, "min", time_limit=0.5, cost_model="flops")
    found = []
    for time in (20, 24, 28, 21):
        tokens = torch.randint(0, CLASSES, (12, time))
        for one, call in ((eager, eager), (module, step)):
            torch.manual_seed(time)
            one.zero_grad()
            call(tokens).backward()
        found.append(is_tiled(step))
        for one, other in zip(module.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert found[0] and not found[-1]


class OfManyClasses(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, CLASSES)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = (one.repeat_interleave(20, 0) for one in batch)
        return functional.cross_entropy(self.wide(self.net(x)), y)


def test_a_fit_has_eagers_bits() -> None:
    remat = callback(budget="min")
    compare(OfManyClasses, remat=remat)
    assert remat.plan is not None and "gradient_of_rows" in {op.target for op in remat.plan.graph.ops}
