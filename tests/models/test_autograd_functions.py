"""Autograd functions of the user's own, and hooks: on activations, modules, weights and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.wild import OLD, Wild, assert_in_parts, assert_only_a_rest, assert_whole, model_name


class Round(torch.autograd.Function):
    """Rounds; the gradient goes straight through where the number is in range."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
        inside = x.abs() <= limit
        ctx.save_for_backward(inside)
        ctx.mark_non_differentiable(inside)
        ctx.limit = limit
        return (x * 4).round() / 4, inside

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, None]:
        (inside,) = ctx.saved_tensors
        return (gradient * inside if ctx.needs_input_grad[0] else None), None


class Reverse(torch.autograd.Function):
    """Gradient reversal, in the newer form with `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, strength: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * gradient, None


class GradientReversal(Wild):
    """Domain-adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        domain = self.domain(Reverse.apply(h, 0.3)).squeeze(1)
        truth = (y % 2).float()
        return functional.cross_entropy(self.head(h), y) + functional.binary_cross_entropy_with_logits(domain, truth)


class InPlace(torch.autograd.Function):
    """Writes over its input, and keeps what it needs on the context itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.clamp_(-1, 1)
        ctx.inside = x.abs() < 1
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.inside


class OnTheContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.inside = x.abs() < 1
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.inside


class Noisy(torch.autograd.Function):
    """Gradients get noise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-3 * torch.randn_like(gradient)


class UserFunctions(Wild):
    """Functions of the user's own: straight through, in place, with the context as a notebook, and with noisy gradients."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = Round.apply(self.net(x), 1.5)
        x = Noisy.apply(OnTheContext.apply(3 * InPlace.apply(2 * x)))
        return self.net(x).tanh()


class OwnCheckpoint(torch.autograd.Function):
    """Somebody's own checkpoint: the backward runs the block again, and autograd in it."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.block(x)
        return None, *torch.autograd.grad(output, [x, *weights], gradient)


class CheckpointedByHand(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(self.net(x).sin())
        return OwnCheckpoint.apply(self.net[0], x, *self.net[0].parameters()).tanh().mean(1, keepdim=True) * x


class HookedActivations(Wild):
    """Gradients of activations are clipped, and get noise, on their way."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        x.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))
        return self.net(x)


class KeepsAGradient(Wild):
    """Grad-CAM: the gradient of an activation is kept, and read after the backward."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.net(x)
        self.kept.retain_grad()
        return self.kept.tanh()

    def on_after_backward(self) -> None:
        self.seen.append(self.kept.grad.clone())

    def on_train_end(self) -> None:
        del self.kept


class Hooked(Wild):
    """Forward hooks that look, and that change what goes in and comes out; hooks on weights and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: dict[str, torch.Tensor] = {}
        self.net[2].register_forward_hook(self.look)
        self.net[0].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
        self.net[1].register_forward_hook(lambda _module, _inputs, output: output + 1)
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        self.net[2].weight.register_post_accumulate_grad_hook(clamp_gradient)

    def look(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.looked["last"] = output

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.looked["last"].square().mean()

    def on_train_end(self) -> None:
        self.looked.clear()


def clamp_gradient(p: nn.Parameter) -> None:
    p.grad.clamp_(-1e-3, 1e-3)


class HookedBackward(Wild):
    """Full backward hooks: one that looks, and one that changes the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_full_backward_hook(self.look)
        self.net[2].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))

    def look(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append(outputs[0].detach().clone())


WHOLE = [GradientReversal, UserFunctions, *([] if OLD else [CheckpointedByHand]), HookedActivations, Hooked]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_PARTS = [KeepsAGradient, *([CheckpointedByHand] if OLD else [])]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)


A_REST = [HookedBackward]


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)
