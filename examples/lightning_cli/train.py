"""Everything from files: LightningCLI.

python examples/lightning_cli/train.py fit --config examples/lightning_cli/config.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt.train import ByteGPT, Size, StandardLibrary


class Model(ByteGPT):
    """A byte GPT whose size is given by numbers."""

    def __init__(
        self, layers: int = 4, width: int = 64, heads: int = 2, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__(Size(layers, width, heads, length), dropout)


class Data(L.LightningDataModule):
    """Python's standard library."""

    def __init__(self, length: int = 64, batch_size: int = 4) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(StandardLibrary(self.length), self.batch_size)


if __name__ == "__main__":
    LightningCLI(Model, Data, save_config_callback=None)
