"""Models of images with texts, of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.architectures._architecture import Architecture, Training, WithLoss
from benchmarks.architectures._inputs import BATCH, VOCABULARY, captioned
from benchmarks.architectures._transformers_common import GROUPED, IMAGES, built


def _two_towers(model: str, text: Mapping[str, Any], vision: Mapping[str, Any], **config: Any) -> Architecture:
    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    own_text = {**common, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1}
    both = {
        "text_config": {**own_text, "eos_token_id": VOCABULARY - 1, **text},
        "vision_config": {**common, "image_size": 32, "patch_size": 8, **vision},
        **config,
    }
    return Architecture("transformers", model, functools.partial(built, model, captioned, both))


def _image_and_text() -> Training:
    """LLaVA: tokens that stand for patches of the image, and text after them."""
    import transformers

    text = transformers.LlamaConfig(**GROUPED)
    vision = transformers.CLIPVisionConfig(**{**IMAGES, "image_size": 32})
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1)
    config.vision_feature_layer = -1
    ids = torch.randint(3, VOCABULARY - 1, (BATCH, 48))
    ids[:, 1:17] = VOCABULARY - 1
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(BATCH, 3, 32, 32)}
    return Training(WithLoss(transformers.LlavaForConditionalGeneration(config)), batch)


IMAGES_WITH_TEXTS: tuple[Architecture, ...] = (
    _two_towers("CLIPModel", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}, projection_dim=64),
    _two_towers("SiglipModel", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
    _two_towers("ChineseCLIPModel", {"eos_token_id": 2}, {}, projection_dim=64),
    _two_towers("AltCLIPModel", {"eos_token_id": 2, "project_dim": 64}, {}, projection_dim=64),
    Architecture("transformers", "LlavaForConditionalGeneration", _image_and_text),
)
