"""Networks that `fully_shard` has made units of: what lies between the units is captured too, and the bits are eager's."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_remat import rematerialize
from lightning_remat.errors import CaptureError
from lightning_remat.exactness._bits import same_bits
from lightning_remat.measure import held_bytes, track_peak
from tests.helpers.cases import slow_but

WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    """Two linear layers and dropout; ``scale`` differs from block to block where it is given."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.scale = nn.Dropout(0.2), scale

    def forward(self, x: torch.Tensor, add: Any = None, *, twice: bool = False) -> Any:
        x = x + self.drop(self.down(self.up(x).tanh().sin())) * self.scale
        if add is not None:
            x = x + add["more"][0] if isinstance(add, dict) else x + add
        return x * 2 if twice else x


class Net(nn.Module):
    """Something before the blocks, the blocks as ``run`` calls them, and something after them."""

    def __init__(
        self, run: Callable[..., Any], blocks: int = 3, make: Callable[[int], Block] = lambda _: Block()
    ) -> None:
        super().__init__()
        self.run = run
        self.before, self.after = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(make(i) for i in range(blocks))
        self.noted: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self, self.before(x).tanh())
        return nn.functional.log_softmax(self.after(x.tanh()).exp().sin(), -1).square().mean()


def in_a_loop(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
    return x


def numbered(self: Net, x: torch.Tensor) -> torch.Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x, twice=i == 1)
    return x


def with_between(self: Net, x: torch.Tensor) -> torch.Tensor:
    kept = []
    for block in self.blocks:
        kept.append(x)
        x = block(x.sin().cos()) + kept[0]
    return x + sum(kept)


def with_containers(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in reversed(self.blocks):
        x = block(x, {"more": [x.detach() * 3]})
    return x


def with_the_same_twice(self: Net, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        for block in self.blocks[:2]:
            x = block(x)
    return self.blocks[2](x)


def in_a_comprehension(self: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([block(x) for block in self.blocks]).mean(0)


def while_counting(self: Net, x: torch.Tensor) -> torch.Tensor:
    i = 0
    while i < len(self.blocks):
        x = self.blocks[i](x)
        i += 1
    return x


def with_zip(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block, number in zip(self.blocks, (1.0, 2.0, 3.0), strict=True):
        x = block(x, number)
    return x


WAYS = [
    in_a_loop,
    numbered,
    with_between,
    with_containers,
    with_the_same_twice,
    in_a_comprehension,
    while_counting,
    with_zip,
]


def under_autocast(self: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for block in self.blocks:
            x = block(x)
    return x.float()


def without_gradients_at_first(self: Net, x: torch.Tensor) -> torch.Tensor:
    for i, block in enumerate(self.blocks):
        with torch.no_grad() if i == 0 else contextlib.nullcontext():
            x = block(x)
    return x


def noting(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        self.noted = self.noted + 1
        block.scale = 1.0 + self.noted % 3
        x = block(x)
    return x


def into_a_list(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
        self.found.append(x.detach().sum())
    return x


def printing(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
        if float(x.detach().sum()) > 1e6:
            x = x / 2
    return x


HARD = [under_autocast, without_gradients_at_first, noting, into_a_list, printing]
"""In which calls of units are not nodes, or not all: only bits are looked at."""


def sharded(net: Net, whole: bool = True, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    if whole:
        fully_shard(net, **options)
    return net


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, distributed.tensor.DTensor) else tensor


def trained(
    make: Callable[[], Net], step: Callable[[Net], Callable[..., Any]], rows: tuple[int, ...]
) -> list[torch.Tensor]:
    """Losses, gradients and parameters of a few steps."""
    torch.manual_seed(0)
    net = make()
    net.found = []  # type: ignore[assignment]
    run = step(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = []
    torch.manual_seed(1)
    for n in rows:
        x = torch.randn(n, 8)
        loss = run(x)
        loss.backward()
        found += [loss.detach(), *(local(p.grad).clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    found += [local(p.detach()) for p in net.parameters()]
    return [*found, *net.found, torch.tensor(net.noted), torch.get_rng_state()]


def compared(make: Callable[[], Net], rows: tuple[int, ...] = (32,) * 5, budget: Any = "min") -> Any:
    """The same training without and with `rematerialize`: equal bits; returns what `rematerialize` made."""
    made: list[Any] = []

    def scheduled(net: Net) -> Any:
        made.append(rematerialize(net, budget, solver="greedy", cost_model="unit"))
        return made[0]

    plain = trained(make, lambda net: net, rows)
    ours = trained(make, scheduled, rows)
    assert len(plain) == len(ours)
    assert all(same_bits(one, other) for one, other in zip(plain, ours, strict=True))
    return made[0]


@pytest.mark.parametrize(
    ("way", "whole"),
    slow_but(
        {(way, True) for way in (numbered, with_between, with_containers, with_zip)} | {(with_between, False)},
        [*((way, True) for way in WAYS), (in_a_loop, False), (with_between, False)],
    ),
)
def test_what_is_between_units_is_captured_too(way: Callable[..., Any], whole: bool) -> None:
    step = compared(lambda: sharded(Net(way), whole))
    assert step.failures == ()
    assert any(plan.rematerializes for plan in step.plans)
    ran = [plan for plan, runs in zip(step.plans, step.runs, strict=True) if runs]
    ops = [{op.target for op in plan.graph.ops} for plan in ran]
    assert any("aten._log_softmax.default" in one for one in ops), "what follows the units"
    assert any("dropout_mask" in one for one in ops), "the units"


@pytest.mark.parametrize("way", HARD)
def test_what_cannot_be_cut_runs_as_before(way: Callable[..., Any]) -> None:
    compared(lambda: sharded(Net(way)))


def test_units_that_are_alike_are_captured_once() -> None:
    few = compared(lambda: sharded(Net(in_a_loop, blocks=2)))
    many = compared(lambda: sharded(Net(in_a_loop, blocks=9)))
    assert len(few.scheduled._plans.graphs) == len(many.scheduled._plans.graphs) == 3


def test_units_that_differ_by_a_number_are_not_taken_for_one_another() -> None:
    step = compared(lambda: sharded(Net(in_a_loop, make=lambda i: Block(0.5 + i))))
    assert len(step.scheduled._plans.graphs) == 4  # a number that varies is an input, from the second block on


def test_a_unit_that_changes_is_captured_again() -> None:
    def changing(self: Net, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def make() -> Net:
        return sharded(Net(changing))

    def step(net: Net) -> Callable[..., Any]:
        run, calls = rematerialize(net, "min", solver="greedy", cost_model="unit"), [0]

        def called(x: torch.Tensor) -> Any:
            calls[0] += 1
            net.blocks[1].drop.p = 0.2 if calls[0] < 4 else 0.5
            return run(x)

        return called

    def plainly(net: Net) -> Callable[..., Any]:
        calls = [0]

        def called(x: torch.Tensor) -> Any:
            calls[0] += 1
            net.blocks[1].drop.p = 0.2 if calls[0] < 4 else 0.5
            return net(x)

        return called

    rows = (32,) * 7
    ours, plain = trained(make, step, rows), trained(make, plainly, rows)
    assert all(same_bits(one, other) for one, other in zip(plain, ours, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)},
    ],
    ids=["kept whole", "mixed precision", "outputs cast"],
)
def test_the_options_of_fully_shard(options: dict[str, Any]) -> None:
    step = compared(lambda: sharded(Net(in_a_loop), **options))
    assert step.failures == () and any(plan.rematerializes for plan in step.plans)


def test_other_shapes_are_captured_too() -> None:
    step = compared(lambda: sharded(Net(in_a_loop)), rows=(32, 32, 16, 32, 16, 16, 16, 32))
    assert step.failures == ()


def test_hooks_are_gone_when_what_units_return_is_known() -> None:
    torch.manual_seed(0)
    net = sharded(Net(in_a_loop))
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]
    step = rematerialize(net, "min", solver="greedy", cost_model="unit")
    step(torch.randn(32, 8)).backward()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()] == before
    copy.deepcopy(net.blocks[0].state_dict())


def test_gradients_of_shards_are_accumulated() -> None:
    def twice(net: Net) -> Callable[..., Any]:
        run = rematerialize(net, "min", solver="greedy", cost_model="unit")

        def called(x: torch.Tensor) -> Any:
            run(x[:16]).backward()
            return run(x[16:])

        return called

    def plainly(net: Net) -> Callable[..., Any]:
        def called(x: torch.Tensor) -> Any:
            net(x[:16]).backward()
            return net(x[16:])

        return called

    def make() -> Net:
        return sharded(Net(in_a_loop))

    ours, plain = trained(make, twice, (32,) * 4), trained(make, plainly, (32,) * 4)
    assert all(same_bits(one, other) for one, other in zip(plain, ours, strict=True))


def test_it_is_known_from_which_modules_the_ops_between_units_are() -> None:
    step = compared(lambda: sharded(Net(in_a_loop)))
    modules = {op.module for plan in step.plans for op in plan.graph.ops}
    assert {"before", "after", "up", "down", "drop"} <= modules


def test_the_first_steps_keep_as_little_as_they_can() -> None:
    """Each block alone fits the budget as it is, and all of them together do not."""
    torch.manual_seed(0)
    net = sharded(Net(in_a_loop, blocks=12))
    x = torch.randn(256, 8)
    device = torch.device("cpu")
    with track_peak(device) as eager:
        net(x).backward()
    assert eager.peak_bytes is not None
    budget = held_bytes(net, x) + eager.peak_bytes * 2 // 3
    step = rematerialize(net, budget, solver="greedy", cost_model="unit")
    for call in range(3):
        net.zero_grad()
        with track_peak(device) as peak:
            step(x).backward()
        assert peak.peak_bytes is not None and held_bytes(net, x) + peak.peak_bytes <= budget, call


class Noting(Block):
    """Keeps a loss of its own as an attribute."""

    aux: Any = 0.0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = super().forward(x)
        self.aux = x.square().mean()
        return x


class Appending(Block):
    """Appends to a list that it is given."""

    def forward(self, x: torch.Tensor, found: Any = None, **kwargs: Any) -> Any:
        x = super().forward(x)
        found.append(x.mean())
        return x


class Drawing(Block):
    """Draws a random number of Python's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x) * (0.5 + random.random())


class Tagging(Block):
    """Sets an attribute of what it returns."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = super().forward(x)
        x.tag = 0.5  # type: ignore[attr-defined]
        return x


def with_auxiliary_losses(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
    return x + sum(block.aux for block in self.blocks)


def with_a_list(self: Net, x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for block in self.blocks:
        x = block(x, found)
    return x + torch.stack(found).sum() if found else x  # with torch 2.11, hooks hand on a copy of the list


def with_draws(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x * random.random())
    return x


def with_tags(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
        x = x * getattr(x, "tag", 1.0)
    return x


@pytest.mark.parametrize(
    ("way", "block"),
    [(with_auxiliary_losses, Noting), (with_a_list, Appending), (with_draws, Drawing), (with_tags, Tagging)],
)
def test_units_that_do_more_than_compute(way: Callable[..., Any], block: type[Block]) -> None:
    def make() -> Net:
        random.seed(3)
        return sharded(Net(way, make=lambda _: block()))

    compared(make)


class Failing(Block):
    """Raises in its second call."""

    calls = 0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.sum() > 1e9:
            raise ValueError("too large")
        return super().forward(x)


def with_a_handler(self: Net, x: torch.Tensor) -> torch.Tensor:
    for i, block in enumerate(self.blocks):
        try:
            x = block(x * (1e12 if i == 1 else 1.0))
        except ValueError:
            x = x * 1.1
    return x


def test_handlers_around_units_stay() -> None:
    compared(lambda: sharded(Net(with_a_handler, make=lambda i: Failing() if i == 1 else Block())))


class Otherwise(Block):
    """Returns something else while it is not trained, and where it is told to return less."""

    rows: Any = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = super().forward(x)[: self.rows] * 2
        return (x, x.sin()) if self.training else x


def first_of(self: Net, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        y = block(x)
        x = y[0] + y[1] if isinstance(y, tuple) else y
    return x * (x.shape[0] / 32)


def switching(plainly: bool) -> Callable[[Net], Callable[..., Any]]:
    """The step of a network that is in evaluation mode in some calls; with gradients."""

    def step(net: Net) -> Callable[..., Any]:
        run = net if plainly else rematerialize(net, "min", solver="greedy", cost_model="unit")
        calls = [0]

        def called(x: torch.Tensor) -> Any:
            calls[0] += 1
            net.train(calls[0] not in (4, 5, 7))
            return run(x)

        return called

    return step


def test_units_that_return_something_else_in_evaluation_mode() -> None:
    def make() -> Net:
        return sharded(Net(first_of, make=lambda _: Otherwise()))

    rows = (32,) * 8
    ours, plain = trained(make, switching(False), rows), trained(make, switching(True), rows)
    assert all(same_bits(one, other) for one, other in zip(plain, ours, strict=True))


def test_a_unit_that_returns_something_else_is_an_error_once() -> None:
    """What has run by then cannot be undone, and the code around it was captured for what it returned before."""
    torch.manual_seed(0)
    net = sharded(Net(first_of, make=lambda _: Otherwise()))
    step = rematerialize(net, "min", solver="greedy", cost_model="unit")
    x = torch.randn(32, 8)
    for _ in range(3):
        step(x).backward()
    net.blocks[2].rows = 20  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="returned tensors of another structure, size"):
        step(x)
    torch.manual_seed(1)
    loss = step(x)
    torch.manual_seed(1)
    assert same_bits(loss.detach(), net(x).detach())


@pytest.mark.filterwarnings("ignore:.*could not be captured.*")  # the hook itself
def test_a_hook_that_a_user_adds_to_a_unit_is_called() -> None:
    def adding(plainly: bool) -> Callable[[Net], Callable[..., Any]]:
        def step(net: Net) -> Callable[..., Any]:
            run = net if plainly else rematerialize(net, "min", solver="greedy", cost_model="unit")
            calls = [0]

            def called(x: torch.Tensor) -> Any:
                calls[0] += 1
                if calls[0] == 4:
                    net.blocks[1].register_forward_hook(
                        lambda _m, _args, y: net.found.append(y.detach().sum()) or y * 2
                    )
                return run(x)

            return called

        return step

    def make() -> Net:
        return sharded(Net(in_a_loop))

    ours, plain = trained(make, adding(False), (32,) * 7), trained(make, adding(True), (32,) * 7)
    assert len(ours) == len(plain)
    assert all(same_bits(one, other) for one, other in zip(plain, ours, strict=True))


def test_a_network_is_let_go() -> None:
    torch.manual_seed(0)
    net = sharded(Net(in_a_loop))
    step = rematerialize(net, "min", solver="greedy", cost_model="unit")
    for _ in range(3):
        step(torch.randn(32, 8)).backward()
    gone = weakref.ref(net)
    del net, step
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.*distributed tensors, which are left as they are")
def test_distributed_tensors_in_the_step_are_left_alone() -> None:
    def penalized(self: Net, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + 1e-3 * sum(block.up.weight.full_tensor().square().sum() for block in self.blocks)

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        one = sharded(Net(penalized))
        step = rematerialize(one, "min", solver="greedy", cost_model="unit") if planned else one
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            loss = step(torch.randn(32, 8))
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *(local(p.grad) for p in one.parameters() if p.grad is not None)])
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))
