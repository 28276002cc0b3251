"""What a module under `rematerialize` reads several times, and others read too: gradients are added up in eager's order."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._torch import _autograd_graph
from lightning_remat.capture.gradients import _sums
from lightning_remat.capture.gradients._sums import OPENS, opened
from lightning_remat.measure import peak_memory
from tests.helpers.cases import slow_but
from tests.helpers.parts import USES, Parts


class Tied(nn.Module):
    """A language model whose embedding is its head too, and whose blocks are gone through several times."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.embedding, self.rounds = nn.Embedding(100, 16), rounds
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for _ in range(self.rounds):
            h = self.block(h)
        return F.linear(h, self.embedding.weight)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.a(x).relu() + self.drop(self.b(x)).tanh() + x)
        return y


def planned(function: Any) -> Rematerialized:
    return rematerialize(function, "min", time_limit=0.3)


def same_bits(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module, Callable[[Any], Any]], torch.Tensor], steps: int = 3
) -> None:
    """Losses, gradients and buffers of some steps; ``loss`` is given the module, and what makes a part of it planned."""
    found: list[list[torch.Tensor]] = []
    for plans in (False, True):
        torch.manual_seed(0)
        module = make()
        known: dict[int, Rematerialized] = {}

        def plan(part: Any) -> Any:
            return known.setdefault(id(part), planned(part)) if plans else part  # noqa: B023

        found.append([])
        for step in range(steps):
            torch.manual_seed(step)
            module.zero_grad()
            value = loss(module, plan)
            value.backward()
            found[-1] += [value.detach(), *(b.clone() for b in module.buffers())]
            found[-1] += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters()]
        for one in known.values():
            assert one.plans and not one.failures
    assert all(map(torch.equal, *found))


def preference(module: nn.Module, plan: Callable[[Any], Any]) -> torch.Tensor:
    """As in direct preference optimization: the model judges two answers before one backward."""
    model = plan(module)
    chosen, rejected = (torch.randint(0, 100, (4, 12)) for _ in range(2))
    scores = [model(x).log_softmax(-1).gather(-1, x[..., None]).sum() for x in (chosen, rejected)]
    return -F.logsigmoid(1e-2 * (scores[0] - scores[1]))


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_module_that_is_called_twice(rounds: int) -> None:
    same_bits(lambda: Tied(rounds), preference)


@pytest.mark.parametrize("where", ["before", "after", "both"])
def test_a_weight_that_is_used_outside_too(where: str) -> None:
    def loss(module: Any, plan: Callable[[Any], Any]) -> torch.Tensor:
        tokens = torch.randint(0, 100, (4, 12))
        weight = module.embedding.weight
        before = weight.sin().square().sum() if where != "after" else 0.0
        total = plan(module)(tokens).square().mean()
        after = (weight * weight.cos()).sum() if where != "before" else 0.0
        value: torch.Tensor = total + after + before
        return value

    same_bits(Tied, loss)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.stages = nn.ModuleList([Stage(), Stage()])


def with_skips(module: Any, plan: Callable[[Any], Any]) -> torch.Tensor:
    h = module.inward(torch.randn(2, 3, 12, 12)).relu()
    a = plan(module.stages[0])(h)
    b = plan(module.stages[1])(a)
    loss: torch.Tensor = module.out(torch.cat([a, b], 1)).square().mean() + (h * b).mean()
    return loss


def test_stages_with_skips_around_them() -> None:
    same_bits(UNet, with_skips)


def test_channels_last_and_gradients_that_lie_otherwise() -> None:
    def loss(module: Any, plan: Callable[[Any], Any]) -> torch.Tensor:
        h = module.inward(torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)).relu()
        a = plan(module.stages[0])(h)
        value: torch.Tensor = (a.transpose(2, 3) * torch.randn(2, 4, 12, 12)).sum() + (h * a.detach()).mean() + a.sum()
        return value

    same_bits(lambda: UNet().to(memory_format=torch.channels_last), loss)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x).tanh() + x, self.second(x.sin()) * self.second(x)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_outputs_that_the_loss_does_not_come_from(used: tuple[int, ...]) -> None:
    def loss(module: Any, plan: Callable[[Any], Any]) -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True).sin()
        outputs = plan(module)(x)
        value: torch.Tensor = sum((outputs[i].square().sum() for i in used), (x * x.cos()).sum())
        return value + (module.second.weight.square()).sum()

    same_bits(TwoHeads, loss)


class Part(Parts):
    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.parts[0], h, x)


@pytest.mark.parametrize("seed", slow_but(range(6), range(12)))
def test_random_modules_and_what_is_around_them(seed: int) -> None:
    draw = random.Random(seed)
    uses = draw.choices(sorted(USES), k=draw.randint(1, 4))
    order = draw.choices(["planned", "outside", "swapped"], k=draw.randint(2, 5))

    def loss(module: Any, plan: Callable[[Any], Any]) -> torch.Tensor:
        x = module.linear(torch.randn(16, 8)).sin()
        h = x
        for what in order:
            given = (x, h) if what == "swapped" else (h, x)
            h = h * x + module.other(x) if what == "outside" else plan(module)(*given)
        value: torch.Tensor = (h * x).square().mean()
        return value

    same_bits(lambda: Part([uses]), loss)


Region = Callable[[], Any]


def autocast(enabled: bool = True, cache_enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)


def judged(around_all: Region, around_each: Region) -> Callable[[nn.Module, Callable[[Any], Any]], torch.Tensor]:
    """`preference`, with regions of autocast."""

    def loss(module: nn.Module, plan: Callable[[Any], Any]) -> torch.Tensor:
        model = plan(module)

        def one(tokens: torch.Tensor) -> torch.Tensor:
            with around_each():
                found: torch.Tensor = model(tokens)
            return found

        with around_all():
            return preference(module, lambda _: one)

    return loss


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("around_all", "around_each"),
    [
        (contextlib.nullcontext, autocast),
        (lambda: autocast(cache_enabled=False), contextlib.nullcontext),
        (autocast, lambda: autocast(enabled=False)),
    ],
    ids=["one for each call", "without a cache", "off in the calls"],
)
def test_regions_of_autocast(rounds: int, around_all: Region, around_each: Region) -> None:
    same_bits(lambda: Tied(rounds), judged(around_all, around_each))


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(self.embedding(tokens)).sin())
        torch._dynamo.graph_break()
        return F.linear(self.first(h).tanh(), self.embedding.weight).float().square().mean()


@pytest.mark.filterwarnings("ignore::lightning_remat.errors.RematWarning")
def test_a_copy_that_eager_mode_shares_is_said() -> None:
    """Eager mode adds up in the low precision what comes to the one copy: two calls, and two parts, have one each."""
    for make, loss in (
        (lambda: Tied(1), judged(autocast, contextlib.nullcontext)),
        (InParts, lambda module, plan: judged_once(plan(module))),
    ):
        found: list[list[torch.Tensor]] = []
        for plans in (False, True):
            torch.manual_seed(0)
            module: nn.Module = make()
            step = planned(module) if plans else module
            found.append([])
            for seed in range(3):
                torch.manual_seed(seed)
                module.zero_grad()
                loss(module, lambda _: step).backward()  # type: ignore[no-untyped-call]  # noqa: B023
                found[-1].append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
        assert isinstance(step, Rematerialized) and step.plans
        assert "cache_enabled=False" in "".join(step.failures)
        assert not torch.equal(found[0][0], found[1][0]), "nothing is left to say"
        assert all(map(torch.equal, found[0][1:], found[1][1:]))


def judged_once(step: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with autocast():
        return step(torch.randint(0, 50, (4, 6)))


def test_a_weight_that_one_part_casts_and_another_does_not() -> None:
    """The embedding is looked up in float32, and cast as the head alone."""

    class Head(InParts):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.first(self.embedding(tokens)).sin()
            torch._dynamo.graph_break()
            return F.linear(self.second(h).tanh(), self.embedding.weight).float().square().mean()

    same_bits(Head, lambda module, plan: judged_once(plan(module)))


@pytest.mark.long
def test_what_nobody_else_reads_is_added_up_where_it_is_made() -> None:
    """A cell that is run through many times: its gradients would be as many, each as large as the weights."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.new_zeros(x.shape[0], 64)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    opens: list[bool] = []
    own = internals.Exchange.backward
    gc.collect()
    of_others = len(_autograd_graph._SOURCES)

    def backward(self: internals.Exchange, args: list[Any]) -> Any:
        opens.append(self.opens)
        return own(self, args)

    module = Cell()
    step = planned(module)
    x = torch.randn(4, 20, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals.Exchange, "backward", backward)
        for _ in range(3):
            step(x).square().sum().backward()
        assert opens == [False] * 3
        (step(x).square().sum() + module.cell.weight_hh.square().sum()).backward()
        (step(x) * step(x)).sum().backward()
        assert opens == [False] * 3 + [True] * 3
        step(x).square().sum().backward()
        assert opens[-1] is False
    gc.collect()
    assert len(_autograd_graph._SOURCES) <= of_others
    assert step.plan.predicted_peak_bytes < 12 * sum(p.nbytes for p in module.parameters())


def test_it_is_within_its_budget_once_it_is_measured() -> None:
    torch.manual_seed(0)
    module = Tied(4)
    step = rematerialize(module, 0.8, time_limit=0.5)

    def train() -> None:
        loss = step(torch.randint(0, 100, (8, 24))).square().mean()
        (loss + sum(p.square().sum() for p in module.parameters())).backward()
        module.zero_grad()

    for _ in range(4):
        train()
    held = sum(p.nbytes for p in module.parameters())
    assert peak_memory(train, "cpu") + held <= step.plan.budget_bytes


def test_gradients_that_are_asked_for() -> None:
    found = []
    for plans in (False, True):
        torch.manual_seed(0)
        module = Tied(2)
        model = planned(module) if plans else module
        weights = [module.embedding.weight, module.block.linear1.weight]
        for step in range(2):
            torch.manual_seed(step)
            loss = preference(module, lambda _: model)  # noqa: B023
            found.append(torch.autograd.grad(loss, weights))
    for eager, own in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, eager, own))


def test_a_backward_in_another_thread() -> None:
    found = []
    for plans in (False, True):
        torch.manual_seed(0)
        module = Tied(2)
        model = planned(module) if plans else module
        loss = preference(module, lambda _: model)  # noqa: B023
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        found.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *found))


def test_what_is_written_over_later_is_copied_in_time() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    view = graph.call_function(torch.ops.aten.view.default, (a, [4]))
    total = graph.call_function(torch.ops.aten.add.Tensor, (view, b))
    total.meta[OPENS] = True
    over = graph.call_function(torch.ops.aten.mul.out, (a, 2.0), {"out": a})
    graph.output((total, over))
    backward = torch.fx.GraphModule({}, graph)
    for name in ("first", "second"):
        x, y = torch.ones(2, 2), torch.full((4,), 3.0)
        if name == "first":
            added, doubled = backward(x, y)
            assert added.tolist() == [4.0] * 4
        else:
            first, doubled, second = opened(backward, {0: (0, 2)})(x, y)
            assert (first.tolist(), second.tolist()) == ([1.0] * 4, [3.0] * 4)
        assert doubled.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_deep_networks_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]

    def counted(node: torch.fx.Node) -> bool:
        asked[0] += 1
        return internals.runs_in_forward(node)

    def times(depth: int) -> int:
        asked[0] = 0
        planned(nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))))(torch.randn(2, 4))
        return asked[0]

    monkeypatch.setattr(_sums, "runs_in_forward", counted)
    assert 0 < times(16) < 6 * times(4)
