"""What a step does beside what it returns: assertions, operators that return nothing, prints, overwritten arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import RematWarning, rematerialize
from lightning_remat.callbacks import RematCallback
from lightning_remat.graph import Phase
from lightning_remat.runtime import _captures
from tests.helpers.asserting import asserted, asserted_without_words
from tests.helpers.training import Classifier, assert_same, fit, loader

seen: list[tuple[Any, ...]] = []
"""What operators were called with, in order, and where."""


def note(name: str, x: torch.Tensor) -> None:
    where = "backward" if torch._C._current_autograd_node() is not None else "forward"
    seen.append((name, where, x.detach().double().sum().item()))


@torch.library.custom_op("remat_effects::tell", mutates_args=())
def tell(x: torch.Tensor, name: str) -> None:
    note(name, x)


tell.register_fake(lambda x, name: None)


@torch.library.custom_op("remat_effects::told", mutates_args=())
def told(x: torch.Tensor, name: str) -> torch.Tensor:
    note(name, x)
    return x.clone()


@told.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("remat_effects::draw", mutates_args=())
def draw(x: torch.Tensor) -> None:
    note("draw", torch.rand(()))


draw.register_fake(lambda x: None)


@torch.library.custom_op("remat_effects::count_", mutates_args=("counter",))
def count_(counter: torch.Tensor, x: torch.Tensor) -> None:
    note("count_", counter)
    counter += x.sum().abs()


count_.register_fake(lambda counter, x: None)


@torch.library.custom_op("remat_effects::require", mutates_args=())
def require(condition: torch.Tensor) -> None:
    if not condition:
        raise KeyError("so it is not")


require.register_fake(lambda condition: None)


class Look(torch.autograd.Function):
    """What the backward sees is told there, and numbers are drawn that are told too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        tell(x, "saved")
        tell(torch.rand(3), "drawn")
        tell(gradient, "gradient")
        return gradient * torch.rand_like(x)


LAYERS = 2


class Net(nn.Module):
    """Layers, between which ``effect`` is called."""

    def __init__(self, effect: Callable[[Net, torch.Tensor], Any]) -> None:
        super().__init__()
        self.effect = effect
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)) for _ in range(LAYERS)
        )
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            changed = self.effect(self, x)
            x = x if changed is None else changed
        return x.square().mean()


def train(call: Callable[..., Any], module: nn.Module, steps: int = 3) -> tuple[list[torch.Tensor], list[Any]]:
    """Losses, gradients, parameters and buffers; and what was seen."""
    torch.manual_seed(3)
    seen.clear()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = []
    for _ in range(steps):
        loss = call(torch.randn(256, 32))
        module.zero_grad(set_to_none=True)
        seen.append(("loss",))
        loss.backward()
        seen.append(("step",))
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
    return [*found, *(t.detach().clone() for t in module.state_dict().values())], list(seen)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(effect: Callable[[Net, torch.Tensor], Any], budget: Any, **options: Any) -> Any:
    """The step, after it has done what eager mode does, whole and planned."""
    torch.manual_seed(0)
    eager = Net(effect)
    module = copy.deepcopy(eager)
    expected, events = train(eager, eager)
    options = {"cost_model": "unit", "time_limit": 2.0, **options}
    call = rematerialize(module, budget=budget, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        found, ours = train(call, module)
    assert ours == events
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert not call.failures
    assert call.runs == (3,)
    assert call.plan.rematerializes or budget == 1.0
    return call


def telling(net: Net, x: torch.Tensor) -> None:
    tell(x, "x")
    draw(x)
    told(x.detach(), "unread")
    tell(x.square(), "square")


def in_the_backward(net: Net, x: torch.Tensor) -> torch.Tensor:
    tell(x, "x")
    return Look.apply(x)


def asserting(net: Net, x: torch.Tensor) -> None:
    torch._assert_async(x.isfinite().all())
    torch._assert_async(x.isfinite().all(), assert_msg="finite")
    torch._assert(x.isfinite().all(), "finite")
    asserted(x.isfinite().all())
    asserted_without_words(x.isfinite().all())
    torch._assert_scalar(x.shape[0] > 1, "rows")
    torch._check(x.shape[1] == 32)
    require(x.isfinite().all())


def with_tokens(net: Net, x: torch.Tensor) -> None:
    token = torch.ops.aten._make_dep_token()
    torch.ops.aten._functional_assert_async.msg(x.isfinite().all(), "finite", token)
    torch.ops.aten._functional_sym_constrain_range(x.shape[0], 1, None, token)
    torch.ops.aten.sym_constrain_range(x.shape[0], min=1, max=None)
    tell(x, "x")


def counting(net: Net, x: torch.Tensor) -> torch.Tensor:
    count_(net.counter, x)
    own = x.clone()
    count_(own, x)
    tell(own, "own")
    return x + own


def everything(net: Net, x: torch.Tensor) -> torch.Tensor:
    telling(net, x)
    asserting(net, x)
    with_tokens(net, x)
    return in_the_backward(net, counting(net, x))


@pytest.mark.parametrize(("effect", "budget"), [(telling, 1.0), (everything, 0.6), (everything, "min")])
def test_effects_are_those_of_eager_mode(effect: Any, budget: Any) -> None:
    call = trained(effect, budget)
    phases = [op.phase for op in call.plan.graph.ops if op.target == "remat_effects.tell.default"]
    assert phases.count(Phase.BACKWARD) == (3 * LAYERS if effect is everything else 0)
    assert not any(op.recomputable for op in call.plan.graph.ops if op.target.startswith("remat_effects"))


def test_what_acts_is_not_tried_out_while_costs_are_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))

    def effect(net: Net, x: torch.Tensor) -> torch.Tensor:
        tell(x, "x")
        return counting(net, x)

    trained(effect, 0.6, cost_model="profile")


@torch.library.custom_op("remat_effects::ordered", mutates_args=())
def ordered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    note("ordered", x)
    return x * 2, x + 1


@ordered.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


class Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return ordered(x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ordered(gradient)[0]


def test_what_is_tied_together_by_tokens_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    torch.library._register_effectful_op(ordered._opoverload, torch.library.EffectType.ORDERED)

    def effect(net: Net, x: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.inv(torch.eye(32) + 0.01 * x[:32])
        if hasattr(torch.ops.higher_order, "print"):
            torch._higher_order_ops.print("at {}", x.shape[0])
        return Ordered.apply(x) @ inverse

    try:
        call = trained(effect, 0.6)
    finally:
        torch.library._register_effectful_op(ordered._opoverload, None)
    assert "aten._linalg_check_errors.default" in {op.target for op in call.plan.graph.ops}
    printed = capsys.readouterr().out.count("at 256")
    assert printed == (2 * 3 * LAYERS if hasattr(torch.ops.higher_order, "print") else 0)


CHECKS: list[Callable[[torch.Tensor], Any]] = [
    lambda fine: torch._assert_async(fine),
    lambda fine: torch._assert_async(fine, "so it is not"),
    lambda fine: torch._assert(fine, "so it is not"),
    lambda fine: torch._functional_assert_async(fine, "so it is not", torch.ones(())),
    lambda fine: torch.linalg.inv(torch.eye(3) * fine),
    require,
    asserted,
    asserted_without_words,
]


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(fine)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch._assert_async(ctx.saved_tensors[0], "so it is not")
        return gradient, None


def test_what_fails_in_eager_mode_fails_alike() -> None:
    net = Net(lambda net, x: None)

    def step(x: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
        loss = net(x)
        for check, one in zip(CHECKS, fine, strict=True):
            check(one)
        return loss

    call = rematerialize(step, budget="min", cost_model="unit", time_limit=1.0)
    x, fine = torch.randn(256, 32), torch.ones(len(CHECKS), dtype=torch.bool)
    call(x, fine).backward()
    for i in range(len(CHECKS)):
        errors = []
        for one in (step, call):
            with pytest.raises(Exception) as raised:
                one(x, torch.arange(len(CHECKS)) != i)
            errors.append((type(raised.value), str(raised.value)))
        assert errors[0] == errors[1]
    call(x, fine).backward()
    assert call.runs == (2 + len(CHECKS),) and not call.failures


def test_a_check_of_the_backward_fails_in_the_backward() -> None:
    net = Net(lambda net, x: None)
    call = rematerialize(lambda x, fine: Checked.apply(net(x), fine), budget=0.6, cost_model="unit", time_limit=1.0)
    x = torch.randn(256, 32)
    call(x, torch.tensor(True)).backward()
    loss = call(x, torch.tensor(False))
    with pytest.raises(RuntimeError, match="so it is not"):
        loss.backward()
    assert call.runs == (2,) and not call.failures


def test_with_sizes_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_captures, "STATIC_CAPTURES", 1)

    def effect(net: Net, x: torch.Tensor) -> None:
        torch.ops.aten.sym_constrain_range(x.shape[0], min=1, max=None)
        tell(x, "x")
        asserted(x.isfinite().all())

    results = []
    module = Net(effect)
    for net in (copy.deepcopy(module), module):
        call = net if net is not module else rematerialize(net, budget=0.6, cost_model="unit", time_limit=1.0)
        torch.manual_seed(1)
        seen.clear()
        for rows in (100, 104, 130):
            call(torch.randn(rows, 32)).backward()
        results.append(list(seen))
    assert results[0] == results[1] and len(seen) == 3 * LAYERS
    assert not call.failures
    assert any(graph.sized is not None for graph in call._step._plans.graphs)


def test_nothing_that_acts_is_dropped_where_nothing_has_a_gradient() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        told(x, "unread")
        tell(x, "x")
        torch.linalg.inv(torch.eye(3))
        return x * 2

    call = rematerialize(step, budget=0.6, cost_model="unit")
    seen.clear()
    with pytest.warns(RematWarning, match="no operation with gradients"):
        call(torch.ones(3))
    call(torch.ones(3))
    assert [one[0] for one in seen] == ["unread", "x"] * 2


def test_in_a_checkpoint_they_run_twice_as_in_eager_mode() -> None:
    layer = nn.Linear(32, 32)

    def told_of(x: torch.Tensor) -> torch.Tensor:
        x = layer(x).sin()
        tell(x, "x")
        return x.sin()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(told_of, x, use_reentrant=False).sum()

    call = rematerialize(step, budget=0.6, cost_model="unit")
    seen.clear()
    with pytest.warns(RematWarning, match=r"tell.*inside of torch.utils.checkpoint"):
        call(torch.randn(64, 32)).backward()
    assert [where for _, where, _ in seen] == ["forward", "backward"]


class Lit(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = Look.apply(self.net(x))
        tell(x, "logits")
        asserted(x.isfinite().all())
        return nn.functional.cross_entropy(x, y)


def test_in_a_lightning_run() -> None:
    runs = []
    for callbacks in ([], [RematCallback(budget="min", solver="greedy", measure=False)]):
        seen.clear()
        run = fit(Lit, *callbacks, train=lambda: loader(16), accumulate_grad_batches=2)
        runs.append((run.results, list(seen)))
    assert_same(runs[0], runs[1])
    assert len(seen) == 8
    assert callbacks[0].plan.rematerializes and callbacks[0].runs == (2,) and not callbacks[0].failures


@torch.library.custom_op("remat_effects::number", mutates_args=())
def number(x: torch.Tensor) -> int:
    note("number", x)
    return int(x[0, 0] > 0) + 1


number.register_fake(lambda x: 1)


@torch.library.custom_op("remat_effects::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient * number(gradient))


def test_a_number_that_the_backward_asks_for_is_not_taken_for_a_constant() -> None:
    def step(x: torch.Tensor, sign: int) -> torch.Tensor:
        return scaled(x.sin()).sum() * sign

    call = rematerialize(step, budget="min", cost_model="unit")
    found = []
    for one in (step, call):
        seen.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for sign in (-1, 1):
                x = torch.ones(4, 4, requires_grad=True)
                one(x, sign).backward()
                found.append(x.grad)
        found.append(list(seen))
    assert_same(found[:3], found[3:])
    assert [one for one in caught if "which returns a number" in str(one.message)]


class Logits(nn.Module):
    """Returns more than its loss; the backward of the loss has effects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.second(Look.apply(self.first(x)).tanh())
        return logits.t().square().mean() + logits.logsumexp(0).mean(), logits


def test_in_a_backward_that_does_not_come_through_all_outputs() -> None:
    torch.manual_seed(0)
    eager = Logits()
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=1.0, cost_model="unit", solver="greedy", time_limit=0.05)
    told_of = []
    for run in (eager, step):
        seen.clear()
        torch.manual_seed(1)
        for _ in range(2):
            run(torch.randn(4, 8))[0].backward()
        told_of.append(list(seen))
    assert len(told_of[0]) == 6 and told_of[0] == told_of[1]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True))
    assert step.scheduled.runs == [2] and not step.scheduled.failures
