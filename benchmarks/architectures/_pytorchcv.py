"""Networks of images, of pytorchcv."""

from __future__ import annotations

import functools

import torch
from torch import nn

from benchmarks.architectures._architecture import Architecture, Training, WithLoss, cross_entropy
from benchmarks.architectures._inputs import BATCH, LABELS, SIDE, classes

# A module of `pytorchcv.models` each, and a network in it; imported so, since `model_provider` wants torchvision.
_NETWORKS = {
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
    return Training(WithLoss(network, cross_entropy), {**batch, "targets": {"classes": classes()}})


def _pool_whole_images(network: nn.Module) -> None:
    """Let a network that was made for 224 pixels have fewer: its last pooling, of 7 pixels or more, takes what there is."""
    for path, part in list(network.named_modules()):
        if isinstance(part, nn.AvgPool2d) and part.kernel_size in (7, 13):
            owner, _, name = path.rpartition(".")
            setattr(network.get_submodule(owner), name, nn.AdaptiveAvgPool2d(1))


PYTORCHCV: tuple[Architecture, ...] = tuple(
    Architecture("pytorchcv", name, functools.partial(_pytorchcv, name, module)) for name, module in _NETWORKS.items()
)
