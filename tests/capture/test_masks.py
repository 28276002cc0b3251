"""Masks of transformers' models: asked for under capture as in eager mode, and bits equal whatever the batch's mask is."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)
from transformers.modeling_outputs import CausalLMOutput

import lightning_remat
from lightning_remat import Rematerialized
from lightning_remat.capture._torch import TensorVariable, TorchInGraphFunctionVariable
from tests.helpers.cases import slow_but

try:
    from transformers import modeling_attn_mask_utils
except ImportError:  # since 5.24
    modeling_attn_mask_utils = None

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


def mistral(window: int) -> nn.Module:
    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=WORDS, attn_pdrop=0.0))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": WORDS}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama without cache": lambda: llama(use_cache=False),
    "mistral, wide window": lambda: mistral(32),
    "mistral, narrow window": lambda: mistral(8),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8)),
    "gpt2": gpt2,
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, attention_probs_dropout_prob=0.0)),
    "bart": bart,
    "t5": t5,
}


class MasksOfAttention(TorchDispatchMode):
    """Whether each attention that runs inside is handed a mask, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ATTENTION in str(func):
            self.found.append((kwargs or {}).get("attn_mask") is not None)
        return func(*args, **(kwargs or {}))


ATTENTION = "attention_for_cpu.default"


class Pair:
    """A model in eager mode, and a copy of it that is scheduled."""

    def __init__(
        self, make: Callable[[], nn.Module], change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.plain = make().train()
        self.other = copy.deepcopy(self.plain)
        self.change = change
        self.step: Rematerialized = lightning_remat.rematerialize(
            lambda batch: self.loss(self.other, batch), budget="min", solver="greedy", time_limit=0.05
        )

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.change is not None:
            batch = {**batch, "attention_mask": self.change(batch["attention_mask"], batch["input_ids"])}
        return model(**batch).loss

    def same(self, **batch: torch.Tensor) -> bool:
        """One step of both, with as many masks: whether loss and gradients are equal."""
        ids = torch.randint(3, WORDS, batch.pop("shape"))
        batch = {"input_ids": ids, "labels": ids, **batch}
        before = self.step.runs
        self.plain.zero_grad()
        self.other.zero_grad()
        with torch.random.fork_rng():
            with MasksOfAttention() as in_eager_mode:
                eager = self.loss(self.plain, {name: value.clone() for name, value in batch.items()})
            eager.backward()
        found = self.step(batch)
        found.backward()
        assert not self.step.failures
        counts = itertools.zip_longest(self.step.plans, self.step.runs, before, fillvalue=0)
        ran = [
            plan for plan, now, then in counts for _ in range(now - then)
        ]  # several where the model breaks the graph
        attention = [op for plan in ran for op in plan.graph.ops if ATTENTION in op.target]
        self.masks = sorted(len(op.inputs) > 3 for op in attention)
        assert self.masks == sorted(in_eager_mode.found)
        pairs = zip(self.plain.parameters(), self.other.parameters(), strict=True)
        gradients = all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None)
        return torch.equal(eager, found) and gradients

    @property
    def has_mask(self) -> bool:
        """Whether the latest step's attention was handed a mask."""
        (handed,) = self.masks
        return handed


def mask(*shape: int, padded: bool = False, left: bool = False) -> torch.Tensor:
    found = torch.ones(shape, dtype=torch.long)
    found[0, -3:] = 0 if padded else 1
    found[1, :2] = 0 if left else 1
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but({"llama", "mistral, narrow window", "gpt2", "bert", "t5"}, MODELS))
def test_bits_and_masks_are_equal_with_and_without_padding(name: str) -> None:
    pair = Pair(MODELS[name])
    assert pair.same(shape=(3, 24))
    unmasked = not any(pair.masks)
    # The last two come back to what is captured.
    for padded, left in [(False, False), (True, False), (False, False), (False, True)]:
        assert pair.same(shape=(3, 24), attention_mask=mask(3, 24, padded=padded, left=left))
        assert pair.masks == [padded or left] or name not in UNMASKED
    assert unmasked or name not in UNMASKED


UNMASKED = {"llama", "mistral, wide window", "gemma", "gpt2", "bert"}
"""Models that have one attention, which is handed no mask where nothing is masked, in all releases."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_stays_flash_attention() -> None:
    torch.manual_seed(0)
    model = gpt2().to("cuda", torch.bfloat16).train()
    step = lightning_remat.rematerialize(model, budget=1.0)
    ids = torch.randint(3, WORDS, (3, 24), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # it takes no mask
        for handed in (None, torch.ones_like(ids)):
            step(input_ids=ids, labels=ids, attention_mask=handed).loss.backward()
            assert any("scaled_dot_product_flash_attention" in op.target for op in step.plans[-1].graph.ops)


class OwnAttention(nn.Module):
    """Asks for its masks as models of older releases do."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.embed, self.project, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        query, key, value = self.project(x)[:, None].chunk(3, dim=-1)
        asked = modeling_attn_mask_utils
        mask = asked._prepare_4d_causal_attention_mask_for_sdpa(attention_mask, input_ids.shape, x, 0, self.window)
        x = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        mask = asked._prepare_4d_attention_mask_for_sdpa(attention_mask, x.dtype)
        x = scaled_dot_product_attention(x, query, value, mask)
        return CausalLMOutput(loss=cross_entropy(self.head(x[:, 0]).transpose(1, 2), labels))


@pytest.mark.skipif(
    modeling_attn_mask_utils is None, reason=f"transformers {transformers.__version__} has no such models"
)
@pytest.mark.filterwarnings("ignore:The attention mask API under:FutureWarning")
@pytest.mark.parametrize("window", [None, 32, 8])
def test_what_older_models_ask(window: int | None) -> None:
    pair = Pair(lambda: OwnAttention(window))
    for padded in (False, True, False):
        assert pair.same(shape=(3, 24), attention_mask=mask(3, 24, padded=padded))
        assert pair.masks == ([padded, padded] if window != 8 else [padded, True])
    assert len(pair.step.plans) == 2


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(masking_utils, "create_recurrent_attention_mask"),
    reason=f"transformers {transformers.__version__}: each recurrent model decides for itself",
)
def test_recurrent_layers_get_no_mask_where_nothing_is_masked() -> None:
    layers = {**SIZES, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    pair = Pair(lambda: Lfm2ForCausalLM(Lfm2Config(**layers, num_key_value_heads=2, use_cache=False)))
    assert pair.same(shape=(3, 24))
    for padded in (False, True):
        assert pair.same(shape=(3, 24), attention_mask=mask(3, 24, padded=padded))
    without, whole, padded = (sum("aten.mul" in op.target for op in plan.graph.ops) for plan in pair.step.plans)
    assert without == whole < padded  # a mask is multiplied with


def test_any_mask() -> None:
    pair = Pair(MODELS["llama"])

    @settings(max_examples=20, deadline=None)
    @given(masked=st.sets(st.integers(0, 3 * 24 - 1), max_size=3))
    def check(masked: set[int]) -> None:
        handed = mask(3, 24)
        handed.view(-1)[list(masked)] = 0
        assert pair.same(shape=(3, 24), attention_mask=handed) and pair.has_mask == bool(masked)

    check()
    assert len(pair.step.plans) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama without cache"])
def test_lengths_that_vary(name: str) -> None:
    pair = Pair(MODELS[name])
    for rows, length in [(3, 40), (3, 36), (3, 33), (3, 47), (3, 51), (2, 60)]:
        assert pair.same(shape=(rows, length))


@pytest.mark.long
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
    assert pair.has_mask


def written_over(mask: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    mask[:, -3:] = 0
    return mask


def written_over_through_a_view(mask: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    mask.view(-1)[-3:].zero_()
    return mask


def copy_written_over(mask: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    other = mask.bool()
    other[:, -3:] = False
    return other


def of_several_inputs(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return mask & (ids > 9)


def written_where_another_says(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    mask[ids < 9] = 0
    return mask


def drawn(mask: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return mask * (torch.rand(mask.shape) < 0.8)


CHANGES = [written_over, written_over_through_a_view, copy_written_over, of_several_inputs, written_where_another_says]


@pytest.mark.parametrize("change", CHANGES)
def test_a_mask_that_the_step_changes_first(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    pair = Pair(MODELS["llama"], change)
    assert pair.same(shape=(3, 40), attention_mask=mask(3, 40)) and pair.has_mask


def test_a_mask_that_is_drawn() -> None:
    """The graph breaks there, and eager mode's question is asked."""
    pair = Pair(MODELS["llama"], drawn)
    assert pair.same(shape=(3, 40), attention_mask=mask(3, 40)) and any(pair.masks)


def unchanged_by_another(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return mask & (ids >= 0)


def drawn_whole(mask: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return mask * (torch.rand(mask.shape) < 2)


@pytest.mark.parametrize("change", [unchanged_by_another, drawn_whole])
def test_a_mask_that_turns_out_to_mask_nothing(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    pair = Pair(MODELS["llama"], change)
    assert pair.same(shape=(3, 40), attention_mask=mask(3, 40))
    assert not any(pair.masks)


def test_a_mask_that_was_changed_before_the_step() -> None:
    pair = Pair(MODELS["llama"])
    changed = mask(3, 40)
    changed[0, 0] = 1
    assert pair.same(shape=(3, 40), attention_mask=changed) and not pair.has_mask


def test_the_library_is_left_as_it_was() -> None:
    changed = [vars(one) for one in (masking_utils, modeling_attn_mask_utils, TensorVariable) if one is not None]
    changed.append(TorchInGraphFunctionVariable._get_handlers())
    before = [dict(one) for one in changed]
    pair = Pair(MODELS["llama"])
    assert pair.same(shape=(2, 16))
    assert [dict(one) for one in changed] == before


def test_the_batch_that_was_asked_is_not_kept() -> None:
    pair = Pair(MODELS["llama"])
    asked = mask(2, 16)
    assert pair.same(shape=(2, 16), attention_mask=asked)
    alive = weakref.ref(asked)
    del asked
    gc.collect()
    assert alive() is None
