"""Adapters of PEFT, on a Llama of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.architectures._architecture import Architecture, Training, WithLoss
from benchmarks.architectures._inputs import labelled_tokens
from benchmarks.architectures._transformers_common import GROUPED

_LAYERS = ["q_proj", "v_proj"]

_ADAPTERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": _LAYERS}),
    "DoRA": ("LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": _LAYERS, "use_dora": True}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 4, "module_dropout": 0.0, "target_modules": _LAYERS}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 16, "target_modules": _LAYERS}),
    "PrefixTuning": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "PromptTuning": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
}


def _peft(adapter: str, options: Mapping[str, Any]) -> Training:
    """A frozen Llama with adapters that are trained."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    adapted = peft.get_peft_model(model, getattr(peft, adapter)(task_type="CAUSAL_LM", **options))
    return Training(WithLoss(adapted), labelled_tokens())


PEFT: tuple[Architecture, ...] = tuple(
    Architecture("peft", f"{name} on Llama", functools.partial(_peft, adapter, options))
    for name, (adapter, options) in _ADAPTERS.items()
)
