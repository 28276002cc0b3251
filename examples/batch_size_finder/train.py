"""The largest batch size that trains within a budget: found before training begins, without running out of memory.

python examples/batch_size_finder/train.py --budget 200MiB
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt.train import SMALL, ByteGPT, Size, StandardLibrary

from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback


class Text(L.LightningDataModule):
    """The standard library's source code, in batches of a size that can be set."""

    def __init__(self, length: int, batch_size: int) -> None:
        super().__init__()
        self.text = StandardLibrary(length)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.text, self.batch_size, shuffle=True)


def main() -> int:
    """Find, train a few steps, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="200MiB", help="a size, or auto")
    parser.add_argument("--max-overhead", type=float, help="share of extra time; default: one extra forward")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan, at most")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    L.seed_everything(0)
    size = SMALL if options.small else Size()
    finder = RematBatchSizeFinder(max_overhead=options.max_overhead)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        callbacks=[RematCallback(budget=options.budget, time_limit=options.time_limit), finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ByteGPT(size), datamodule=Text(size.length, batch_size=4))
    if finder.found is None:
        return 1
    print(finder.found.summary())
    return 0 if finder.found.batch_size > finder.found.without else 1


if __name__ == "__main__":
    sys.exit(main())
