"""Models of sound, of transformers: of waves, and of features of sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.architectures._architecture import Architecture
from benchmarks.architectures._inputs import BATCH, LABELS, VOCABULARY, spoken, waves
from benchmarks.architectures._transformers_common import ENCODER_DECODER, IMAGES, TEXT, of_transformers

SOUND: Mapping[str, Any] = {
    **TEXT,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}
"""Of what comes from wav2vec 2. Masks of times and dropped layers are drawn by NumPy and Python, each step others: off."""

_SOUND: dict[str, Mapping[str, Any]] = {
    "Wav2Vec2ForCTC": {},
    "HubertForCTC": {},
    "WavLMForCTC": {"num_buckets": 32},
    "UniSpeechForCTC": {"num_ctc_classes": VOCABULARY},
    "Data2VecAudioForCTC": {"conv_pos_kernel_size": 5},
    "Wav2Vec2ConformerForCTC": {"conv_depthwise_kernel_size": 7},
    "SEWForCTC": {"squeeze_factor": 2},
}

WAVES: tuple[Architecture, ...] = tuple(of_transformers(waves, SOUND, _SOUND))

FEATURES: tuple[Architecture, ...] = (
    *of_transformers(
        lambda: spoken("input_features", (4, 16, 200)),
        ENCODER_DECODER,
        {
            "WhisperForConditionalGeneration": {
                "num_mel_bins": 16,
                "max_source_positions": 100,
                "max_target_positions": 64,
            }
        },
    ),
    *of_transformers(
        lambda: spoken("input_features", (4, 200, 16)),
        {**ENCODER_DECODER, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        {
            "Speech2TextForConditionalGeneration": {
                "input_feat_per_channel": 16,
                "conv_channels": 64,
                "max_source_positions": 200,
                "max_target_positions": 64,
            }
        },
    ),
    *of_transformers(
        lambda: {"input_values": torch.randn(BATCH, 64, 32), "labels": torch.randint(0, LABELS, (BATCH,))},
        IMAGES,
        {
            "ASTForAudioClassification": {
                "num_mel_bins": 32,
                "max_length": 64,
                "frequency_stride": 8,
                "time_stride": 8,
            }
        },
    ),
)
