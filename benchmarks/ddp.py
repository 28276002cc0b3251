"""What a training step under DDP takes, with the callback and without, and with gradients that leave the backward at its end.

    python -m benchmarks.ddp                            # GPT-2, BERT, ResNet-18: some ten minutes
    python -m benchmarks.ddp --network gpt2 --rounds 5

Two processes of one thread each train every network for some steps in each way, in turns: plain DDP, the callback within a
budget of 1.0 (nothing is computed twice), the same with the gradients handed to DDP when the backward has ended, and the
callback at half of what can be saved. Parameters are compared bit by bit. A ratio is that of the medians of all steps but the
first ones of each round.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.results import RESULTS, stamp, write
from lightning_remat.callbacks import RematCallback, training_step
from lightning_remat.exactness import same_bits

PACKAGES = ("lightning_remat", "torch", "lightning", "transformers", "pytorchcv")
NETWORKS = ("gpt2", "bert", "resnet18")
STEPS, WARM_UP = 10, 4
"""Steps of each round, and those of them that are not timed."""

PROCESSES = 2


class Repeated(IterableDataset[Any]):
    """One batch, for each step of a round."""

    def __init__(self, batch: tuple[torch.Tensor, ...]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * STEPS)


class Net(pl.LightningModule):
    """A network that holds its own loss; notes when its steps end."""

    def __init__(self, name: str, size: str) -> None:
        super().__init__()
        workload = networks.build(name, size)
        self.net, self._batch = workload.module, workload.batch
        self.ends: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Repeated(self._batch), batch_size=None)


@contextlib.contextmanager
def at_the_end() -> Iterator[None]:
    """While open, gradients leave a planned backward when it has ended."""
    with mock.patch.object(training_step, "reduces_gradients", return_value=False):
        yield


def trained(name: str, size: str, callback: pl.Callback | None) -> tuple[list[float], list[torch.Tensor]]:
    """Seconds of some steps, and the parameters after them."""
    torch.manual_seed(0)
    net = Net(name, size)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=DDPStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback is not None else [],
    )
    trainer.fit(net)
    if isinstance(callback, RematCallback) and not sum(callback.runs):
        raise RuntimeError(f"{name} does not run by its plan: {callback.failures}")
    times = [b - a for a, b in zip(net.ends[WARM_UP:], net.ends[WARM_UP + 1 :], strict=False)]
    return times, [one.detach().clone() for one in net.parameters()]


def measured(name: str, size: str, rounds: int) -> dict[str, Any]:
    """Steps of a network in each way, in turns."""
    ways: dict[str, Any] = {
        "DDP": lambda: None,
        "callback": lambda: RematCallback(budget=1.0, time_limit=10.0),
        "gradients at the end": lambda: RematCallback(budget=1.0, time_limit=10.0),
        "half": lambda: RematCallback(budget=0.5, time_limit=10.0),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    exact, expected = True, list[torch.Tensor]()
    for _ in range(rounds):
        for way, make in ways.items():
            with at_the_end() if way == "gradients at the end" else contextlib.nullcontext():
                found, parameters = trained(name, size, make())
            times[way] += found
            expected = expected or parameters
            exact = exact and all(map(same_bits, expected, parameters))
    medians = {way: statistics.median(found) for way, found in times.items()}
    return {
        "network": name,
        "exact": exact,
        "seconds": medians,
        "ratios": {way: seconds / medians["DDP"] for way, seconds in medians.items()},
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The results as a table."""
    ways = list(rows[0]["ratios"])[1:]
    head = ["network", "bits", "DDP, s", *ways]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["network"], "equal" if row["exact"] else "differ", f"{row['seconds']['DDP']:.3f}"]
        lines.append("| " + " | ".join([*cells, *(f"{row['ratios'][way]:.3f}" for way in ways)]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Time the networks, print a table, and write JSON and Markdown."""
    parser = command_line(__doc__)
    add_networks(parser, networks.networks())
    parser.add_argument("--size", choices=networks.SIZES, default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "ddp-cpu.json", help="the table goes beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(name, options.size, options.rounds) for name in options.networks or NETWORKS]
    if int(os.environ.get("LOCAL_RANK", "0")):
        return 0
    table = markdown(rows)
    print(table)
    write(options.out, {"format": "lightning_remat.ddp", "version": 1, **stamp(PACKAGES, "cpu"), "networks": rows})
    options.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
