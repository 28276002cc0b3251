"""Four real networks at several budgets: eager's bits, and the measured peak within the budget and as predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import InfeasibleBudgetError, Rematerialized, rematerialize
from lightning_remat.measure import held_bytes, peak_memory
from tests.helpers.cases import slow_but

STEPS = 3
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class NextToken(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Translate(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(source, target), target)


class MeanSquare(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).square().mean()


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3,
        n_embd=128,
        n_head=4,
        vocab_size=500,
        n_positions=64,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return NextToken(GPT2LMHeadModel(config)), (torch.randint(0, 500, (4, 64)),)


def transformer() -> Made:
    model = nn.Transformer(64, 4, 2, 2, dim_feedforward=256, dropout=0.1, batch_first=True)
    return Translate(model), (torch.randn(4, 48, 64), torch.randn(4, 48, 64))


def resnet() -> Made:
    from pytorchcv.models.resnet import resnet18

    return MeanSquare(resnet18()), (torch.randn(1, 3, 224, 224),)


def unet() -> Made:
    from pytorchcv.models.unet import unet_cityscapes

    return MeanSquare(unet_cityscapes(in_size=(64, 64))), (torch.randn(1, 3, 64, 64),)


class Outcome:
    """What a training run leaves behind: losses, gradients of every step, parameters, buffers, optimizer and RNG state."""

    def __init__(self, module: nn.Module, step: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.found: dict[str, torch.Tensor] = {}
        for number in range(STEPS):
            loss = step(*batch)
            self.found[f"loss {number}"] = loss.detach()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, name
                self.found[f"gradient {number} of {name}"] = parameter.grad.clone()
            optimizer.step()
        self.found["random state"] = torch.get_rng_state()
        for name, value in module.state_dict().items():
            self.found[f"state {name}"] = value.clone()

    def assert_same(self, other: Outcome) -> None:
        assert self.found.keys() == other.found.keys()
        wrong = [name for name, value in self.found.items() if not torch.equal(value, other.found[name])]
        assert not wrong


_eager: dict[Callable[[], Made], tuple[nn.Module, tuple[torch.Tensor, ...], Outcome]] = {}


def eager(make: Callable[[], Made]) -> tuple[nn.Module, tuple[torch.Tensor, ...], Outcome]:
    """A fresh copy of the network, the batch, and what eager training does; trained once a network."""
    if make not in _eager:
        torch.manual_seed(0)
        module, batch = make()
        trained = copy.deepcopy(module)
        _eager[make] = module, batch, Outcome(trained, trained, batch)
    module, batch, outcome = _eager[make]
    return copy.deepcopy(module), batch, outcome


def check_budget(step: Rematerialized, module: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    """One more step, measured, in Lightning's order: forward, zero_grad, backward."""

    def training_step() -> None:
        loss = step(*batch)
        module.zero_grad(set_to_none=True)
        loss.backward()

    plan = step.plan
    assert plan is not None
    held = held_bytes(module, batch, gradients=True)
    measured = held + peak_memory(training_step, "cpu")
    assert measured <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("share", slow_but({1.0, 0.4}, [1.0, 0.8, 0.6, 0.4]))
@pytest.mark.parametrize("make", [gpt2, transformer, resnet, unet])
def test_trains_with_eagers_bits_within_the_budget(make: Callable[[], Made], share: float) -> None:
    module, batch, right = eager(make)
    before = copy.deepcopy(module.state_dict())
    step = rematerialize(module, budget=share)
    infeasible = None
    try:
        outcome = Outcome(module, step, batch)
    except InfeasibleBudgetError as error:
        infeasible = error
        step = rematerialize(module, budget="min")
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())  # nothing has run
        outcome = Outcome(module, step, batch)
    if infeasible is not None:
        assert share < 1 and infeasible.op and infeasible.op in str(infeasible)
        assert infeasible.budget_bytes < infeasible.smallest_bytes
    outcome.assert_same(right)
    assert step.runs == (STEPS,) and not step.failures
    assert step.plan is not None and step.plan.rematerializes == (share < 1)
    check_budget(step, module, batch)
