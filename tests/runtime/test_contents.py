"""What modules are made of: what is usual in people's code is captured whole, and trains to eager's bits."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.planner import RematWarning
from tests.helpers.nets import Net, captured_whole, check, inputs, net

Forward = Callable[..., torch.Tensor]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2.5 * gradient * x * x  # not the true one, so that it is seen to be used


log = logging.getLogger("somebody")


class TestContents:
    @pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # Dynamo's own doing
    def test_autograd_function(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            return self.last(Cube.apply(functional.dropout(self.first(x), 0.2))).square().mean()

        assert captured_whole(check(net(forward), inputs()))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint(self, reentrant: bool) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            def block(x: torch.Tensor) -> torch.Tensor:
                return functional.dropout(self.middle(x).relu(), 0.15)

            x = torch.utils.checkpoint.checkpoint(block, self.first(x), use_reentrant=reentrant)
            return self.last(x).square().mean()

        assert captured_whole(check(net(forward, middle=nn.Linear(32, 32)), inputs()))

    @pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
    def test_spectral_norm(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.normed(self.first(x).relu()).tanh()).square().mean()

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older one is deprecated, and still much used
            normed = wrap(nn.Linear(32, 32))
        assert captured_whole(check(net(forward, normed=normed), inputs(), steps=3), 3)

    def test_a_counter_and_a_codebook(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            nearest = torch.cdist(hidden, self.codes).argmin(1)
            quantized = self.codes[nearest]
            with torch.no_grad():
                chosen = functional.one_hot(nearest, len(self.codes)).float()
                self.codes.mul_(0.99).add_(chosen.t() @ hidden, alpha=0.01)
                self.calls += 1
            straight = hidden + (quantized - hidden).detach()
            return self.last(straight).square().mean() + functional.mse_loss(hidden, quantized.detach())

        module = net(forward)
        module.register_buffer("codes", torch.randn(10, 32))
        module.register_buffer("calls", torch.zeros((), dtype=torch.long))
        assert captured_whole(check(module, inputs(), steps=3), 3)

    def test_fused_arithmetic_stays_fused(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x, alpha=0.1)
                self.average.addcmul_(x, x, value=0.3).addcdiv_(x, x.exp(), value=0.7).lerp_(x, 0.3)
            return self.last(self.first(torch.addcdiv(x, self.average, x.exp(), value=0.3))).square().mean()

        module = net(forward)
        module.register_buffer("average", torch.rand(32, 8))
        assert captured_whole(check(module, inputs(), steps=3), 3)

    def test_random_numbers_that_nobody_uses_are_drawn(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            functional.dropout(x, 0.5)
            return self.last(functional.dropout(self.first(x), 0.15)).square().mean()

        assert captured_whole(check(net(forward), inputs(), steps=3), 3)

    def test_random_ops_that_name_their_device_are_replayed(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                picked = torch.randint(0, 32, (32,))
                x = x[picked].sin() * torch.rand(x.shape).exp()
            return self.last(self.first(x).tanh()).square().mean()

        assert captured_whole(check(net(forward), inputs(64)[:32]))

    @pytest.mark.long
    def test_autocast(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.norm(functional.dropout(self.first(x), 0.15))
                with torch.autocast("cpu", enabled=False):
                    x = self.middle(x.float()).tanh()
                x = self.last(x)
            return x.float().square().mean()

        step = check(net(forward, norm=nn.LayerNorm(32), middle=nn.Linear(32, 32)), inputs())
        assert captured_whole(step)
        assert step.plan is not None and any(t.dtype == "bfloat16" for t in step.plan.graph.tensors)

    def test_bfloat16(self) -> None:
        module = net(norm=nn.BatchNorm1d(32))
        module.run = lambda self, x: self.last(functional.dropout(self.norm(self.first(x)), 0.15)).square().mean()
        assert captured_whole(check(module.bfloat16(), inputs().bfloat16()))

    @pytest.mark.long
    def test_a_gradient_penalty_inside_is_part_of_the_graph(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            score = self.last(functional.dropout(self.norm(self.first(x)).tanh(), 0.15))
            (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.mean() + (gradient.norm(dim=1) - 1).square().mean()

        assert captured_whole(check(net(forward, norm=nn.BatchNorm1d(32)), inputs()))

    def test_a_gradient_penalty_outside_is_eagers_and_runs_as_before(self) -> None:
        module = net(lambda self, x: self.last(self.first(x).tanh()).sum())
        other = copy.deepcopy(module)
        step = rematerialize(other, budget=1.0, cost_model="unit")

        def penalize(call: Forward) -> None:
            x = inputs().requires_grad_()
            (gradient,) = torch.autograd.grad(call(x), x, create_graph=True)
            gradient.square().sum().backward()

        for _ in range(2):
            penalize(module)
        with pytest.warns(RematWarning, match="differentiated again"):
            penalize(step)
        penalize(step)  # from now on it runs as before
        assert step.runs == (1,)
        assert module.first.weight.grad is not None and other.first.weight.grad is not None
        assert torch.equal(module.first.weight.grad, other.first.weight.grad)

    @pytest.mark.long
    def test_gpt2_with_labels_is_one_graph(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=60, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        tokens = torch.randint(0, 60, (2, 16))
        step = check(GPT2LMHeadModel(config).train(), kwargs={"input_ids": tokens, "labels": tokens})
        assert captured_whole(step)

    def test_logging_does_not_break_the_graph(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            log.warning("a shape: %s", tuple(x.shape))
            return self.last(x).square().mean()

        assert captured_whole(check(net(forward), inputs()))
