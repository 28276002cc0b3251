"""Bits are told apart, digests are of bits alone, and what a module keeps is put back."""

from __future__ import annotations

import json
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat import check
from lightning_remat.exactness import State
from lightning_remat.exactness._bits import differing, digest, same_bits, sum_of_words
from tests.helpers.stateful import Stateful

QUICK = {"cost_model": "unit", "solver": "greedy"}


# -- bits -------------------------------------------------------------------------------------------------------------


def test_bits_tell_zeros_and_nans_apart() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert same_bits(quiet, quiet.clone())
    assert not same_bits(quiet, quiet[[1, 0, 2]])
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.5])) == (2, 0.5)
    assert differing(quiet, torch.zeros(3)) == (2, None)
    assert differing(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0])) == (1, 1.0)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 2**20),
)
def test_digests_are_of_bits_alone(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 9, shape, generator=numbers).to(dtype)
    for of in (digest, lambda one: sum_of_words(one.contiguous().reshape(-1))):
        assert of(value) == of(value.clone().reshape(-1))
        assert of(value) == of(torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1 if value.numel() else 0 :])
        if value.numel():
            other = value.clone()
            other.view(-1)[seed % value.numel()] = 0 if other.view(-1)[seed % value.numel()] else 1
            assert of(value) != of(other)


def test_sums_of_words_depend_on_the_place() -> None:
    value = torch.arange(3_000_000, dtype=torch.float32)  # more than a chunk
    assert sum_of_words(value) != sum_of_words(value.flip(0))
    assert sum_of_words(value) == sum_of_words(torch.cat([value[:1], value])[1:])


# -- state ------------------------------------------------------------------------------------------------------------


def test_a_state_is_put_back() -> None:
    module, batch = Stateful(), {"x": torch.ones(2, 4), "labels": torch.ones(2)}
    queue, x = module.queue, batch["x"]
    state = State(module, batch)
    before = json.dumps(module.look(), default=str)
    state.restore()
    assert json.dumps(module.look(), default=str) == before, "random numbers too"
    module.disturb()
    module(batch["x"]).backward()
    batch.pop("labels")
    x.zero_()
    assert json.dumps(module.look(), default=str) != before
    state.restore()
    assert json.dumps(module.look(), default=str) == before
    assert module.queue is queue and batch["x"] is x and x.eq(1).all() and list(batch) == ["x", "labels"]


def test_gradients_at_hand_are_kept_as_they_are() -> None:
    module = Stateful()
    module(torch.randn(2, 4)).backward()
    gradient = module.linear.weight.grad
    value = gradient.clone()
    report = check(module, torch.randn(3, 4), **QUICK, budget=1.0)
    assert report.equal
    assert module.linear.weight.grad is gradient and torch.equal(gradient, value)
