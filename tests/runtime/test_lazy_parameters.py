"""Parameters that get their shapes in the first call are drawn in it, among its other random numbers, as in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat import rematerialize
from lightning_remat.callbacks import RematCallback


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.LazyLinear(12),
        nn.LazyBatchNorm1d(),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.LazyLinear(1),
    )


class LitLazy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_call_that_draws_them_runs_as_before() -> None:
    found: list[list[Any]] = []
    for planned in (False, True):
        net = network()
        step: Any = rematerialize(net, "min", cost_model="unit", solver="greedy") if planned else net
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = step(torch.randn(4, 8)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()])
    assert step.runs == (2,) and not step.failures
    assert all(map(torch.equal, *found))


def test_in_a_lightning_run() -> None:
    found: list[dict[str, torch.Tensor]] = []
    for callbacks in ([], [RematCallback("min", artifacts=False)]):
        module = LitLazy()
        torch.manual_seed(1)
        data = DataLoader(torch.randn(16, 8), batch_size=4)  # type: ignore[arg-type]
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=copy.copy(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
        found.append(module.state_dict())
    assert list(callbacks[0].runs) == [3] and not callbacks[0].failures
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
