"""Masks of transformers' models: asked for under capture as in eager mode, and bits equal whatever the batch's mask is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    masking_utils,
)

import lightning_remat
from lightning_remat import Rematerialized

WORDS = 50
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "vocab_size": WORDS,
    "num_attention_heads": 4,
}


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **options))


def bart() -> nn.Module:
    sides = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 48), ("attention_heads", 4))
    }
    return BartForConditionalGeneration(BartConfig(d_model=32, vocab_size=WORDS, max_position_embeddings=64, **sides))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama without cache": lambda: llama(use_cache=False),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, attention_probs_dropout_prob=0.0)),
    "bart": bart,
}


class Pair:
    """A model in eager mode, and a copy of it that is scheduled."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.plain = make().train()
        self.other = copy.deepcopy(self.plain)
        self.step: Rematerialized = lightning_remat.rematerialize(
            lambda batch: self.other(**batch).loss, budget="min", solver="greedy", time_limit=0.05
        )

    def same(self, **batch: torch.Tensor) -> bool:
        """One step of both: whether loss and gradients are equal, and the copy ran as one graph."""
        ids = torch.randint(3, WORDS, batch.pop("shape"))
        batch = {"input_ids": ids, "labels": ids, **batch}
        before = sum(self.step.runs)
        self.plain.zero_grad()
        self.other.zero_grad()
        with torch.random.fork_rng():
            eager = self.plain(**batch).loss
            eager.backward()
        found = self.step(batch)
        found.backward()
        assert sum(self.step.runs) == before + 1 and not self.step.failures
        pairs = zip(self.plain.parameters(), self.other.parameters(), strict=True)
        gradients = all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None)
        return torch.equal(eager, found) and gradients

    @property
    def has_mask(self) -> bool:
        """Whether attention is handed a mask in the latest plan."""
        (attention, *_) = [op for op in self.step.plans[-1].graph.ops if "attention_for_cpu.default" in op.target]
        return len(attention.inputs) > 3


def mask(*shape: int, padded: bool = False) -> torch.Tensor:
    found = torch.ones(shape, dtype=torch.long)
    found[0, -3:] = 0 if padded else 1
    return found


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_equal_with_and_without_padding(name: str) -> None:
    pair = Pair(MODELS[name])
    for padded in (False, True, False, True):  # the last two come back to what is captured
        assert pair.same(shape=(3, 24), attention_mask=mask(3, 24, padded=padded))
    assert len(pair.step.plans) == (1 if name == "mistral" else 2)  # a sliding window is a mask in any case
    before = len(pair.step.plans)
    assert pair.same(shape=(3, 24)) and len(pair.step.plans) == before + 1


@pytest.mark.parametrize("name", ["llama", "llama without cache", "bert"])
def test_attention_gets_no_mask_where_nothing_is_masked(name: str) -> None:
    pair = Pair(MODELS[name])
    assert pair.same(shape=(3, 40)) and not pair.has_mask
    assert pair.same(shape=(3, 40), attention_mask=mask(3, 40)) and not pair.has_mask
    assert pair.same(shape=(3, 40), attention_mask=mask(3, 40, padded=True)) and pair.has_mask


@pytest.mark.parametrize("name", ["llama", "llama without cache"])
def test_lengths_that_vary(name: str) -> None:
    pair = Pair(MODELS[name])
    for rows, length in [(3, 40), (3, 36), (3, 33), (3, 47), (3, 51), (2, 60)]:
        assert pair.same(shape=(rows, length)) and not pair.has_mask


def test_masks_of_lengths_that_vary() -> None:
    pair = Pair(MODELS["llama"])
    for length, padded in [(40, False), (36, True), (33, False), (47, True), (47, False), (51, True), (50, False)]:
        assert pair.same(shape=(3, length), attention_mask=mask(3, length, padded=padded))


def test_packed_sequences_stay_apart() -> None:
    pair = Pair(MODELS["llama without cache"])
    single = torch.arange(40).expand(2, 40)
    packed = torch.cat([torch.arange(25), torch.arange(15)]).expand(2, 40)
    for positions in (single, packed, single, packed):
        assert pair.same(shape=(2, 40), position_ids=positions)
    assert len(pair.step.plans) == 2 and pair.has_mask


def written_over(mask: torch.Tensor) -> torch.Tensor:
    mask[:, -3:] = 0
    return mask


def written_over_through_a_view(mask: torch.Tensor) -> torch.Tensor:
    mask.view(-1)[-3:].zero_()
    return mask


def copy_written_over(mask: torch.Tensor) -> torch.Tensor:
    other = mask.bool()
    other[:, -3:] = False
    return other


@pytest.mark.parametrize("change", [written_over, written_over_through_a_view, copy_written_over])
def test_a_mask_that_the_step_changes_first(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pair = Pair(MODELS["llama"])
    pair.step = lightning_remat.rematerialize(
        lambda ids, mask: pair.other(input_ids=ids, labels=ids, attention_mask=change(mask)).loss,
        budget="min",
        solver="greedy",
        time_limit=0.05,
    )
    ids = torch.randint(3, WORDS, (3, 40))
    eager = pair.plain(input_ids=ids, labels=ids, attention_mask=change(mask(3, 40))).loss
    assert torch.equal(eager, pair.step(ids, mask(3, 40))) and pair.has_mask


def test_a_mask_that_was_changed_before_the_step() -> None:
    pair = Pair(MODELS["llama"])
    changed = mask(3, 40)
    changed[0, 0] = 1
    assert pair.same(shape=(3, 40), attention_mask=changed) and not pair.has_mask


def test_the_library_is_left_as_it_was() -> None:
    before = dict(vars(masking_utils))
    pair = Pair(MODELS["llama"])
    assert pair.same(shape=(2, 16))
    assert vars(masking_utils) == before


def test_the_batch_that_was_asked_is_not_kept() -> None:
    pair = Pair(MODELS["llama"])
    asked = mask(2, 16)
    assert pair.same(shape=(2, 16), attention_mask=asked)
    alive = weakref.ref(asked)
    del asked
    gc.collect()
    assert alive() is None
