"""Networks that take noise from images, and autoencoders, of diffusers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from benchmarks.architectures._architecture import Architecture, Training, WithLoss


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


_NETWORKS: dict[str, tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
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

DIFFUSERS: tuple[Architecture, ...] = tuple(
    Architecture("diffusers", name, functools.partial(_diffusers, name, config, batch))
    for name, (config, batch) in _NETWORKS.items()
)
