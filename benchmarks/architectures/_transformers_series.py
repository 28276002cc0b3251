"""Models of time series and of decisions, of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.architectures._architecture import Architecture, Training, WithLoss
from benchmarks.architectures._inputs import BATCH
from benchmarks.architectures._transformers_common import built

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


def _time_series(model: str, config: Mapping[str, Any], batch: Callable[[], dict[str, Any]]) -> Architecture:
    return Architecture("transformers", model, functools.partial(built, model, batch, config))


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


SERIES: tuple[Architecture, ...] = (
    _time_series("PatchTSTForPrediction", _SERIES, _series),
    _time_series("PatchTSMixerForPrediction", _SERIES, _series),
    _time_series("TimeSeriesTransformerForPrediction", _WINDOWS, _windows),
    _time_series("InformerForPrediction", _WINDOWS, _windows),
    _time_series("AutoformerForPrediction", {**_WINDOWS, "label_length": 8, "moving_average": 5}, _windows),
    Architecture("transformers", "DecisionTransformerModel", _decisions),
)
