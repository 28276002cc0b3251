"""The largest batch is looked for with losses computed in slices."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from tests.helpers.training import callback, trainer

CLASSES = 4000
BUDGET = 12 * 2**20


class Language(pl.LightningModule):
    """A bag of tokens to one of many classes: the logits are most of what it holds."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, CLASSES)
        self.batch_size = batch_size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, target = batch
        return functional.cross_entropy(self.head(torch.tanh(self.embed(tokens).mean(1))), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(0)
        return DataLoader(
            TensorDataset(torch.randint(0, 64, (2048, 5)), torch.randint(0, CLASSES, (2048,))), self.batch_size
        )


def found(tiling: str) -> tuple[RematBatchSizeFinder, RematCallback]:
    finder, remat = RematBatchSizeFinder(), callback(BUDGET, cost_model="profile", time_limit=0.5, tiling=tiling)
    trainer(remat, finder, max_steps=2).fit(Language())
    assert finder.found is not None and finder.found.measured_peak_bytes <= BUDGET
    return finder, remat


@pytest.mark.long
def test_batches_are_larger_with_losses_in_slices() -> None:
    (whole, _), (sliced, remat) = found("off"), found("exact")
    assert whole.found is not None and sliced.found is not None
    assert sliced.found.batch_size >= 1.4 * whole.found.batch_size
    assert sliced.found.without == pytest.approx(whole.found.without, rel=0.05), "of the step as it was captured"
    assert remat.plan is not None and remat.runs
    assert {op.target for op in remat.plan.graph.ops} >= {"loss_of_rows", "gradient_of_rows"}
    assert remat.plan.predicted_peak_bytes <= BUDGET
