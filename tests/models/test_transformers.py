"""Language models: those of Hugging Face, one with low-rank layers beside frozen ones, and an own one with tied weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.models.wild import STEPS, Wild, assert_whole, model_name


def tokens() -> DataLoader[Any]:
    """Batches of four sentences of twelve tokens, as a tokenizer gives them."""
    numbers = torch.Generator().manual_seed(2)
    sentences = []
    for i in range(4 * STEPS):
        ids = torch.randint(3, 40, (12,), generator=numbers)
        mask = torch.ones(12, dtype=torch.long)
        mask[12 - i % 5 :] = 0
        sentences.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)})
    return DataLoader(sentences, 4)


class LoraLinear(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, inputs))
        self.up = nn.Parameter(0.1 * torch.randn(outputs, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.dropout(x) @ self.down.t() @ self.up.t() * 2.0


class Lora(Wild):
    """GPT-2 with low-rank layers beside frozen ones. The step returns its ModelOutput: loss, logits and cache."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train().requires_grad_(False)
        self.head = None
        for block in self.net.transformer.h:
            block.attn.c_attn = LoraLinear(block.attn.c_attn, 16, 48)
            block.mlp.c_fc = LoraLinear(block.mlp.c_fc, 16, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(**batch)
        self.log("loss", output.loss)
        return output

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        cache = outputs.pop("cache" if "cache" in outputs else "past_key_values")  # by its name since transformers 5.24
        self.seen += [layer.keys.detach() for layer in cache.layers]


class Llama(Wild):
    """Grouped queries, no padding: in eager mode the library finds out that no mask is needed."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
        self.net, self.head = LlamaForCausalLM(config).train(), None

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class TiedEmbeddings(Wild):
    """An own language model: input and output share their weights."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.net(self.embed(ids) * math.sqrt(16), src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


WHOLE = [Lora, Llama, TiedEmbeddings]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)
