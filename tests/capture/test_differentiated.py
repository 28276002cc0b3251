"""Gradients of a captured loss that are differentiated again outside of it: ``backward(create_graph=True)``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat import rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.planner import RematWarning

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")

AGAIN = "differentiated again"
TARGETS = torch.arange(8) % 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Classifier(nn.Module):
    """Batch norm, dropout, and SiLU, whose gradient eager mode computes otherwise where it is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(16, 32), nn.Linear(32, 32)
        drops = nn.Dropout(0.2), nn.Dropout(0.2)
        self.layers = nn.Sequential(
            first, nn.BatchNorm1d(32), nn.SiLU(), drops[0], second, nn.Tanh(), drops[1], nn.Linear(32, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(x), TARGETS)


class Averaging(Classifier):
    """Keeps an average of its input, and a parameter without a gradient that it moves, neither of them twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.frozen.mul_(0.9)
        return super().forward(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(x.view(8, 3, 4, 4)).mean((2, 3)), TARGETS)


class Tied(nn.Module):
    """A weight that is read twice, with ids for inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, 0].abs().mul(4).long().clamp(max=15)
        return functional.cross_entropy(functional.linear(self.layer(self.embed(ids)).tanh(), self.embed.weight), ids)


class Mixed(Classifier):
    """Under autocast, which is entered in the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Potential(nn.Module):
    """An energy, and the forces that are its gradient, which the loss is made of."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(3, 8), nn.Linear(8, 1), breaks

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if self.breaks != "before the forces":
            torch._dynamo.graph_break()
        return self.last(hidden).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        energy = self.energy(x)
        if self.breaks != "within":
            torch._dynamo.graph_break()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + slope.square().sum()


class Pairs(Potential):
    """Reads the positions, and its weights, several times in each part."""

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x[:2] - x[2:]).tanh() * self.first(x[:2])
        torch._dynamo.graph_break()
        return self.last(hidden * self.first(x[2:] * x[:2])).sum() + self.last(hidden).square().sum()


class Laplacian(Potential):
    def __init__(self) -> None:
        super().__init__("")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        found = self.last(self.first(x).tanh())
        torch._dynamo.graph_break()
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (curvature[:, 0] + found[:, 0]).square().sum()


class InnerSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))

    def adapted(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = functional.cross_entropy(torch.func.functional_call(self.net, weights, (x,)), TARGETS)
        torch._dynamo.graph_break()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return {name: one - 0.1 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.adapted(self.adapted(dict(self.net.named_parameters()), x), x)
        return functional.cross_entropy(torch.func.functional_call(self.net, weights, (x + 1,)), TARGETS)


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in module.parameters() if one.grad is not None]


def hessian_steps(
    module: nn.Module, call: Callable[..., torch.Tensor], width: int, every: int = 1
) -> list[torch.Tensor]:
    """Four steps by the gradient and by the Hessian's product with a random vector: all that came of them."""
    parameters = [one for one in module.parameters() if one.requires_grad]
    found = []
    for step in range(4):
        torch.manual_seed(step)
        loss = call(random(8, width, seed=step))
        twice = step % every == every - 1
        loss.backward(create_graph=twice)
        gradients = [one.grad for one in parameters]
        found += [loss.detach(), *(one.detach().clone() for one in gradients)]
        if twice:
            vectors = [torch.randn_like(one) for one in parameters]
            found += torch.autograd.grad(gradients, parameters, vectors)
        with torch.no_grad():
            for one, change in zip(parameters, found[-len(parameters) :], strict=True):
                one.sub_(0.01 * change)
                one.grad = None
    return [*found, *(one.detach().clone() for one in module.state_dict().values()), torch.get_rng_state()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class TestDifferentiated:
    @pytest.mark.parametrize(
        ("make", "width"), [(Classifier, 16), (Averaging, 16), (Convolutions, 48), (Tied, 2), (Mixed, 16)]
    )
    def test_second_derivatives_are_those_of_eager_mode(self, make: type[nn.Module], width: int) -> None:
        torch.manual_seed(0)
        module = make()
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN) as warned:
            found = hessian_steps(other, step, width)
        assert [one.category for one in warned].count(RematWarning) == 1 and step.runs == (1,)
        assert_same(found, hessian_steps(module, module, width))

    def test_a_later_step(self) -> None:
        torch.manual_seed(0)
        module = Classifier()
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN):
            found = hessian_steps(other, step, 16, every=3)
        assert step.runs == (3,)
        assert_same(found, hessian_steps(module, module, 16, every=3))

    def test_the_error_is_announced_where_the_inputs_are_gone(self) -> None:
        module = Classifier()
        step = rematerialize(lambda x: module(x + 1), budget=1.0, cost_model="unit")
        x = random(8, 16, seed=0).requires_grad_()
        step(x * 2).backward()
        loss = step(x * 2)
        with (
            pytest.warns(RematWarning, match=AGAIN),
            pytest.warns(RematWarning, match="what the graph was given is gone"),
        ):
            loss.backward(create_graph=True)
        weight = module.layers[0].weight
        assert weight.grad is not None
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(weight.grad.square().sum(), weight)
        for one in module.parameters():
            one.grad = None

    def test_a_penalty_beside_a_score(self) -> None:
        """The score's gradient and the penalty's meet at each activation, as in eager mode, and not at the weights."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")

        def penalized(call: Callable[..., torch.Tensor]) -> None:
            x = random(8, 16, seed=1).requires_grad_()
            score = call(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            (score.mean() + slope.square().sum()).backward()

        with pytest.warns(RematWarning, match=AGAIN):
            penalized(step)
        penalized(module)
        assert step.runs == (1,)
        assert_same(gradients_of(other), gradients_of(module))

    def test_a_loss_outside(self) -> None:
        torch.manual_seed(0)
        module = Classifier().layers
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN):
            found = hessian_steps(other, lambda x: functional.cross_entropy(step(x), TARGETS), 16)
        assert_same(found, hessian_steps(module, lambda x: functional.cross_entropy(module(x), TARGETS), 16))

    @pytest.mark.parametrize("breaks", ["within", "before the forces", "at both"])
    def test_forces_in_a_step_in_parts(self, breaks: str) -> None:
        """The step differentiates, with a graph, what an earlier part of it has computed."""
        torch.manual_seed(0)
        module = Potential(breaks)
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN):
            step(random(4, 3, seed=1)).backward()
        module(random(4, 3, seed=1)).backward()
        assert sum(step.runs) >= 1
        assert_same(gradients_of(other), gradients_of(module))

    def test_inner_steps_in_parts(self) -> None:
        """Two steps by gradients before the loss, each with a graph: the second differentiates those of the first."""
        torch.manual_seed(0)
        module = InnerSteps()
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN):
            step(random(8, 16, seed=1)).backward()
        module(random(8, 16, seed=1)).backward()
        assert sum(step.runs) >= 1
        assert_same(gradients_of(other), gradients_of(module))

    def test_what_two_parts_read_often_is_told_of(self) -> None:
        torch.manual_seed(0)
        module = Pairs("within")
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN), pytest.warns(RematWarning, match="may have other last bits"):
            step(random(4, 3, seed=1)).backward()
        module(random(4, 3, seed=1)).backward()
        assert sum(step.runs) >= 2
        for one, two in zip(gradients_of(other), gradients_of(module), strict=True):
            torch.testing.assert_close(one, two)

    @pytest.mark.parametrize("views", [lambda h: (h[:, :2], h[:, 2:], h), lambda h: h.chunk(2, 1), lambda h: (h.t(),)])
    def test_what_it_returns_are_views(self, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))
        other = copy.deepcopy(module)
        step = rematerialize(lambda x: views(other(x)), budget="min", cost_model="unit")

        def penalized(call: Callable[..., Any]) -> None:
            x = random(8, 16, seed=1).requires_grad_()
            parts = call(x)
            (slope,) = torch.autograd.grad(sum(one.sin().sum() for one in parts), x, create_graph=True)
            (slope.square().sum() + sum(one.square().sum() for one in parts)).backward()

        with pytest.warns(RematWarning, match=AGAIN):
            penalized(step)
        penalized(lambda x: views(module(x)))
        assert step.runs == (1,)
        assert_same(gradients_of(other), gradients_of(module))

    def test_gradients_one_by_one_are_told_of(self) -> None:
        """Of an output that is gone: eager mode adds up, at each activation, what comes of all of them."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")

        def penalized(call: Callable[..., torch.Tensor]) -> None:
            x = random(8, 16, seed=1).requires_grad_()
            sums = call(x).sum(0)
            slopes = [torch.autograd.grad(one, x, create_graph=True)[0] for one in sums]
            torch.stack(slopes).square().sum().backward()

        with pytest.warns(RematWarning, match=AGAIN), pytest.warns(RematWarning, match="may have other last bits"):
            penalized(step)
        penalized(module)
        for one, two in zip(gradients_of(other), gradients_of(module), strict=True):
            torch.testing.assert_close(one, two)

    def test_several_gradients_at_once(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 3))
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        rows = torch.eye(3)[:, None].expand(3, 8, 3)

        def jacobian(call: Callable[..., torch.Tensor]) -> torch.Tensor:
            torch.manual_seed(1)
            x = random(8, 16, seed=1).requires_grad_()
            scores = call(x)
            (found,) = torch.autograd.grad(scores, x, rows, retain_graph=True, is_grads_batched=True)
            scores.sum().backward()
            return found

        with pytest.warns(RematWarning, match="several gradients of it are computed at once"):
            found = jacobian(step)
        assert step.runs == (1,)
        assert torch.equal(found, jacobian(module))
        assert_same(gradients_of(other), gradients_of(module))

    def test_a_laplacian_behind_a_graph_break(self) -> None:
        torch.manual_seed(0)
        module = Laplacian()
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit")
        with pytest.warns(RematWarning, match=AGAIN), pytest.warns(RematWarning, match="may have other last bits"):
            step(random(4, 3, seed=1)).backward()
        module(random(4, 3, seed=1)).backward()
        for one, two in zip(gradients_of(other), gradients_of(module), strict=True):
            torch.testing.assert_close(one, two)

    def test_third_derivatives_are_told_of(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        other = copy.deepcopy(module)
        step = rematerialize(other, budget=1.0, cost_model="unit")

        def third(call: Callable[..., torch.Tensor]) -> None:
            x = random(8, 16, seed=1).requires_grad_()
            (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
            curvature.square().sum().backward()

        with pytest.warns(RematWarning, match=AGAIN), pytest.warns(RematWarning, match="may have other last bits"):
            third(step)
        third(module)
        for one, two in zip(gradients_of(other), gradients_of(module), strict=True):
            torch.testing.assert_close(one, two)

    @pytest.mark.filterwarnings(f"ignore:.*{AGAIN}:lightning_remat.planner.RematWarning")
    @pytest.mark.parametrize("since", [0, 2])
    def test_parts_of_a_batch_that_nothing_else_keeps(self, since: int) -> None:
        """Several calls of one graph in a step are given slices of a batch, which are gone when its backward comes."""
        torch.manual_seed(0)
        original = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        found = []
        for scheduled in (False, True):
            module = copy.deepcopy(original)
            call = rematerialize(module, budget="min", cost_model="unit") if scheduled else module
            steps = []
            for step in range(4):
                x = random(8, 8, seed=step)
                loss = call(x[:4]).square().mean() + call(x[4:]).sin().mean()
                if step >= since:
                    slopes = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
                    loss = loss + sum(one.square().sum() for one in slopes)
                module.zero_grad()
                loss.backward()
                steps += [loss.detach(), *gradients_of(module)]
            found.append(steps)
        assert_same(found[1], found[0])
        assert AGAIN in " ".join(call.failures)
        assert sum(call.runs) == 2 * (since + 1)


class AdaHessian(torch.optim.Optimizer):
    """Divides by an average of the Hessian's diagonal, as Hutchinson's method estimates it (Yao et al., 2021)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        vectors = [torch.randint_like(one, high=2) * 2.0 - 1 for one in parameters]
        products = torch.autograd.grad([one.grad for one in parameters], parameters, vectors)
        with torch.no_grad():
            for one, vector, product in zip(parameters, vectors, products, strict=True):
                state = self.state[one]
                state["diagonal"] = 0.9 * state.get("diagonal", 0) + 0.1 * (product * vector).abs()
                one.sub_(0.05 * one.grad.detach() / (state["diagonal"].sqrt() + 0.01))
                one.grad = None
        return loss


class OfSecondOrder(pl.LightningModule):
    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.net = Classifier()

    def training_step(self, batch: torch.Tensor, _batch_idx: int) -> torch.Tensor:
        loss = self.net(batch)
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss, create_graph=True)
            self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **{**kwargs, "create_graph": True})

    def configure_optimizers(self) -> Any:
        return AdaHessian(self.parameters())


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.filterwarnings("ignore:the memory of AdaHessian's state cannot be found:lightning_remat.RematWarning")
def test_a_trainer_with_an_optimizer_of_second_order(automatic: bool) -> None:
    def trained(*callbacks: pl.Callback) -> list[torch.Tensor]:
        pl.seed_everything(0, verbose=False)
        module = OfSecondOrder(automatic)
        trainer = pl.Trainer(
            max_steps=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        trainer.fit(module, DataLoader(random(32, 16, seed=1), batch_size=8))  # type: ignore[arg-type]
        return [*module.state_dict().values(), trainer.callback_metrics["loss"], torch.get_rng_state()]

    callback = RematCallback(budget="min")
    with pytest.warns(RematWarning, match=AGAIN):
        found = trained(callback)
    assert callback.runs == (1,)
    assert_same(found, trained())
