"""Training on sequences of very many lengths: how much of it goes into capture and planning.

    python benchmarks/lengths.py --lengths 200

A GPT-2 (dropout on) trains with `RematCallback` on batches of so many different lengths, each once an epoch, in random order,
within a budget that the longest do not fit without rematerialization. The same epochs are trained without the callback, and
the parameters after both are compared bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common.commands import command_line
from benchmarks.common.results import RESULTS, stamp, write
from lightning_remat.callbacks import RematCallback
from lightning_remat.capture import _torch as internals
from lightning_remat.report import format_bytes

PACKAGES = ("lightning_remat", "torch", "lightning", "transformers", "mip")
LONGEST = 512


@dataclasses.dataclass
class Epoch:
    """What one epoch took.

    Attributes:
        seconds: with the callback; ``eager_seconds``: without.
        graphs: captured by Dynamo.
        plans: made.
        waited_seconds: of the steps' time, spent on capture, measuring, planning, and looking for a plan at hand.
    """

    seconds: float
    eager_seconds: float
    graphs: int
    plans: int
    waited_seconds: float


class Lengths(IterableDataset[torch.Tensor]):
    """Batches of tokens, each of another length."""

    def __init__(self, lengths: list[int], batch: int, vocabulary: int) -> None:
        self.lengths, self.batch, self.vocabulary = lengths, batch, vocabulary
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.Random(self.epoch).sample(self.lengths, len(self.lengths))
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        for length in order:
            yield torch.randint(0, self.vocabulary, (self.batch, length), generator=generator)


class Language(L.LightningModule):
    """GPT-2 on tokens of shape (batch, time)."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers,
                n_embd=width,
                n_head=width // 32,
                vocab_size=vocabulary,
                n_positions=LONGEST,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def training_step(self, tokens: torch.Tensor, _batch_idx: int) -> torch.Tensor:
        logits = self.model(tokens, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Seconds of each epoch, and what was captured and planned in it."""

    def __init__(self, remat: RematCallback | None) -> None:
        self.remat = remat
        self.epochs: list[tuple[float, int, int, float]] = []

    def _counts(self) -> tuple[int, int, float]:
        graphs = int(internals.dynamo_counters["stats"]["unique_graphs"])
        step = self.remat.training_step if self.remat is not None else None
        if step is None:
            return graphs, 0, 0.0
        return graphs, len(step.scheduled.plans), step.scheduled.planning_seconds

    def on_train_epoch_start(self, *_: Any) -> None:
        self._started, self._before = time.perf_counter(), self._counts()

    def on_train_epoch_end(self, *_: Any) -> None:
        graphs, plans, seconds = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        self.epochs.append((time.perf_counter() - self._started, int(graphs), int(plans), seconds))


def train(options: argparse.Namespace, budget: str | None) -> tuple[Language, Clock, RematCallback | None]:
    """Some epochs, with the callback where there is a budget."""
    L.seed_everything(0, verbose=False)
    module = Language(options.layers, options.width, options.vocabulary)
    lengths = random.Random(1).sample(range(options.shortest, LONGEST + 1), options.lengths)
    remat = RematCallback(budget=budget, artifacts=False, measure=False) if budget else None
    clock = Clock(remat)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        callbacks=[clock, *([remat] if remat else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Lengths(lengths, options.batch, options.vocabulary), batch_size=None))
    return module, clock, remat


def main() -> int:
    """Train both, compare, print, and write JSON; returns 1 where the bits differ or later epochs wait too long."""
    parser = command_line(__doc__)
    parser.add_argument("--lengths", type=int, default=200, help="different lengths, one batch each an epoch")
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--budget", default="220MiB")
    parser.add_argument("--out", type=Path, default=RESULTS / "lengths-cpu.json")
    options = parser.parse_args()
    eager, eager_clock, _ = train(options, None)
    ours, clock, remat = train(options, options.budget)
    assert remat is not None
    same = all(torch.equal(a, b) for a, b in zip(eager.state_dict().values(), ours.state_dict().values(), strict=True))
    epochs = [
        Epoch(seconds, plain[0], graphs, plans, waited)
        for (seconds, graphs, plans, waited), plain in zip(clock.epochs, eager_clock.epochs, strict=True)
    ]
    largest = max(remat.plans, key=lambda plan: plan.baseline_peak_bytes)
    needed = sum(plan.rematerializes for plan in remat.plans)
    print(
        f"{options.lengths} lengths, budget {options.budget}, baseline of the longest "
        f"{format_bytes(largest.baseline_peak_bytes)}; "
        f"{len(remat.plans)} plans, {needed} of which rematerialize; bits {'equal' if same else 'DIFFER'}"
    )
    for number, epoch in enumerate(epochs, start=1):
        share = epoch.waited_seconds / epoch.seconds
        print(
            f"epoch {number}: {epoch.seconds:.1f} s ({epoch.eager_seconds:.1f} s without), {epoch.graphs} graphs captured, "
            f"{epoch.plans} plans made, {epoch.waited_seconds:.1f} s of capture and planning ({share:.1%})"
        )
    data = {
        "format": "lightning_remat.lengths",
        "version": 1,
        **stamp(PACKAGES, "cpu"),
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "bitwise": same,
        "plans": len(remat.plans),
        "rematerializing": needed,
        "failures": list(remat.failures),
        "epochs": [dataclasses.asdict(epoch) for epoch in epochs],
    }
    write(options.out, data)
    waits = any(epoch.waited_seconds > 0.05 * epoch.seconds for epoch in epochs[1:])
    return 0 if same and not waits and needed else 1


if __name__ == "__main__":
    sys.exit(main())
