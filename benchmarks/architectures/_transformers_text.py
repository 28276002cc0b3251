"""Models of texts, of transformers: decoders, state spaces, experts, encoders, and encoders with decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures._architecture import Architecture
from benchmarks.architectures._inputs import LABELS, LENGTH, VOCABULARY, classified_tokens, labelled_tokens
from benchmarks.architectures._transformers_common import ENCODER_DECODER, GROUPED, TEXT, of_transformers

EXPERTS: Mapping[str, Any] = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

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

_OWN_NAMES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_inner": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
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

TEXTS: tuple[Architecture, ...] = (
    *of_transformers(labelled_tokens, GROUPED, _GROUPED),
    *of_transformers(labelled_tokens, TEXT, _ALL_TOKENS),
    *of_transformers(labelled_tokens, EXPERTS, _EXPERTS),
    *of_transformers(labelled_tokens, ENCODER_DECODER, _ENCODERS_DECODERS),
    *of_transformers(labelled_tokens, T5, _T5),
)

OTHER_TEXTS: tuple[Architecture, ...] = (
    *of_transformers(
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
    *of_transformers(classified_tokens, {**TEXT, "num_labels": LABELS}, {"CanineForSequenceClassification": {}}),
    *of_transformers(
        lambda: labelled_tokens(length=512, batch=1),
        {**TEXT, "max_position_embeddings": 512},
        {"BigBirdForCausalLM": {"attention_type": "block_sparse", "block_size": 16, "is_decoder": False}},
    ),
)
"""Whose configurations have names of their own, or whose batches are others."""
