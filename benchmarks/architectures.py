"""Architectures that people train, in tiny configurations, from their own libraries: what `benchmarks/models.py` runs.

Each entry of `ARCHITECTURES` is a function that makes a module with its loss inside and a batch for it, both random. They are
small enough for a step of a fraction of a second on one core, and wide enough that activations, not parameters, take the
memory: mostly width 64, two layers, four heads, and batches of 8 x 64 tokens. Dropout is on where the architecture has any.

Libraries are imported when an architecture of theirs is built.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, VOCABULARY, LABELS = 8, 64, 200, 10
SIDE = 64
"""Pixels of an image's side."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and on what.

    Attributes:
        module: called with ``**batch`` it returns the scalar loss.
        batch: the inputs by name.
    """

    module: nn.Module
    batch: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One to be built: its library (a distribution's name), its own name, and what makes it."""

    library: str
    name: str
    build: Callable[[], Training]


class WithLoss(nn.Module):
    """A model, and the loss of what it returns: its own where it has one, or ``loss(output, **targets)``."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, targets: Mapping[str, Any] | None = None, **inputs: Any) -> torch.Tensor:
        output = self.model(**inputs)
        loss: torch.Tensor = output.loss if self.loss is None else self.loss(output, **(targets or {}))
        return loss


class OfPositions(nn.Module):
    """A model whose forward takes its inputs by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(*inputs.values())


# -- inputs -----------------------------------------------------------------------------------------------------------


def tokens(length: int = LENGTH, batch: int = BATCH, least: int = 3) -> torch.Tensor:
    """Token indices of shape (batch, length)."""
    return torch.randint(least, VOCABULARY, (batch, length))


def labelled_tokens(**shape: int) -> dict[str, Any]:
    """Tokens that are their own labels, for language models, and for encoders and decoders."""
    ids = tokens(**shape)
    return {"input_ids": ids, "labels": ids.clone()}


def classified_tokens() -> dict[str, Any]:
    """Tokens, and a class each row."""
    return {"input_ids": tokens(), "labels": torch.randint(0, LABELS, (BATCH,))}


def images(side: int = SIDE, batch: int = BATCH) -> dict[str, Any]:
    """Images of shape (batch, 3, side, side), and a class each."""
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, LABELS, (batch,))}


def videos(frames: int = 4, side: int = 32, batch: int = 4) -> dict[str, Any]:
    """Videos of shape (batch, frames, 3, side, side), and a class each."""
    return {"pixel_values": torch.randn(batch, frames, 3, side, side), "labels": torch.randint(0, LABELS, (batch,))}


def waves(samples: int = 8000, batch: int = 4) -> dict[str, Any]:
    """Sound of shape (batch, samples), and twelve letters each."""
    return {"input_values": torch.randn(batch, samples), "labels": torch.randint(3, VOCABULARY, (batch, 12))}


def spoken(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Features of sound, and tokens that say what is heard."""
    return {name: torch.randn(shape), "labels": tokens(24, shape[0])}


def captioned(side: int = 32, length: int = 16) -> dict[str, Any]:
    """Images with texts, for models that learn which belong together. A text ends with the last token there is."""
    ids = torch.randint(3, VOCABULARY - 1, (BATCH, length))
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, side, side), "return_loss": True}


# -- transformers -----------------------------------------------------------------------------------------------------

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

EXPERTS: Mapping[str, Any] = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_OWN_NAMES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_inner": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

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

T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}

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


def _transformers(model: str, batch: Callable[[], dict[str, Any]], config: Mapping[str, Any]) -> Training:
    import transformers

    made = getattr(transformers, model)
    return Training(WithLoss(made(made.config_class(**config))), batch())


def _of_transformers(
    batch: Callable[[], dict[str, Any]], common: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> list[Architecture]:
    """Architectures by the names of their classes, each with what its configuration has beside the common."""
    return [
        Architecture("transformers", model, functools.partial(_transformers, model, batch, {**common, **own}))
        for model, own in models.items()
    ]


def _two_towers(model: str, text: Mapping[str, Any], vision: Mapping[str, Any], **config: Any) -> Architecture:
    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    own_text = {**common, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1}
    both = {
        "text_config": {**own_text, "eos_token_id": VOCABULARY - 1, **text},
        "vision_config": {**common, "image_size": 32, "patch_size": 8, **vision},
        **config,
    }
    return Architecture("transformers", model, functools.partial(_transformers, model, captioned, both))


def _mean_square(output: Any) -> torch.Tensor:
    """Of the last hidden state: a loss for models that have none."""
    hidden: torch.Tensor = output.last_hidden_state
    return hidden.square().mean()


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


_ALL_TOKENS: dict[str, Mapping[str, Any]] = {
    # decoders
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "GPTNeoForCausalLM": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
        "resid_dropout": 0.1,
    },
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.1},
    "GPTJForCausalLM": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "rotary_dim": 8,
        "resid_pdrop": 0.1,
    },
    "GPTBigCodeForCausalLM": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "CodeGenForCausalLM": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "n_ctx": 128,
        "rotary_dim": 8,
        "resid_pdrop": 0.1,
    },
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.1},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
    "FalconForCausalLM": {"hidden_dropout": 0.1},
    "MptForCausalLM": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "CTRLLMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 128, "n_positions": 128},
    "XGLMForCausalLM": {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
    "BioGptForCausalLM": {},
    "PhiForCausalLM": {"resid_pdrop": 0.1},
    "PersimmonForCausalLM": {"hidden_dropout": 0.1},
    "CohereForCausalLM": {},
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    # state spaces
    "MambaForCausalLM": {"state_size": 8},
    "Mamba2ForCausalLM": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "FalconMambaForCausalLM": {"state_size": 8},
    "RwkvForCausalLM": {"attention_hidden_size": 64, "context_length": 128},
    # encoders
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "AlbertForMaskedLM": {
        "embedding_size": 32,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    "ElectraForMaskedLM": {"embedding_size": 32},
    "DistilBertForMaskedLM": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    "DebertaForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    "MobileBertForMaskedLM": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "SqueezeBertForMaskedLM": {"embedding_size": 64},
    "MPNetForMaskedLM": {},
    "ConvBertForMaskedLM": {"embedding_size": 32},
    "CamembertForMaskedLM": {},
    "XLMRobertaForMaskedLM": {},
    "ErnieForMaskedLM": {},
    "EsmForMaskedLM": {"mask_token_id": 3, "position_embedding_type": "rotary", "hidden_dropout_prob": 0.1},
    "FNetForMaskedLM": {},
    "IBertForMaskedLM": {},
    "LongformerForMaskedLM": {"attention_window": 16},
    "MegatronBertForMaskedLM": {},
    "ModernBertForMaskedLM": {
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
        "mlp_dropout": 0.1,
        "embedding_dropout": 0.1,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "NystromformerForMaskedLM": {"num_landmarks": 8, "segment_means_seq_len": 64},
    "RemBertForMaskedLM": {"input_embedding_size": 32, "output_embedding_size": 32},
    "RoFormerForMaskedLM": {},
    "RobertaPreLayerNormForMaskedLM": {},
    "XLMWithLMHeadModel": {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "PerceiverForMaskedLM": {
        "d_model": 32,
        "d_latents": 64,
        "max_position_embeddings": LENGTH,
        "num_latents": 16,
        "num_self_attends_per_block": 2,
        "qk_channels": 32,
        "v_channels": 64,
        "num_cross_attention_heads": 4,
        "num_self_attention_heads": 4,
    },
}

_GROUPED: dict[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 16, "sliding_window": 16},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 16, "sliding_window": 16},
    "Phi3ForCausalLM": {"resid_pdrop": 0.1},
    "GraniteForCausalLM": {},
    "Starcoder2ForCausalLM": {"residual_dropout": 0.1},
    "SmolLM3ForCausalLM": {},
    "GlmForCausalLM": {},
    "HeliumForCausalLM": {},
    "StableLmForCausalLM": {"hidden_dropout": 0.1},
    "NemotronForCausalLM": {},
    "DiffLlamaForCausalLM": {"attention_dropout": 0.0},
    "ApertusForCausalLM": {},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "RecurrentGemmaForCausalLM": {"lru_width": 64, "attention_window_size": 16, "num_hidden_layers": 3},
    "JambaForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}

_EXPERTS: dict[str, Mapping[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": {"num_experts": 4},
    "OlmoeForCausalLM": {"num_experts": 4},
    "GraniteMoeForCausalLM": {"num_local_experts": 4},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "GptOssForCausalLM": {"num_local_experts": 4, "sliding_window": 16},
}

_ENCODERS_DECODERS: dict[str, Mapping[str, Any]] = {
    "BartForConditionalGeneration": {},
    "MBartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "PegasusXForConditionalGeneration": {"block_size": 16, "num_global_tokens": 8},
    "MarianMTModel": {"decoder_vocab_size": VOCABULARY},
    "BlenderbotForConditionalGeneration": {},
    "M2M100ForConditionalGeneration": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "LEDForConditionalGeneration": {
        "attention_window": 16,
        "max_encoder_position_embeddings": 128,
        "max_decoder_position_embeddings": 128,
    },
    "BigBirdPegasusForConditionalGeneration": {"attention_type": "original_full"},
}

_T5: dict[str, Mapping[str, Any]] = {
    "T5ForConditionalGeneration": {},
    "MT5ForConditionalGeneration": {},
    "UMT5ForConditionalGeneration": {},
    "LongT5ForConditionalGeneration": {
        "local_radius": 15,
        "encoder_attention_type": "transient-global",
        "global_block_size": 8,
    },
    "SwitchTransformersForConditionalGeneration": {
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
}

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

_SOUND: dict[str, Mapping[str, Any]] = {
    "Wav2Vec2ForCTC": {},
    "HubertForCTC": {},
    "WavLMForCTC": {"num_buckets": 32},
    "UniSpeechForCTC": {"num_ctc_classes": VOCABULARY},
    "Data2VecAudioForCTC": {"conv_pos_kernel_size": 5},
    "Wav2Vec2ConformerForCTC": {"conv_depthwise_kernel_size": 7},
    "SEWForCTC": {"squeeze_factor": 2},
}


def _time_series(model: str, config: Mapping[str, Any], batch: Callable[[], dict[str, Any]]) -> Architecture:
    return Architecture("transformers", model, functools.partial(_transformers, model, batch, config))


def _series() -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 64, 4), "future_values": torch.randn(BATCH, 16, 4)}


def _windows() -> dict[str, Any]:
    """What the probabilistic transformers of time series want: values, features of time, and what was seen."""
    past, future = 40, 8
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, 1),
    }


_WINDOWS: Mapping[str, Any] = {
    "prediction_length": 8,
    "context_length": 33,
    "lags_sequence": [1, 2, 7],
    "num_time_features": 1,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}

_SERIES: Mapping[str, Any] = {
    "num_input_channels": 4,
    "context_length": 64,
    "prediction_length": 16,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}


def _decisions() -> Training:
    """A decision transformer, on states, actions and returns."""
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(state_dim=8, act_dim=4, hidden_size=64, n_layer=2, n_head=4, max_ep_len=64)
    batch = {
        "states": torch.randn(BATCH, 20, 8),
        "actions": torch.randn(BATCH, 20, 4),
        "rewards": torch.randn(BATCH, 20, 1),
        "returns_to_go": torch.randn(BATCH, 20, 1),
        "timesteps": torch.arange(20).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 20),
    }
    loss = {"targets": {"actions": torch.randn(BATCH, 20, 4)}}

    def error(output: Any, actions: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output.action_preds, actions)

    return Training(WithLoss(DecisionTransformerModel(config), error), {**batch, **loss})


def _transformers_all() -> list[Architecture]:
    return [
        *_of_transformers(labelled_tokens, GROUPED, _GROUPED),
        *_of_transformers(labelled_tokens, TEXT, _ALL_TOKENS),
        *_of_transformers(labelled_tokens, EXPERTS, _EXPERTS),
        *_of_transformers(labelled_tokens, ENCODER_DECODER, _ENCODERS_DECODERS),
        *_of_transformers(labelled_tokens, T5, _T5),
        *_of_transformers(images, IMAGES, _IMAGES),
        *_of_transformers(images, {"num_labels": LABELS}, _PYRAMIDS),
        *_of_transformers(videos, IMAGES, _VIDEOS),
        *_of_transformers(waves, SOUND, _SOUND),
        *_of_transformers(
            labelled_tokens,
            _OWN_NAMES,
            {
                "XLNetLMHeadModel": {"n_layer": 2, "n_head": 4},
                "FunnelForMaskedLM": {"block_sizes": [1, 1], "n_head": 4, "d_head": 16},
                "ProphetNetForConditionalGeneration": {
                    "hidden_size": 64,
                    "num_encoder_layers": 2,
                    "num_decoder_layers": 2,
                    "num_encoder_attention_heads": 4,
                    "num_decoder_attention_heads": 4,
                    "encoder_ffn_dim": 128,
                    "decoder_ffn_dim": 128,
                    "decoder_start_token_id": 1,
                    "ngram": 2,
                    "max_position_embeddings": 128,
                },
            },
        ),
        *_of_transformers(classified_tokens, {**TEXT, "num_labels": LABELS}, {"CanineForSequenceClassification": {}}),
        *_of_transformers(
            lambda: labelled_tokens(length=512, batch=1),
            {**TEXT, "max_position_embeddings": 512},
            {"BigBirdForCausalLM": {"attention_type": "block_sparse", "block_size": 16, "is_decoder": False}},
        ),
        *_of_transformers(
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
        *_of_transformers(
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
        *_of_transformers(
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
        _two_towers("CLIPModel", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}, projection_dim=64),
        _two_towers("SiglipModel", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
        _two_towers("ChineseCLIPModel", {"eos_token_id": 2}, {}, projection_dim=64),
        _two_towers("AltCLIPModel", {"eos_token_id": 2, "project_dim": 64}, {}, projection_dim=64),
        Architecture("transformers", "LlavaForConditionalGeneration", _image_and_text),
        _time_series("PatchTSTForPrediction", _SERIES, _series),
        _time_series("PatchTSMixerForPrediction", _SERIES, _series),
        _time_series("TimeSeriesTransformerForPrediction", _WINDOWS, _windows),
        _time_series("InformerForPrediction", _WINDOWS, _windows),
        _time_series("AutoformerForPrediction", {**_WINDOWS, "label_length": 8, "moving_average": 5}, _windows),
        Architecture("transformers", "DecisionTransformerModel", _decisions),
    ]


# -- pytorchcv --------------------------------------------------------------------------------------------------------

# A module of `pytorchcv.models` each, and a network in it; imported so, since `model_provider` wants torchvision.
_PYTORCHCV = {
    "resnet18": "resnet",
    "preresnet18": "preresnet",
    "seresnet18": "seresnet",
    "densenet121": "densenet",
    "mobilenet_w1": "mobilenet",
    "mobilenetv2_w1": "mobilenetv2",
    "mobilenetv3_small_w1": "mobilenetv3",
    "squeezenet_v1_1": "squeezenet",
    "shufflenetv2_wd2": "shufflenetv2",
    "efficientnet_b0": "efficientnet",
    "dpn68": "dpn",
    "hrnet_w18_small_v1": "hrnet",
    "nin_cifar10": "nin_cifar",
    "resnext29_32x4d_cifar10": "resnext_cifar",
    "rir_cifar10": "rir_cifar",
    "shakeshakeresnet20_2x16d_cifar10": "shakeshakeresnet_cifar",
}


def _pytorchcv(name: str, module: str) -> Training:
    import importlib

    network = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(num_classes=LABELS)
    side = 32 if name.endswith("cifar10") else SIDE
    if side == SIDE:
        _pool_whole_images(network)
    batch = {"x": torch.randn(BATCH, 3, side, side)}
    return Training(WithLoss(network, _cross_entropy), {**batch, "targets": {"classes": _classes()}})


def _pool_whole_images(network: nn.Module) -> None:
    """Let a network that was made for 224 pixels have fewer: its last pooling, of 7 pixels or more, takes what there is."""
    for path, part in list(network.named_modules()):
        if isinstance(part, nn.AvgPool2d) and part.kernel_size in (7, 13):
            owner, _, name = path.rpartition(".")
            setattr(network.get_submodule(owner), name, nn.AdaptiveAvgPool2d(1))


def _classes() -> torch.Tensor:
    return torch.randint(0, LABELS, (BATCH,))


def _cross_entropy(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, classes)


# -- MONAI ------------------------------------------------------------------------------------------------------------


def _monai(name: str, side: int, loss_name: str, channels: int, options: Mapping[str, Any], dims: int = 3) -> Training:
    """A network of volumes, with a segmentation loss of the library's."""
    from monai import losses
    from monai.networks import nets

    network = getattr(nets, name)(**options)
    loss = getattr(losses, loss_name)(to_onehot_y=True, softmax=True)
    shape = (1, *[side] * dims)
    batch = 1 if side > 32 else 2
    x, labels = torch.randn(batch, *shape), torch.randint(0, channels, (batch, *shape)).float()

    def segmentation(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(output[0] if isinstance(output, list | tuple) else output, labels)
        return found

    return Training(WithLoss(OfPositions(network), segmentation), {"x": x, "targets": {"labels": labels}})


_VOLUME: Mapping[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}

_MONAI: dict[str, tuple[int, str, Mapping[str, Any]]] = {
    "UNet": (
        32,
        "DiceCELoss",
        {**_VOLUME, "channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "dropout": 0.1},
    ),
    "BasicUNet": (32, "DiceLoss", {**_VOLUME, "features": (8, 8, 16, 16, 16, 8), "dropout": 0.1}),
    "AttentionUnet": (32, "DiceFocalLoss", {**_VOLUME, "channels": (8, 16, 32), "strides": (2, 2), "dropout": 0.1}),
    "SegResNet": (32, "DiceCELoss", {**_VOLUME, "init_filters": 8, "dropout_prob": 0.1}),
    "UNETR": (
        32,
        "DiceCELoss",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (32, 32, 32),
            "feature_size": 8,
            "hidden_size": 48,
            "mlp_dim": 96,
            "num_heads": 4,
            "dropout_rate": 0.1,
        },
    ),
    "SwinUNETR": (64, "DiceCELoss", {"in_channels": 1, "out_channels": 2, "feature_size": 12, "drop_rate": 0.1}),
    "DynUNet": (
        32,
        "DiceCELoss",
        {
            **_VOLUME,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [8, 16, 32],
        },
    ),
}


# -- diffusers --------------------------------------------------------------------------------------------------------


def _diffusers(name: str, config: Mapping[str, Any], batch: Callable[[], dict[str, Any]]) -> Training:
    import diffusers

    model = getattr(diffusers, name)(**config)
    made = batch()
    target = made.pop("target")

    def error(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output.sample, target)

    return Training(WithLoss(model, error), {**made, "targets": {"target": target}})


def _noised(side: int = 32, channels: int = 3, **more: Callable[[], Any]) -> dict[str, Any]:
    x = torch.randn(2, channels, side, side)
    made = {"sample": x, "timestep": torch.tensor([3, 40]), "target": torch.randn_like(x)}
    return {**made, **{name: one() for name, one in more.items()}}


def _renamed(batch: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: one for name, one in batch.items()}


_DIFFUSERS: dict[str, tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
    "UNet2DModel": (
        {
            "sample_size": 32,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
            "dropout": 0.1,
        },
        _noised,
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        lambda: _noised(16, 4, encoder_hidden_states=lambda: torch.randn(2, 12, 32)),
    ),
    "DiTTransformer2DModel": (
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "norm_num_groups": 8,
            "num_embeds_ada_norm": 10,
            "dropout": 0.1,
        },
        lambda: {"class_labels": torch.tensor([1, 2]), **_renamed(_noised(16, 4), "sample", "hidden_states")},
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
        },
        lambda: {name: one for name, one in _noised(32).items() if name != "timestep"},
    ),
    "VQModel": (
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            "num_vq_embeddings": 32,
        },
        lambda: {name: one for name, one in _noised(32).items() if name != "timestep"},
    ),
}


# -- PEFT -------------------------------------------------------------------------------------------------------------


def _peft(adapter: str, options: Mapping[str, Any]) -> Training:
    """A frozen Llama with adapters that are trained."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    adapted = peft.get_peft_model(model, getattr(peft, adapter)(task_type="CAUSAL_LM", **options))
    return Training(WithLoss(adapted), labelled_tokens())


_LAYERS = ["q_proj", "v_proj"]
_PEFT: dict[str, tuple[str, Mapping[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": _LAYERS}),
    "DoRA": ("LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": _LAYERS, "use_dora": True}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 4, "module_dropout": 0.0, "target_modules": _LAYERS}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 16, "target_modules": _LAYERS}),
    "PrefixTuning": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "PromptTuning": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
}


# -- PyTorch Geometric ------------------------------------------------------------------------------------------------


def _graph(nodes: int = 400, edges: int = 1600) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(nodes, 16), "edge_index": torch.randint(0, nodes, (2, edges))}


def _geometric(name: str, options: Mapping[str, Any]) -> Training:
    """A network of nodes, each of one class."""
    from torch_geometric import nn as layers

    network = getattr(layers, name)(
        in_channels=16, hidden_channels=64, num_layers=3, out_channels=LABELS, dropout=0.1, **options
    )

    batch = _graph()
    return Training(
        WithLoss(network, _cross_entropy),
        {**batch, "targets": {"classes": torch.randint(0, LABELS, (len(batch["x"]),))}},
    )


_GEOMETRIC: dict[str, Mapping[str, Any]] = {
    "GCN": {},
    "GAT": {"heads": 4},
    "GraphSAGE": {},
    "GIN": {},
    "PNA": {
        "aggregators": ["mean", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": torch.ones(20).long(),
    },
    "EdgeCNN": {},
}


# -- x-transformers ---------------------------------------------------------------------------------------------------


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
        WithLoss(OfPositions(model), _cross_entropy),
        {"img": made["pixel_values"], "targets": {"classes": made["labels"]}},
    )


_X_TRANSFORMERS: dict[str, Mapping[str, Any]] = {
    "decoder, rotary": {"rotary_pos_emb": True},
    "decoder, flash, ALiBi": {"alibi_pos_bias": True, "attn_flash": True},
    "decoder, GLU, RMSNorm, QK norm": {"ff_glu": True, "use_rmsnorm": True, "attn_qk_norm": True, "rel_pos_bias": True},
}


# -- timm -------------------------------------------------------------------------------------------------------------


def _timm(name: str, options: Mapping[str, Any]) -> Training:
    import timm

    network = timm.create_model(name, num_classes=LABELS, **options)

    made = images()
    return Training(
        WithLoss(network, _cross_entropy), {"x": made["pixel_values"], "targets": {"classes": made["labels"]}}
    )


ARCHITECTURES: tuple[Architecture, ...] = (
    *_transformers_all(),
    *(
        Architecture("pytorchcv", name, functools.partial(_pytorchcv, name, module))
        for name, module in _PYTORCHCV.items()
    ),
    *(
        Architecture("monai", name, functools.partial(_monai, name, side, loss, 2, options))
        for name, (side, loss, options) in _MONAI.items()
    ),
    *(
        Architecture("diffusers", name, functools.partial(_diffusers, name, config, batch))
        for name, (config, batch) in _DIFFUSERS.items()
    ),
    *(
        Architecture("peft", f"{name} on Llama", functools.partial(_peft, adapter, options))
        for name, (adapter, options) in _PEFT.items()
    ),
    *(
        Architecture("torch_geometric", name, functools.partial(_geometric, name, options))
        for name, options in _GEOMETRIC.items()
    ),
    *(
        Architecture("x_transformers", name, functools.partial(_x_transformers, options))
        for name, options in _X_TRANSFORMERS.items()
    ),
    Architecture("x_transformers", "vision encoder", _x_vit),
)
