"""How models of transformers are built, and configurations that several kinds of them have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.architectures._architecture import Architecture, Training, WithLoss
from benchmarks.architectures._inputs import LABELS, SIDE, VOCABULARY

TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""Of a model of texts, in the names that most configurations know."""

GROUPED: Mapping[str, Any] = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
"""With fewer heads of keys than of queries."""

IMAGES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": LABELS,
}
"""Of a model of images."""

ENCODER_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "use_cache": False,
}
"""Of what comes from BART."""


def built(model: str, batch: Callable[[], dict[str, Any]], config: Mapping[str, Any]) -> Training:
    """A model of transformers by the name of its class, with its own loss."""
    import transformers

    made = getattr(transformers, model)
    return Training(WithLoss(made(made.config_class(**config))), batch())


def of_transformers(
    batch: Callable[[], dict[str, Any]], common: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> list[Architecture]:
    """Architectures by the names of their classes, each with what its configuration has beside the common."""
    return [
        Architecture("transformers", model, functools.partial(built, model, batch, {**common, **own}))
        for model, own in models.items()
    ]
