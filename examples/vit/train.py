"""Classify images with a Vision Transformer of transformers, within a memory budget.

    python examples/vit/train.py --budget 0.4

The model has random weights; the images are made here: gratings in noise, whose direction is the class.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Made, command_line, compare

CLASSES = 8


class Gratings(Dataset[tuple[torch.Tensor, int]]):
    """Stripes across noise, (3, size, size), in one of as many directions as there are classes."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        direction = int(torch.randint(CLASSES, (), generator=generator))
        angle, phase = math.pi * direction / CLASSES, 6 * torch.rand((), generator=generator)
        y, x = torch.meshgrid(*2 * [torch.arange(self.size) / 2], indexing="ij")
        stripes = torch.sin(math.cos(angle) * x + math.sin(angle) * y + phase)
        return stripes + 0.3 * torch.randn(3, self.size, self.size, generator=generator), direction


class Classifier(L.LightningModule):
    """The transformer, its loss and its optimizer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.network = ViTForImageClassification(config)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss: torch.Tensor = self.network(pixel_values=images, labels=labels).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3 if self.network.config.hidden_size < 512 else 1e-4)


def main() -> int:
    """Train without and with the callback, and compare."""
    options = command_line(__doc__, "vit", steps=16).parse_args()
    size, batch = (224, 64) if options.large else (64, 16)
    width, layers, patch = (768, 12, 16) if options.large else (96, 6, 8)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32 if width < 512 else width // 64,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
        hidden_dropout_prob=0.1,
        num_labels=CLASSES,
    )

    def make() -> Made:
        return Classifier(config), DataLoader(Gratings(size, options.steps * batch), batch)

    return compare(make, options)


if __name__ == "__main__":
    sys.exit(main())
