"""``python -m tests.helpers.slow_fit STAGE``: a fit whose first step takes seconds in one stage, to be interrupted there."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat.callbacks import RematCallback
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.solvers.portfolio import _auto

STAGES = {"capture": "capturing", "measure": "measuring operation"}
"""How the words of a stage begin; ``solve`` waits once something was found, and ``train`` after each batch."""

SECONDS = 20.0


class Net(pl.LightningModule):
    """Eight layers."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.waits = waits
        self.net = torch.nn.Sequential(
            *(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU()))
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One step."""
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Say that a batch is done."""
        print("a batch is done", flush=True)
        if self.waits:
            time.sleep(SECONDS)

    def on_train_end(self) -> None:
        """Say that training has ended as it ends."""
        print("training ended", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(stage: str, folder: Path) -> None:
    """Fit."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    show = PlanningProgress.__call__

    def shown(progress: PlanningProgress, words: str) -> None:
        show(progress, words)
        if stage in STAGES and words.startswith(STAGES[stage]):
            time.sleep(SECONDS)

    PlanningProgress.__call__ = shown  # type: ignore[method-assign]
    if stage == "solve":
        attempt = _auto._Portfolio.attempt

        def slow(portfolio: Any, *args: Any, **kwargs: Any) -> Any:
            if portfolio.found:
                time.sleep(SECONDS)
            return attempt(portfolio, *args, **kwargs)

        _auto._Portfolio.attempt = slow  # type: ignore[method-assign]
    module, remat = Net(stage == "train"), RematCallback(budget=0.5)
    data = DataLoader(TensorDataset(torch.randn(96, 64)), batch_size=32)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[remat],
    )
    try:
        trainer.fit(module, data)
    finally:
        print("left alone:", "training_step" not in vars(module), flush=True)
        print("ran:", remat.runs, [plan.rematerializes for plan in remat.plans], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
