"""How networks of timm are built. `ARCHITECTURES` has none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures._architecture import Training, WithLoss, cross_entropy
from benchmarks.architectures._inputs import LABELS, images


def built(name: str, options: Mapping[str, Any]) -> Training:
    """A network of images by its name, with what `timm.create_model` takes beside it."""
    import timm

    network = timm.create_model(name, num_classes=LABELS, **options)

    made = images()
    return Training(
        WithLoss(network, cross_entropy), {"x": made["pixel_values"], "targets": {"classes": made["labels"]}}
    )
