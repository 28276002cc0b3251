"""Segment a photograph at its full resolution with a U-Net, within a memory budget.

    python examples/segmentation/train.py --budget 0.4

The photograph is the one that comes with matplotlib (Rear Admiral Grace Hopper, 606 x 512 pixels); the classes are its four
dominant colours, found by k-means. What matters here is the step: convolutions, batch norm and long skips on whole images,
where activations take nearly all of the memory.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import matplotlib.cbook
import matplotlib.pyplot
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_remat.callbacks import RematCallback
from lightning_remat.report import format_bytes

CLASSES = 4


def photograph() -> torch.Tensor:
    """The photograph, (3, height, width), from 0 to 1."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        pixels = matplotlib.pyplot.imread(file, format="jpg")
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def dominant_colours(image: torch.Tensor, rounds: int = 10) -> torch.Tensor:
    """For each pixel, which of the dominant colours is nearest; (height, width)."""
    pixels = image.flatten(1).T
    generator = torch.Generator().manual_seed(0)
    colours = pixels[torch.randperm(len(pixels), generator=generator)[:CLASSES]]
    for _ in range(rounds):
        nearest = torch.cdist(pixels, colours).argmin(1)
        colours = torch.stack([pixels[nearest == i].mean(0) for i in range(CLASSES)])
    return nearest.view(image.shape[1:])


class Views(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The photograph in other light and mirrored, with the class of each pixel.

    Args:
        size: height and width, a multiple of 16.
        count: how many.
    """

    def __init__(self, size: int, count: int) -> None:
        image = photograph()
        classes = dominant_colours(image)
        self.image = functional.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]
        self.classes = functional.interpolate(classes[None, None].float(), (size, size))[0, 0].long()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        light = 0.7 + 0.6 * torch.rand(3, 1, 1, generator=generator)
        image, classes = self.image * light, self.classes
        return (image.flip(2), classes.flip(1)) if index % 2 else (image, classes)


def convolutions(channels: int, out: int) -> nn.Sequential:
    """Two convolutions with batch norm."""
    layers: list[nn.Module] = []
    for given in (channels, out):
        layers += [nn.Conv2d(given, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(L.LightningModule):
    """A U-Net: what is seen at each resolution skips to where that resolution is reached again."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(convolutions(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(convolutions(2 * a, a) for a in widths[:-1])
        self.classes = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        x = image
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for level in reversed(range(len(skips))):
            x = self.merge[level](torch.cat([skips[level], self.up[level](x)], 1))
        classes: torch.Tensor = self.classes(x)
        return classes

    def training_step(self, batch: Any) -> torch.Tensor:
        image, classes = batch
        logits = self(image)
        loss = functional.cross_entropy(logits, classes)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", (logits.argmax(1) == classes).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> int:
    """Train, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.4", help="a share, a size, auto or min")
    parser.add_argument("--size", type=int, default=512, help="height and width in pixels, a multiple of 16")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=16, help="channels at full resolution")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan, at most")
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()
    L.seed_everything(0)
    remat = RematCallback(budget=options.budget, time_limit=options.time_limit)
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_steps=options.steps,
        callbacks=[remat],
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=5,
    )
    views = Views(options.size, options.steps * options.batch_size)
    trainer.fit(UNet(options.width), DataLoader(views, options.batch_size))
    plan, measured = remat.plan, remat.measured_peak_bytes
    if plan is None or measured is None:
        return 1
    print(
        f"peak: {format_bytes(plan.baseline_peak_bytes)} without, {format_bytes(measured)} measured, budget "
        f"{format_bytes(plan.budget_bytes)}; {plan.overhead:+.1%} time predicted; last accuracy "
        f"{trainer.callback_metrics['train/accuracy']:.2f}"
    )
    return 0 if measured <= plan.budget_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
