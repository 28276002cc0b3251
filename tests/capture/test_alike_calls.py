"""Calls of modules that are alike are copied while Dynamo traces: the graph, and what is guarded on, are as otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import Source, TracingContext
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import build
from lightning_remat import rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._torch import _alike_calls, _aot
from lightning_remat.capture._torch._alike_copies import Copy
from lightning_remat.capture._torch._guards import source_name
from lightning_remat.runtime import _backend
from tests.capture.test_alike import Enough, described_nodes
from tests.helpers.nets import captured_whole, check, inputs, loss_of, net, same

Tensor = torch.Tensor
NETWORKS = {
    "gpt2": 4,
    "bert": 4,
    "llama": 4,
    "vit": 4,
    "t5": 3,
    "transformer-6+6": None,
    "resnet18": None,
    "swin": None,
}


class Seen:
    """What Dynamo has made.

    Attributes:
        graphs: the joint graphs.
        given: where what they are given is found.
        guards: of the graphs.
        copied: the names of modules for which the call of another was copied.
    """

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.given: list[list[str]] = []
        self.guards: list[set[Any]] = []
        self.copied: list[str] = []


@contextlib.contextmanager
def watched(copying: bool = True, planned: bool = True) -> Iterator[Seen]:
    """While open, what Dynamo makes is noted; steps end there, unless they are planned."""
    patch, seen = pytest.MonkeyPatch(), Seen()
    read: Any = _backend._Reading.read
    init: Any = _aot.Frame.__init__
    made: Any = Copy.made

    def noted(self: Any, joint: torch.fx.GraphModule, *args: Any, **described: Any) -> Any:
        seen.graphs.append(described_nodes(joint.graph))
        seen.guards.append({described_guard(one) for one in TracingContext.get().guards_context.dynamo_guards})
        if not planned:
            raise Enough
        return read(self, joint, *args, **described)

    def framed(self: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        given = [node.meta.get("grapharg") for node in module.graph.find_nodes(op="placeholder")]
        seen.given.append([source_name(one.source) if one is not None and one.source else "" for one in given])
        init(self, module, *args, **kwargs)

    def copied(self: Any) -> Any:
        seen.copied.append(self.name.rpartition("]")[2].removeprefix(".") or self.name)
        return made(self)

    patch.setattr(_backend._Reading, "read", noted)
    patch.setattr(_aot.Frame, "__init__", framed)
    patch.setattr(Copy, "made", copied)
    if not copying:
        patch.setattr(internals, "alike_modules", contextlib.nullcontext)
    try:
        yield seen
    finally:
        patch.undo()


def described_guard(guard: Any) -> Any:
    check = guard.create_fn
    held = (*check.args, *check.keywords.values()) if isinstance(check, functools.partial) else ()
    function = check.func if isinstance(check, functools.partial) else check
    parts = [source_name(one) if isinstance(one, Source) else repr(type(one)) for one in held]
    try:
        where = source_name(guard.originating_source)
    except NotImplementedError:
        where = type(guard.originating_source).__name__
    return re.sub(r"_{3}\d+|\d{9,}(_c\d+)?", "#", f"{function.__name__} {where} {parts}")


def unlike(without: Seen, with_copies: Seen) -> list[Any]:
    """What is otherwise: nodes, inputs, and guards."""
    found: list[Any] = []
    for nodes, others in zip(without.graphs, with_copies.graphs, strict=True):
        assert len(nodes) == len(others)
        found += [(one, other) for one, other in zip(nodes, others, strict=True) if one != other]
    found += [pair for pair in zip(without.given, with_copies.given, strict=True) if pair[0] != pair[1]]
    for guards, others in zip(without.guards, with_copies.guards, strict=True):
        found += guards ^ others
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_graph_is_the_one_that_is_traced(network: str, autocast: bool) -> None:
    layers = NETWORKS[network]
    seen = []
    for copying in (False, True):
        workload = build(network, "tiny", **({} if layers is None else {"layers": layers}))
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        with (
            watched(copying, planned=False) as one,
            contextlib.suppress(Enough),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            rematerialize(workload.module, "min")(*workload.batch)
        seen.append(one)
    assert seen[0].graphs and not seen[0].copied and seen[1].copied
    assert not unlike(*seen)


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], number: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1)
        self.body, self.number, self.scale = body, number, 1.5
        self.register_buffer("steps", torch.zeros(()))
        self.settings: dict[str, Any] = {"power": 2.0}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, x, *args, **kwargs)


def body(self: Any, x: Tensor) -> Tensor:
    return x + self.drop(torch.tanh(self.linear(self.norm(x))) * self.scale)


def called(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    for one in self.blocks:
        x = one(x)
    return self.last(x).square().mean()


def blocks(its_body: Callable[..., Any] = body, forward: Callable[..., Any] = called) -> Any:
    torch.manual_seed(0)
    return net(forward, blocks=nn.ModuleList(Block(its_body, number) for number in range(3)))


def whole(seen: Seen) -> set[int]:
    """The blocks that were copied as a whole."""
    found = [re.fullmatch(r".*?blocks\.(\d)", name) for name in seen.copied]
    return {int(one[1]) for one in found if one}


# -- what is copied ------------------------------------------------------------------------------------------------


def in_place(self: Any, x: Tensor) -> Tensor:
    y = functional.relu(self.linear(x).sin() + 1, inplace=True) * 2
    y.select(1, 0).fill_(1.0)
    self.steps.add_(1)
    y += x
    return y.mul_(self.scale)


def several_results(self: Any, x: Tensor) -> Any:
    first, second = self.linear(x).chunk(2, dim=-1)
    return torch.cat([second, first], -1), (x, None, self.number * 0)


def of_a_tuple(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    for one in self.blocks:
        x, (y, _, zero) = one(x)
        x = x + y * 0.5 + zero
    return self.last(x).square().mean()


def with_a_mask(self: Any, x: Tensor, mask: Tensor | None = None, *, power: float = 1.0) -> Tensor:
    y = torch.tanh(self.linear(x)) * power
    return x + (y if mask is None else y * mask)


def masked(self: Any, x: Tensor) -> Tensor:
    mask = (x.sum(-1, keepdim=True) > 0).float()
    x = self.first(x)
    for one in self.blocks:
        x = one(x, mask, power=0.5)
    return self.last(x).square().mean()


def branching(self: Any, x: Tensor) -> Tensor:
    parts = []
    for part in (self.norm, self.linear):
        parts.append(part(x))
    settings = {"power": self.settings["power"], "shift": 1}
    return x + torch.stack(parts).mean(0).sin() ** settings["power"] + settings["shift"]


def autograd_off_within(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = self.linear(x).abs().mean()
    return x + self.linear(x) / (1 + size)


COPIED: dict[str, tuple[Callable[..., Any], Callable[..., Any], set[int]]] = {
    "plain": (body, called, {1, 2}),
    "in place": (in_place, called, {2}),  # the first one is given what nothing was written to
    "several results": (several_results, of_a_tuple, set()),  # their number is read
    "with a mask": (with_a_mask, masked, {1, 2}),
    "branching": (branching, called, {1, 2}),
    "autograd off within": (autograd_off_within, called, set()),  # ops that set a state are left alone
}


@pytest.mark.parametrize("case", COPIED)
def test_training_is_the_same(case: str) -> None:
    its_body, forward, copied = COPIED[case]
    with watched() as seen:
        assert captured_whole(check(blocks(its_body, forward), inputs()))
    assert whole(seen) == copied
    with watched(copying=False) as as_traced:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        check(blocks(its_body, forward), inputs())
    assert not unlike(as_traced, seen)


def test_layers_are_copied_within_blocks_that_are_not() -> None:
    def numbered(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * (self.number + 1)

    with watched() as seen:
        check(blocks(numbered), inputs())
    assert not whole(seen) and sum(name.endswith("linear") for name in seen.copied) == 2


def test_blocks_within_blocks() -> None:
    def outer(self: Any, x: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x)) * self.scale

    module = blocks(outer)
    for one in module.blocks:
        one.inner = nn.ModuleList(Block(body, number) for number in range(2))
    module.blocks[2].inner[1].scale = 0.5
    with watched() as seen:
        check(module, inputs())
    assert 1 in whole(seen) and 2 not in whole(seen)


# -- what is not ---------------------------------------------------------------------------------------------------


def set_scale(one: Any) -> None:
    one.scale = 0.5


def set_eps(one: Any) -> None:
    one.norm.eps = 0.1


def set_setting(one: Any) -> None:
    one.settings["power"] = 3.0


def freeze(one: Any) -> None:
    one.linear.weight.requires_grad_(False)


def without_bias(one: Any) -> None:
    one.linear.bias = None


def otherwise(one: Any) -> None:
    one.forward = lambda x: one.linear(x).sin()


def hook(one: Any) -> None:
    one.linear.register_forward_hook(lambda _module, _inputs, output: output * 2)


def keep_all(one: Any) -> None:
    one.drop.eval()


def stronger(one: Any) -> None:
    one.drop.p = 0.7


def another_activation(one: Any) -> None:
    one.norm = nn.RMSNorm(32)


def of_its_own_class(one: Any) -> None:
    nn.utils.parametrize.register_parametrization(one.linear, "weight", nn.Hardtanh())  # type: ignore[attr-defined]


def powered(self: Any, x: Tensor) -> Tensor:
    return (body(self, x).sin().abs() + 0.1) ** self.settings["power"]


CHANGES: list[tuple[Callable[[Any], None], Callable[..., Any]]] = [
    *((change, body) for change in (set_scale, set_eps, freeze, without_bias, otherwise, hook, keep_all, stronger)),
    *((change, body) for change in (another_activation, of_its_own_class)),
    (set_setting, powered),
]


@pytest.mark.parametrize(("change", "its_body"), CHANGES, ids=lambda one: one.__name__)
def test_a_block_that_is_otherwise_is_traced(change: Callable[[Any], None], its_body: Callable[..., Any]) -> None:
    module = blocks(its_body)
    change(module.blocks[1])
    with watched() as seen:
        step = check_deeply(module)
    assert whole(seen) == {2}
    assert step.runs == (2,)


def check_deeply(module: Any) -> Any:
    """`check`, for modules that cannot be copied with what is bound to them."""
    state = copy.deepcopy(module.state_dict())
    right, got = list[Any](), list[Any]()
    for found, step in ((right, module), (got, rematerialize(module, "min", cost_model="unit", time_limit=0.5))):
        module.load_state_dict(state)
        module.zero_grad()
        torch.manual_seed(1)
        for _ in range(2):
            loss = loss_of(step(inputs()))
            loss.backward()
            found += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
        found += [value.clone() for value in module.state_dict().values()]
    assert len(right) == len(got) and all(map(same, right, got))
    return step


def test_masks_of_other_shapes_and_constants_are_told_apart() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        rows, columns = x.sum(-1, keepdim=True).sigmoid(), x.sum(0)[:1].expand(32).sigmoid()
        first, second, third = self.blocks
        x = self.first(x)
        for one, mask, power in ((first, rows, 0.5), (second, columns, 0.5), (third, rows, 0.25)):
            x = one(x, mask, power=power)
        return self.last(x).square().mean()

    with watched() as seen:
        check(blocks(with_a_mask, forward), inputs())
    assert not whole(seen)


def test_masks_that_lie_alike_are_mapped() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        masks = [(x.sum(-1, keepdim=True) > bound).float() for bound in (-1, 0, 1)]
        x = self.first(x)
        for one, mask in zip(self.blocks, masks, strict=True):
            x = one(x, mask)
        return self.last(x).square().mean()

    with watched() as seen:
        check(blocks(with_a_mask, forward), inputs())
    assert whole(seen) == {1, 2}


def test_the_same_tensor_twice_is_not_two() -> None:
    def sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + (x * 2 if x is y else y)

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            x = one(x, x.sin() if number == 1 else x)
        return self.last(x).square().mean()

    with watched() as seen:
        check(blocks(sums, forward), inputs())
    assert whole(seen) == {2}


# -- writes --------------------------------------------------------------------------------------------------------


def test_what_is_written_within_is_written_each_time() -> None:
    def counting(self: Any, x: Tensor) -> Tensor:
        self.number += 1
        return body(self, x)

    with watched() as seen:
        module = blocks(counting)
        step = rematerialize(module, "min", cost_model="unit", time_limit=0.5)
        for _ in range(2):
            step(inputs()).backward()
    assert not whole(seen)
    assert [one.number for one in module.blocks] == [2, 3, 4]


def test_what_is_written_between_is_seen() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            self.options["scale"] = number + 1.0
            x = one(x) * 1.0
        return self.last(x).square().mean()

    options = {"scale": 0.0}

    def scaled(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * self.options["scale"]

    module = blocks(scaled, forward)
    for one in (module, *module.blocks):
        one.options = options
    with watched() as seen:
        check(module, inputs())
    assert not whole(seen)


def test_what_is_written_before_all_is_each_ones_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for number, one in enumerate(self.blocks):
            one.norm.eps = 10.0**-number
            one.settings["power"] = number + 1.0
        return called(self, x)

    with watched() as seen:
        check(blocks(powered, forward), inputs())
    assert not whole(seen)


def test_what_is_put_where_blocks_read_it_is_seen() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        shared = {"scale": 0.0}
        self.holder["shared"] = shared
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            shared["scale"] = number + 1.0
            x = one(x)
        return self.last(x).square().mean()

    def scaled(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * self.holder["shared"]["scale"]

    module, holder = blocks(scaled, forward), dict[str, Any]()
    for one in (module, *module.blocks):
        one.holder = holder
    with watched() as seen:
        check(module, inputs())
    assert not whole(seen)


def test_what_the_step_makes_for_itself_keeps_nothing_from_being_copied() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = [self.first(x)]
        for one in self.blocks:
            hidden.append(one(hidden[-1]))
        return self.last(torch.stack(hidden).sum(0)).square().mean()

    with watched() as seen:
        check(blocks(forward=forward), inputs())
    assert whole(seen) == {1, 2}


_SCALES: dict[Any, float] = {}
_POWER = 1.0


def test_a_global_that_is_set_between() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        global _POWER
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            _POWER = 1.0 + number
            x = one(x)
        return self.last(x).square().mean()

    def powers(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * _POWER

    with watched() as seen:
        check(blocks(powers, forward), inputs())
    assert not whole(seen)


# -- what a module is, and not what it is like ----------------------------------------------------------------------


def test_things_that_are_looked_up_by_the_module() -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * _SCALES[self]

    module = blocks(scaled)
    try:
        _SCALES.update({one: number + 1.0 for number, one in enumerate(module.blocks)})
        with watched() as seen:
            check_deeply(module)
    finally:
        _SCALES.clear()
    assert not whole(seen)


def test_the_last_one_is_told_from_the_others() -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * (2.0 if self is self.last[0] else 1.0)

    module = blocks(scaled)
    for one in module.blocks:
        one.last = [module.blocks[2]]
    with watched() as seen:
        check_deeply(module)
    assert 2 not in whole(seen)


def test_a_module_that_is_called_twice_and_shared_parameters() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for one in (*self.blocks, self.blocks[0], self.blocks[1]):
            x = one(x)
        return self.last(x).square().mean()

    module = blocks(forward=forward)
    module.blocks[2].linear.weight = module.blocks[0].linear.weight
    with watched() as seen:
        check(module, inputs())
    with watched(copying=False) as as_traced:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        check(module, inputs())
    assert 1 in whole(seen) and not unlike(as_traced, seen)


def test_a_parameter_that_two_parts_share_in_one_block_alone() -> None:
    def twice(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.more(y) * (2.0 if self.more.weight is self.linear.weight else 1.0)

    module = blocks(twice)
    for one in module.blocks:
        one.more = nn.Linear(32, 32)
    module.blocks[1].more.weight = module.blocks[1].linear.weight
    with watched() as seen:
        check(module, inputs())
    assert whole(seen) == {2}


# -- what surrounds a call -------------------------------------------------------------------------------------------


def test_modes_around_a_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(self.first(x))
        with torch.no_grad():
            y = second(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = third(x)
        return self.last(x + y + z.float()).square().mean()

    with watched() as seen:
        check(blocks(forward=forward), inputs())
    assert not whole(seen)


def test_random_numbers_of_python() -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return body(self, x) * (1.0 + random.random())

    module = blocks(scaled)
    with watched() as seen:
        random.seed(0)
        torch.manual_seed(1)
        got = rematerialize(module, "min")(inputs()).detach()
        random.seed(0)
        torch.manual_seed(1)
        right = module(inputs()).detach()
    assert not whole(seen) and torch.equal(right, got)


def test_a_question_about_a_tensors_value_has_its_own_answer() -> None:
    def scaled(self: Any, x: Tensor, numbers: Tensor) -> Tensor:
        return body(self, x) * float(numbers.tolist()[0])

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            x = one(x, torch.tensor([number + 1.0]))
        return self.last(x).square().mean()

    with watched() as seen:
        check(blocks(scaled, forward), inputs())
    assert not whole(seen)


def test_checkpoints_are_left_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=False)
        return self.last(x).square().mean()

    with watched() as seen:
        check(blocks(forward=forward), inputs())
    assert not whole(seen)


def test_parameters_that_stand_in_for_the_modules_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            parameters = {name: value * (number + 1) for name, value in one.named_parameters()}
            x = torch.func.functional_call(one, parameters, (x,))
        return self.last(x).square().mean()

    check(blocks(forward=forward), inputs())


# -- guards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [set_scale, freeze, otherwise, keep_all], ids=lambda one: one.__name__)
def test_what_changes_later_in_a_copied_block_is_seen(change: Callable[[Any], None]) -> None:
    module = blocks()
    with watched() as seen:
        step = rematerialize(module, "min", cost_model="unit", time_limit=0.5)
        step(inputs()).backward()
        assert whole(seen) == {1, 2}
        change(module.blocks[2])
        module.zero_grad()
        torch.manual_seed(1)
        got = step(inputs())
        got.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    torch.manual_seed(1)
    right = module(inputs())
    right.backward()
    assert len(seen.graphs) == 2
    assert torch.equal(got, right)
    assert all(same(p.grad, gradient) for p, gradient in zip(module.parameters(), gradients, strict=True))


# -- where something is otherwise ------------------------------------------------------------------------------------


def test_dynamo_begins_again_where_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = Copy._copy

    def failing(self: Any, node: torch.fx.Node, name: str, stack: Any) -> None:
        own(self, node, name, stack)
        if "blocks" in self.name:
            raise KeyError("example_value")

    with watched(copying=False) as as_traced:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        check(blocks(), inputs())
    monkeypatch.setattr(Copy, "_copy", failing)
    with watched() as seen:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        assert captured_whole(check(blocks(), inputs()))
    assert len(seen.copied) == 1 and not unlike(as_traced, seen)


@pytest.mark.parametrize("place", ["lies", "_is_plain", "path"])
def test_what_is_not_as_expected_is_traced(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError(place)

    monkeypatch.setattr(_alike_calls, place, gone)
    with watched() as seen:
        assert captured_whole(check(blocks(), inputs()))
    assert not seen.copied


def test_all_is_as_it_was_afterwards() -> None:
    places = [(owner, name) for owner, name, _ in _alike_calls._replacements()]
    before = [vars(owner)[name] for owner, name in places]
    check(blocks(), inputs())
    assert [vars(owner)[name] for owner, name in places] == before
    assert _alike_calls._HERE.calls is None
