"""Calls of modules that are alike are copied while Dynamo traces: the graph, and what is guarded on, are as otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.networks import build
from lightning_remat import rematerialize
from lightning_remat.capture._torch.alike import _calls as alike_calls
from lightning_remat.capture._torch.alike._copies import Copy
from tests.capture.test_alike import Enough
from tests.helpers.alike_blocks import Block, blocks, body, called, check_deeply, powered, unlike, watched, whole
from tests.helpers.cases import diagonal
from tests.helpers.nets import captured_whole, check, inputs, same

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


@pytest.mark.parametrize(("network", "autocast"), diagonal(list(NETWORKS), [True, False]))
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


@pytest.mark.parametrize("place", ["_is_plain", "itertools", "lies", "path", "values_asked"])
def test_what_is_not_as_expected_is_traced(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError(place)

    monkeypatch.setattr(alike_calls, place, gone)
    with watched() as seen:
        assert captured_whole(check(blocks(), inputs()))
    assert not seen.copied


def test_all_is_as_it_was_afterwards() -> None:
    places = [(owner, name) for owner, name, _ in alike_calls._replacements()]
    before = [vars(owner)[name] for owner, name in places]
    check(blocks(), inputs())
    assert [vars(owner)[name] for owner, name in places] == before
    assert alike_calls._HERE.calls is None
