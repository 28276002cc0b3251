"""Networks of volumes, of MONAI."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.architectures._architecture import Architecture, OfPositions, Training, WithLoss

_VOLUME: Mapping[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}

_NETWORKS: dict[str, tuple[int, str, Mapping[str, Any]]] = {
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


MONAI: tuple[Architecture, ...] = tuple(
    Architecture("monai", name, functools.partial(_monai, name, side, loss, 2, options))
    for name, (side, loss, options) in _NETWORKS.items()
)
