"""Recognize speech of varying length with CTC, within a memory budget.

    python examples/speech/train.py --budget 0.5

Convolutions over the waveform, a transformer, and CTC. The sound is made here: each letter of a word is a tone. Batches are
padded to one of a few lengths, and each new shape is planned when it first comes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Made, command_line, compare

LETTERS, TONE, SHRINKS = 12, 640, 64  # letters of the alphabet; samples of a letter; samples that become one frame
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Recognizer(L.LightningModule):
    """From a waveform to letters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        shrunk = [nn.Conv1d(a, width, 8, 4, padding=2) for a in (1, width, width)]
        self.frames = nn.Sequential(*(layer for one in shrunk for layer in (one, nn.GroupNorm(1, width), nn.GELU())))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.context = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.letters = nn.Linear(width, LETTERS + 1)

    def training_step(self, batch: Batch) -> torch.Tensor:
        waves, words, letters = batch
        x = self.context(self.frames(waves[:, None]).transpose(1, 2))
        log_probabilities = self.letters(x).log_softmax(2).transpose(0, 1)
        frames = letters * (TONE // SHRINKS)
        loss = functional.ctc_loss(log_probabilities, words, frames, letters)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def spoken(batch: int, longest: int, seed: int) -> Batch:
    """Words of up to so many letters, padded: waves (batch, samples), letters from 1 (batch, longest), how many (batch,)."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(longest // 2, longest + 1, (batch,), generator=generator)
    words = torch.randint(1, LETTERS + 1, (batch, longest), generator=generator)
    time = torch.arange(TONE) / TONE
    waves = torch.sin(6.283 * (8 + 6 * words[:, :, None]) * time)
    spoken = waves * (torch.arange(longest) < letters[:, None])[:, :, None]
    return spoken.flatten(1) + 0.05 * torch.randn(batch, longest * TONE, generator=generator), words, letters


def main() -> int:
    """Train without and with the callback, and compare."""
    options = command_line(__doc__, "speech", budget="0.5", steps=16).parse_args()
    batch, width, layers, lengths = (32, 512, 8, (64, 96, 128)) if options.large else (4, 64, 3, (8, 12))

    def make() -> Made:
        chosen = [*random.Random(0).choices(lengths, k=options.steps - 1), max(lengths)]
        return Recognizer(width, layers), DataLoader(
            [spoken(batch, n, seed) for seed, n in enumerate(chosen)], batch_size=None
        )

    return compare(make, options, repeatable_on_cuda=False)  # CTC's gradient is not


if __name__ == "__main__":
    sys.exit(main())
