"""The products around logits, in slices, under autocast: eager's bits, and no copy of the weight as a whole."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture.tiling import _heads, _losses, _sliced
from lightning_remat.measure import peak_memory
from tests.helpers.training import seeded_losses

CLASSES, WIDTH = 517, 40


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_sliced.LEAST_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(_losses.LEAST_BYTES, "cpu", 1 << 12)
    monkeypatch.setattr(_heads, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(_sliced, "_SEEN", {})


class Transposed(nn.Module):
    """A linear layer whose weight has the classes last."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, classes)), nn.Parameter(torch.randn(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:-1], -1)


class Model(nn.Module):
    """Tokens of shape (batch, time) to the loss of the next one, or of the token itself where some do not count."""

    def __init__(self, kind: str, shifted: bool = True, classes: int = CLASSES, width: int = WIDTH) -> None:
        super().__init__()
        self.shifted = shifted
        self.embed = nn.Embedding(classes, width)
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = (
            Transposed(width, classes) if kind == "transposed" else nn.Linear(width, classes, bias=kind == "with bias")
        )
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        logits = self.head(self.norm(x + functional.dropout(functional.gelu(self.layer(x)), 0.1)))
        if self.shifted:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        target = torch.where(tokens % 3 == 0, -100, tokens)
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def compared(eager: Model, half: bool = True, tiling: str = "exact") -> Rematerialized:
    """Train with and without a plan of the smallest peak, and compare all bits."""
    module, tokens = copy.deepcopy(eager), torch.randint(0, CLASSES, (12, 30))
    step = rematerialize(module, budget="min", time_limit=0.3, cost_model="flops", tiling=tiling)
    assert all(map(torch.equal, seeded_losses(module, step, tokens, half), seeded_losses(eager, eager, tokens, half)))
    for (name, one), other in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), name
    assert len(step.plans) == 1 and not step.failures and step.plan is not None
    assert "gradient_of_rows" in {op.target for op in step.plan.graph.ops}
    return step


def whole_copies(step: Rematerialized) -> int:
    """How many tensors of half precision there are that are as large as the weight."""
    assert step.plan is not None
    found = [one for one in step.plan.graph.tensors if one.dtype == "bfloat16"]
    return sum(math.prod(one.shape) == CLASSES * WIDTH for one in found)


def products_in_slices(step: Rematerialized) -> int:
    assert step.plan is not None
    return sum(
        op.target.startswith("in_slices") and any(CLASSES in step.plan.graph.tensors[t].shape for t in op.inputs)
        for op in step.plan.graph.ops
    )


@pytest.mark.parametrize(
    ("kind", "shifted"), [("tied", True), ("untied", False), ("with bias", True), ("transposed", False)]
)
def test_the_weight_is_cast_in_slices(kind: str, shifted: bool) -> None:
    torch.manual_seed(0)
    step = compared(Model(kind, shifted))
    assert whole_copies(step) == 0
    assert products_in_slices(step) == 3


class OfTwoTargets(Model):
    """Two losses of the same logits, which are those of rows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(functional.gelu(self.layer(self.embed(tokens.flatten())))))
        losses = (functional.cross_entropy(logits, target.flatten()) for target in (tokens, tokens.flip(1)))
        return sum(losses, torch.zeros(()))


def test_two_losses_of_the_same_logits() -> None:
    torch.manual_seed(0)
    step = compared(OfTwoTargets("tied"))
    assert whole_copies(step) == 0
    assert products_in_slices(step) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_cast_is_multiplied_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert products_in_slices(compared(Model("with bias").to(dtype), half=False)) == 0


def test_where_losses_alone_are_asked_for_products_are_whole() -> None:
    """Slices of products are ops of their own at each batch size, and batch sizes are predicted from others."""
    torch.manual_seed(0)
    assert products_in_slices(compared(Model("tied"), tiling="losses")) == 0


def test_slices_that_would_have_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what runs in slices rounds otherwise, products stay whole."""
    run = _sliced.Chain.run

    def wrong(
        chain: _sliced.Chain, *tensors: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        first, *others = run(chain, *tensors, out=out)
        first[-1, -1] *= 1.01
        return first, *others

    monkeypatch.setattr(_sliced.Chain, "run", wrong)
    torch.manual_seed(0)
    step = compared(Model("tied"))
    assert products_in_slices(step) == 0 and whole_copies(step) > 0


def test_the_peak_is_little_more_than_the_logits() -> None:
    """With copies of the weight beside them it would be half more."""
    torch.manual_seed(0)
    classes, width = 8009, 256
    module, tokens = Model("untied", True, classes, width), torch.randint(0, classes, (8, 64))
    step = rematerialize(module, budget="min", time_limit=0.3, cost_model="flops")

    def training_step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(tokens)
        module.zero_grad(set_to_none=True)
        loss.backward()

    training_step()
    training_step()
    assert peak_memory(training_step, "cpu") < 1.25 * tokens.numel() * classes * 2
