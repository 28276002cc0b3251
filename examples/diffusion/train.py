"""Train the U-Net of a diffusion model, which tells the noise in an image, within a memory budget.

    python examples/diffusion/train.py --budget 0.4

The images are made here: bright discs on a dark ground. Times and noise are drawn in the training step, by random numbers that
are the same with the callback and without.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Made, command_line, compare


def sinusoids(times: torch.Tensor, width: int) -> torch.Tensor:
    """Times from 0 to 1, (batch,), as sines and cosines of many frequencies; (batch, width)."""
    frequencies = torch.exp(torch.linspace(0, math.log(1000), width // 2, device=times.device))
    angles = times[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


class Residual(nn.Module):
    """Two convolutions, between which the time is told, added to what came in."""

    def __init__(self, channels: int, out: int, time_width: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(time_width, out)
        self.after = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        told = self.before(x) + self.time(time)[:, :, None, None]
        out: torch.Tensor = self.skip(x) + self.after(told)
        return out


class Attention(nn.Module):
    """Each place of an image attends to all others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.projected = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        heads = self.projected(self.norm(x)).view(batch, 3, channels // 32, 32, height * width).transpose(3, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(1))
        out: torch.Tensor = x + self.out(attended.transpose(2, 3).reshape(x.shape))
        return out


class Denoiser(L.LightningModule):
    """A U-Net with residual blocks, with attention where the image is smallest."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.width, told = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, told), nn.SiLU(), nn.Linear(told, told), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b, told) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = nn.ModuleList([Residual(widths[-1], widths[-1], told), Attention(widths[-1])])
        above = [widths[0], *widths[:-1]]
        self.up = nn.ModuleList(Residual(2 * b, a, told) for a, b in zip(above, widths, strict=True))
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, image: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(sinusoids(times, self.width))
        x, skips = self.first(image), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        residual, attention = self.middle
        x = attention(residual(x, time))
        for block in reversed(self.up):
            x = block(torch.cat([skips.pop(), functional.interpolate(x, scale_factor=2.0)], 1), time)
        out: torch.Tensor = self.last(x)
        return out

    def training_step(self, images: torch.Tensor) -> torch.Tensor:
        times = torch.rand(len(images), device=images.device)
        noise = torch.randn_like(images)
        angle = (times * math.pi / 2)[:, None, None, None]
        loss = functional.mse_loss(self(angle.cos() * images + angle.sin() * noise, times), noise)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def discs(count: int, size: int) -> torch.Tensor:
    """Discs of random place, radius and colour, from -1 to 1; (count, 3, size, size)."""
    generator = torch.Generator().manual_seed(0)
    place, radius, colour = (torch.rand(count, n, 1, 1, generator=generator) for n in (2, 1, 3))
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, size)], indexing="ij")
    distance = (torch.stack([y, x]) - place).square().sum(1, keepdim=True).sqrt()
    return 2 * colour * (distance < 0.1 + 0.3 * radius) - 1


def main() -> int:
    """Train without and with the callback, and compare."""
    options = command_line(__doc__, "diffusion", steps=12).parse_args()
    size, batch, width, levels = (128, 32, 128, 4) if options.large else (32, 8, 32, 3)

    def make() -> Made:
        return Denoiser(width, levels), DataLoader(discs(options.steps * batch, size), batch)

    return compare(make, options)


if __name__ == "__main__":
    sys.exit(main())
