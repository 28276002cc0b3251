"""Calls that look alike and are not: what they depend on is found where it is easily missed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_remat import rematerialize
from tests.helpers.alike_blocks import blocks, body, called, check_deeply, powered, unlike, watched, whole
from tests.helpers.nets import check, inputs

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
    assert whole(seen) <= {2}  # before torch 2.13, none


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


@pytest.mark.filterwarnings("ignore:only a part of:lightning_remat.planner.RematWarning")
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
