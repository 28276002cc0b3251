"""Decoders and an encoder of images, of x-transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.architectures._architecture import Architecture, OfPositions, Training, WithLoss, cross_entropy
from benchmarks.architectures._inputs import LABELS, LENGTH, SIDE, VOCABULARY, images, tokens

_DECODERS: dict[str, Mapping[str, Any]] = {
    "decoder, rotary": {"rotary_pos_emb": True},
    "decoder, flash, ALiBi": {"alibi_pos_bias": True, "attn_flash": True},
    "decoder, GLU, RMSNorm, QK norm": {"ff_glu": True, "use_rmsnorm": True, "attn_qk_norm": True, "rel_pos_bias": True},
}


def _x_transformers(options: Mapping[str, Any]) -> Training:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, attn_dropout=0.1, ff_dropout=0.1, **options)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH + 1, attn_layers=layers))
    return Training(WithLoss(OfPositions(model), lambda loss: loss), {"x": tokens(LENGTH + 1)})


def _x_vit() -> Training:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=64, depth=2, heads=4, attn_dropout=0.1, ff_dropout=0.1)
    model = ViTransformerWrapper(image_size=SIDE, patch_size=8, num_classes=LABELS, attn_layers=layers)

    made = images()
    return Training(
        WithLoss(OfPositions(model), cross_entropy),
        {"img": made["pixel_values"], "targets": {"classes": made["labels"]}},
    )


X_TRANSFORMERS: tuple[Architecture, ...] = (
    *(
        Architecture("x_transformers", name, functools.partial(_x_transformers, options))
        for name, options in _DECODERS.items()
    ),
    Architecture("x_transformers", "vision encoder", _x_vit),
)
