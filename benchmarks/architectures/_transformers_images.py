"""Models of images and of videos, of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures._architecture import Architecture
from benchmarks.architectures._inputs import LABELS, SIDE, images, videos
from benchmarks.architectures._transformers_common import IMAGES, of_transformers

_IMAGES: dict[str, Mapping[str, Any]] = {
    "ViTForImageClassification": {},
    "DeiTForImageClassification": {},
    "BeitForImageClassification": {"use_relative_position_bias": True, "drop_path_rate": 0.1},
    "Dinov2ForImageClassification": {"drop_path_rate": 0.1},
    "ViTMSNForImageClassification": {},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
    },
}

_PYRAMIDS: dict[str, Mapping[str, Any]] = {
    "SwinForImageClassification": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "patch_size": 4,
    },
    "Swinv2ForImageClassification": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "patch_size": 4,
    },
    "ConvNextForImageClassification": {
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_stages": 2,
        "drop_path_rate": 0.1,
    },
    "ConvNextV2ForImageClassification": {
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_stages": 2,
        "drop_path_rate": 0.1,
    },
    "CvtForImageClassification": {
        "embed_dim": [16, 32, 64],
        "num_heads": [1, 2, 4],
        "depth": [1, 2, 3],
        "drop_rate": [0.1, 0.1, 0.1],
    },
    "ResNetForImageClassification": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "layer_type": "basic",
    },
    "RegNetForImageClassification": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 2],
        "groups_width": 8,
    },
    "LevitForImageClassification": {
        "image_size": SIDE,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "MobileNetV1ForImageClassification": {"image_size": SIDE, "depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"image_size": SIDE, "depth_multiplier": 0.25},
    "MobileViTForImageClassification": {
        "image_size": SIDE,
        "hidden_sizes": [32, 48, 64],
        "neck_hidden_sizes": [8, 16, 24, 32, 32, 48, 64],
    },
    "PoolFormerForImageClassification": {
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 2, 1],
        "drop_path_rate": 0.1,
    },
    "PvtForImageClassification": {
        "image_size": SIDE,
        "hidden_sizes": [16, 32, 48, 64],
        "num_attention_heads": [1, 2, 3, 4],
        "depths": [1, 1, 1, 1],
        "hidden_dropout_prob": 0.1,
    },
    "SegformerForImageClassification": {
        "hidden_sizes": [16, 32, 48, 64],
        "num_attention_heads": [1, 2, 3, 4],
        "depths": [1, 1, 1, 1],
        "decoder_hidden_size": 32,
    },
    "EfficientNetForImageClassification": {
        "image_size": SIDE,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.5,
        "hidden_dim": 320,
    },
    "BitForImageClassification": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "num_groups": 8},
    "FocalNetForImageClassification": {
        "image_size": SIDE,
        "embed_dim": 16,
        "depths": [1, 2],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    },
    "HieraForImageClassification": {
        "image_size": [SIDE, SIDE],
        "embed_dim": 16,
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 2, 4],
    },
    "SwiftFormerForImageClassification": {"image_size": SIDE, "embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
}

_VIDEOS: dict[str, Mapping[str, Any]] = {
    "VideoMAEForVideoClassification": {"image_size": 32, "num_frames": 4, "tubelet_size": 2},
    "VivitForVideoClassification": {"image_size": 32, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    "TimesformerForVideoClassification": {"image_size": 32, "num_frames": 4},
}

IMAGES_AND_VIDEOS: tuple[Architecture, ...] = (
    *of_transformers(images, IMAGES, _IMAGES),
    *of_transformers(images, {"num_labels": LABELS}, _PYRAMIDS),
    *of_transformers(videos, IMAGES, _VIDEOS),
)
