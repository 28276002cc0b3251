"""Calls that look alike and are not: what they depend on is found where it is easily missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from tests.capture.test_alike_calls import blocks, body, check_deeply, unlike, watched, whole
from tests.helpers.nets import inputs

Tensor = torch.Tensor


class Thing:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.scales = scale, [scale]


HOLDER = Thing()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    vars(HOLDER).clear()


def mean(x: Tensor) -> Tensor:
    return x.square().mean()


def after(self: Any, x: Tensor, each: Callable[[Any, Tensor], Any]) -> Any:
    x = self.first(x)
    for one in self.blocks:
        x = each(one, x)
    return mean(self.last(x))


# -- tensors ---------------------------------------------------------------------------------------------------------


def test_an_attribute_that_a_block_gives_its_result() -> None:
    def tagging(self: Any, x: Tensor) -> Any:
        y = body(self, x)
        y.tag = 3.0  # type: ignore[attr-defined]
        return y

    def tagged(one: Any, x: Tensor) -> Any:
        y = one(x)
        return y * getattr(y, "tag", 1.0)

    with watched() as seen:
        check_deeply(blocks(tagging, lambda self, x: after(self, x, tagged)))
    assert not whole(seen)


def test_an_argument_that_a_block_writes_to() -> None:
    def adding(self: Any, x: Tensor, total: Tensor) -> Any:
        total.add_(self.linear(x))
        return torch.tanh(x)

    def added(one: Any, x: Tensor) -> Any:
        total = torch.zeros_like(x)
        y = one(x, total)
        return y + total * (2.0 if total.requires_grad else 3.0)

    with watched() as seen:
        check_deeply(blocks(adding, lambda self, x: after(self, x, added)))
    assert not whole(seen)


def test_a_buffer_that_lies_otherwise_since() -> None:
    def dimensions(self: Any, x: Tensor) -> Any:
        return body(self, x) * (1 + self.steps.dim())

    def forward(self: Any, x: Tensor) -> Any:
        self.blocks[1].steps.unsqueeze_(0)
        x = after(self, x, lambda one, x: one(x))
        self.blocks[1].steps.squeeze_(0)
        return x

    with watched() as seen:
        check_deeply(blocks(dimensions, forward))
    assert 1 not in whole(seen)


@pytest.mark.parametrize("ask", [lambda w: 2.0 if hasattr(w, "flag") else 1.0, lambda w: getattr(w, "flag", 1.0)])
def test_an_attribute_that_one_blocks_parameter_has(ask: Callable[[Any], float]) -> None:
    module = blocks(lambda self, x: body(self, x) * ask(self.linear.weight))
    module.blocks[1].linear.weight.flag = 2.0
    with watched() as seen:
        check_deeply(module)
    assert whole(seen) == {2}


# -- what the step makes, and puts where blocks find it -----------------------------------------------------------------


def test_what_is_in_the_attributes_of_what_was_put() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        thing = Thing()
        HOLDER.thing = thing  # type: ignore[attr-defined]
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            thing.scales[0] = 1.0 + number
            x = one(x)
        HOLDER.thing = None  # type: ignore[attr-defined]
        return mean(self.last(x))

    with watched() as seen:
        check_deeply(blocks(lambda self, x: body(self, x) * HOLDER.thing.scales[0], forward))  # type: ignore[attr-defined]
    assert not whole(seen)


def test_what_blocks_put_there() -> None:
    def appending(self: Any, x: Tensor) -> Any:
        HOLDER.thing.scales.append(1.0)  # type: ignore[attr-defined]
        return body(self, x)

    def forward(self: Any, x: Tensor) -> Any:
        thing = Thing()
        HOLDER.thing = thing  # type: ignore[attr-defined]
        x = after(self, x, lambda one, x: one(x)) * len(thing.scales)
        HOLDER.thing = None  # type: ignore[attr-defined]
        return x

    with watched() as seen:
        check_deeply(blocks(appending, forward))
    assert not whole(seen)


# -- what the step knows by another source -----------------------------------------------------------------------------


def test_a_layer_that_the_first_block_shares_with_the_step() -> None:
    module = blocks(
        lambda self, x: self.act(body(self, x)),
        lambda self, x: after(self, self.act(x), lambda one, x: one(x)),
    )
    for number, one in enumerate(module.blocks):
        one.act = nn.LeakyReLU(0.1 * (number + 1))
    module.act = module.blocks[0].act
    with watched() as seen:
        check_deeply(module)
    assert len(seen.graphs) == 1 and 1 not in whole(seen)


MADE: list[Callable[[float], Any]] = [
    Thing,
    lambda scale: torch.full((1,), scale),
    lambda scale: {"thing": Thing(scale)},
]


@pytest.mark.parametrize("made", MADE, ids=["thing", "tensor", "dictionary"])
def test_a_dictionary_that_the_first_block_shares_with_the_step(made: Callable[[float], Any]) -> None:
    def scale(held: Any) -> Any:
        held = held["held"]
        held = held["thing"] if isinstance(held, dict) else held
        return held.scale if isinstance(held, Thing) else held

    module = blocks(
        lambda self, x: body(self, x) * scale(self.held),
        lambda self, x: after(self, x * scale(self.held), lambda one, x: one(x)),
    )
    for number, one in enumerate(module.blocks):
        one.held = {"held": made(1.0 + number)}
    module.held = module.blocks[0].held
    with watched() as seen:
        check_deeply(module)
    assert len(seen.graphs) == 1 and 1 not in whole(seen)


@pytest.mark.parametrize("shared", [0, 1])
def test_two_lists_that_are_one_in_one_block_alone(shared: int) -> None:
    module = blocks(lambda self, x: body(self, x) * (2.0 if self.ones is self.others else 3.0))
    for number, one in enumerate(module.blocks):
        one.ones = [1.0]
        one.others = one.ones if number == shared else [1.0]
    with watched() as seen:
        check_deeply(module)
    assert whole(seen) == {2}


def test_a_list_that_is_one_with_something_elsewhere() -> None:
    module = blocks(lambda self, x: body(self, x) * (2.0 if self.ones is HOLDER.scales else 3.0))
    for one in module.blocks:
        one.ones = [1.0]
    HOLDER.scales = module.blocks[0].ones
    with watched() as seen:
        check_deeply(module)
    assert whole(seen) == {2}


def test_a_block_that_is_told_by_being_another_later() -> None:
    module = blocks(lambda self, x: body(self, x) * (2.0 if self is self.chosen[0] else 3.0))
    for one in module.blocks:
        one.chosen = [module.blocks[1]]
    step = rematerialize(module, "min", cost_model="unit", time_limit=0.5)
    with watched() as seen:
        step(inputs()).backward()
        assert 2 in whole(seen)
        module.blocks[2].chosen[0] = module.blocks[2]
        torch.manual_seed(1)
        got = step(inputs())
    torch.manual_seed(1)
    assert torch.equal(got, module(inputs()))


# -- what surrounds a call ---------------------------------------------------------------------------------------------


def test_a_mark_on_all_that_is_traced() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        for number, one in enumerate(self.blocks):
            with torch.fx.traceback.annotate({"block": number}):
                x = one(x)
        return mean(self.last(x))

    seen = []
    for copying in (False, True):
        torch._dynamo.reset()
        with watched(copying) as one:
            check_deeply(blocks(forward=forward))
        seen.append(one)
    assert not unlike(*seen)
