"""Critics: gradient penalties, and several losses of one forward, in manual optimization for the most part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat.planner import RematWarning
from tests.helpers.training import assert_same, fit
from tests.models.wild import Wild, assert_in_parts, assert_whole, model_name, tight


class GradientPenalty(Wild):
    """WGAN-GP in one automatic step: the critic's gradient at points between real and made ones."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        made = torch.randn_like(x)
        mix = torch.rand(len(x), 1)
        between = (mix * x + (1 - mix) * made).requires_grad_()
        score = self.head(self.features(between)).sum(1)
        (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        return self.head(self.features(made)).mean() - self.head(self.features(x)).mean() + 10 * penalty


class CriticByHand(Wild):
    """WGAN-GP in manual optimization: the penalty is differentiated in `manual_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        with torch.no_grad():
            made = self.net(torch.randn_like(x))
        between = (0.5 * x + 0.5 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        loss = self.critic(made).mean() - self.critic(x).mean() + (gradient.norm(dim=1) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        other = -self.critic(self.net(torch.randn_like(x))).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()
        self.log_dict({"critic": loss, "generator": other})

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.net, self.critic)]


class TwoLosses(CriticByHand):
    """Two losses of one forward, each with a backward of its own: what is made is judged twice."""

    retained = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.net(batch[0])
        loss = self.critic(made.detach()).square().mean()
        second.zero_grad()
        self.manual_backward(loss, retain_graph=self.retained)
        second.step()
        other = -self.critic(made).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()


class TwoLossesRetained(TwoLosses):
    """And what the first backward may give up is kept, although the critic has changed by then."""

    retained = True


class RetainedTwice(CriticByHand):
    """Two losses of one forward, whose gradients are added up."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        judged = self.critic(self.net(batch[0]))
        losses = judged.square().mean(), -judged.mean()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(losses[0], retain_graph=True)
        self.manual_backward(losses[1])
        first.step()
        second.step()


class CriticInALoop(CriticByHand):
    """Several steps of the critic for one of the other, in a loop, which Dynamo leaves alone; both are ``nn.Sequential``."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        for _ in range(2):
            with torch.no_grad():
                made = self.net(torch.randn_like(x))
            second.zero_grad()
            self.manual_backward(self.critic(made).mean() - self.critic(x).mean())
            second.step()
        first.zero_grad()
        self.manual_backward(-self.critic(self.net(torch.randn_like(x))).mean())
        first.step()


class FixedPoint(Wild):
    """A `deep equilibrium model <https://arxiv.org/abs/1909.01377>`_: a hook differentiates another evaluation of its layer."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            reached = torch.zeros_like(x)
            for _ in range(4):
                reached = self.layer(reached, x)
        reached = self.layer(reached, x)
        start = reached.detach().requires_grad_()
        once = self.layer(start, x)

        def solved(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(4):
                found = torch.autograd.grad(once, start, found, retain_graph=True)[0] + gradient
            return found

        reached.register_hook(solved)
        return nn.functional.cross_entropy(self.head(reached), y)

    def layer(self, reached: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net(reached) / 4 + x)


WHOLE = [GradientPenalty, RetainedTwice]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_PARTS = [CriticByHand, CriticInALoop]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)


@pytest.mark.parametrize("make", [TwoLosses, TwoLossesRetained])
def test_two_backwards_through_one_graph(make: type[Wild]) -> None:
    """The first step ends as it would have; those after it run as before."""
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match="two backwards come through one captured graph"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and sum(remat.runs) == 2
    assert any(plan.rematerializes for plan in remat.plans)


def test_a_hook_that_differentiates() -> None:
    """Its backward comes through what the loss's has come through: the first step ends, those after it run as before."""
    plain, remat = fit(FixedPoint, train=FixedPoint.train_loader), tight()
    with pytest.warns(RematWarning, match="two backwards come through one captured graph"):
        run = fit(FixedPoint, remat, train=FixedPoint.train_loader)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and sum(remat.runs) >= 1
