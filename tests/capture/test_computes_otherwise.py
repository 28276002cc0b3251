"""Models of transformers that compute in another way when they are compiled: captured as eager mode runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_remat import rematerialize
from tests.helpers.cases import slow_but

WORDS = 40


def mamba() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": WORDS}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def long_t5() -> nn.Module:
    """A mask of ones is made in eager mode alone, and adds its rows to the position's bias."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS}
    blocks = {"local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"}
    config = transformers.LongT5Config(**sizes, **blocks, decoder_start_token_id=0)
    return transformers.LongT5ForConditionalGeneration(config)


NEWER = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)


@pytest.mark.long
@pytest.mark.skipif(not NEWER, reason=f"transformers {transformers.__version__} computes in another way")
@pytest.mark.parametrize("model", slow_but({mamba, mixtral}, [mamba, mixtral, long_t5]))
def test_bits_are_those_of_eager_mode(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    eager = model()
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=0.8, cost_model="unit", solver="greedy", time_limit=5.0)
    words = torch.randint(0, WORDS, (2, 8))
    for seed in range(3):
        losses = []
        for module, run in ((eager, eager), (other, step)):
            torch.manual_seed(seed)
            module.zero_grad()
            loss = run(input_ids=words, labels=words, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            torch.optim.SGD(module.parameters(), 0.1).step()
        assert torch.equal(*losses)
        for (name, p), q in zip(eager.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
    (plan,) = step.scheduled.plans
    assert plan.rematerializes and step.scheduled.runs == [3] and not step.scheduled.failures


def test_products_of_experts_in_any_type() -> None:
    def products(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.sin(), weight.transpose(1, 2), offs=ends).tanh().square().sum()

    x, weight = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 8, requires_grad=True)
    ends = torch.tensor([4, 7, 12], dtype=torch.int32)
    step: Any = rematerialize(products, budget=1.0, cost_model="unit", solver="greedy", time_limit=0.05)
    found = [torch.autograd.grad(run(x, weight, ends), (x, weight)) for run in (products, step)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(step.scheduled.plans) == 1 and not step.scheduled.failures
