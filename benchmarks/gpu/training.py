"""Training in a Lightning Trainer, watched: how it ended, what it left, and what it took."""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_remat.strategies  # noqa: F401 - registers strategy="remat"
from benchmarks import batch_sizes, networks
from benchmarks.determinism import settle
from benchmarks.gpu.part import MISMATCH, UNREPEATABLE, Settings
from benchmarks.gpu.steps import Left, left_by
from lightning_remat import InfeasibleBudgetError

TRAINED, OUT_OF_MEMORY, INFEASIBLE = "trained", "out of memory", "infeasible"
STEADY = 3
"""Batches until a step is like all others: the first is planned, the second is measured by the callback."""

STEPS = 6
SAMPLES = 8192


class Rows(Dataset[Any]):
    """The samples of a batch, over and over."""

    def __init__(self, batch: Sequence[torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(one[index % len(one)] for one in self.batch)


class Training(batch_sizes.Training):
    """A network in float32, for a Trainer to choose the precision, with AdamW, on batches of other samples each."""

    def __init__(self, workload: networks.Workload, batch_size: int) -> None:
        super().__init__(workload, batch_size)
        self.net.float()
        self.rows = [one.float() if one.is_floating_point() else one for one in workload.batch]

    def training_step(self, batch: list[torch.Tensor], _batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(self.rows), self.batch_size)


@dataclasses.dataclass
class Fit:
    """How a training run went.

    Attributes:
        outcome: `TRAINED`, `OUT_OF_MEMORY` or `INFEASIBLE`; ``error``: in its own words.
        left: what it left; ``None`` unless it trained to its end.
        step_seconds: the median of the steps after the first few; ``first_step_seconds``: with planning.
        allocated_peak_bytes, reserved_peak_bytes: of the allocator during those steps, all of it counted; on CUDA only.
        reserved_most_bytes: in the whole run.
        batch_size: at its end.
        recoveries: steps that ran out of memory and were repeated (``strategy="remat"``).
    """

    outcome: str
    error: str = ""
    left: Left | None = None
    step_seconds: float | None = None
    first_step_seconds: float | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    reserved_most_bytes: int | None = None
    batch_size: int = 0
    recoveries: int = 0

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "left"}


class Watch(L.Callback):
    """Times the steps and reads the allocator."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.left: Left | None = None
        self.allocated = self.reserved = self.most = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        cuda = trainer.strategy.root_device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            if len(self.seconds) == STEADY:
                torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, _module: Any, outputs: Any, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            self.most = max(self.most, torch.cuda.max_memory_reserved())
            if len(self.seconds) >= STEADY:
                self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
                self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self.seconds.append(time.perf_counter() - self._started)
        self.losses.append(outputs["loss"].detach().clone())

    def on_train_end(self, _trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.left = left_by(pl_module, self.losses)


def fit(
    module: Training,
    settings: Settings,
    callbacks: Sequence[L.Callback] = (),
    *,
    precision: Any,
    strategy: str = "auto",
    nondeterministic: str = "",
    steps: int = STEPS,
) -> Fit:
    """Train a module from a fixed seed.

    Args:
        module: is trained.
        settings: its device.
        callbacks: of the Trainer, after the one that watches.
        precision, strategy: of the Trainer.
        nondeterministic: what `benchmarks.determinism.settle` found: the Trainer only warns where it is not "".
        steps: batches.
    """
    L.seed_everything(0, verbose=False)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu" if settings.dry else "cuda",
        devices=1,
        precision=precision,
        strategy=strategy,
        max_steps=steps,
        callbacks=[watch, *callbacks],
        deterministic="warn" if nondeterministic else True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    outcome, said = TRAINED, ""
    try:
        trainer.fit(module)
    except torch.OutOfMemoryError as error:
        outcome, said = OUT_OF_MEMORY, str(error).splitlines()[0][:400]
    except InfeasibleBudgetError as error:
        outcome, said = INFEASIBLE, str(error)[:400]
    gc.collect()  # what a traceback held
    if not settings.dry:
        torch.cuda.empty_cache()
    return Fit(
        outcome=outcome,
        error=said,
        left=watch.left,
        step_seconds=statistics.median(watch.seconds[STEADY:]) if len(watch.seconds) > STEADY else None,
        first_step_seconds=watch.seconds[0] if watch.seconds else None,
        allocated_peak_bytes=watch.allocated or None,
        reserved_peak_bytes=watch.reserved or None,
        reserved_most_bytes=watch.most or None,
        batch_size=module.batch_size,
        recoveries=getattr(trainer.strategy, "recoveries", 0),  # only the strategies that repeat steps count them
    )


def build(network: str, settings: Settings) -> networks.Workload:
    """A network on the CPU, of the size that people train; tiny in a dry run."""
    return networks.build(network, "tiny" if settings.dry else "gpu")


def settled(workload: networks.Workload, settings: Settings) -> str:
    """Make the process deterministic for a network; see `benchmarks.determinism.settle`."""
    module = copy.deepcopy(workload.module).to(settings.device)
    batch = [one[:2].to(settings.device) for one in workload.batch]
    return settle(lambda: module(*batch).backward())


def against_eager(found: Left, right: Fit, again: Callable[[], Fit]) -> tuple[list[str], str | None, dict[str, Any]]:
    """Hold what a run left against what eager's did.

    Args:
        found: of the run.
        right: eager's; where it did not train, nothing is compared.
        again: runs eager once more; called only where there is a difference, to see whether eager repeats itself.

    Returns:
        Faults; a status if there is one to tell; and fields of a result.
    """
    if right.left is None:
        return [], None, {"compared": False}
    differences = found.differences(right.left)
    fields = {
        "compared": True,
        "differing": {kind: [len(names), *names[:3]] for kind, names in differences.items()},
        "largest_difference": found.worst(right.left),
    }
    if not differences:
        return [], None, fields
    control = again().left
    if control is not None and not control.differences(right.left):
        return [MISMATCH], None, fields
    return [], UNREPEATABLE, fields


@contextmanager
def device_limit(share: float, settings: Settings) -> Iterator[int | None]:
    """Give this process a share of the device for a block; yields the bytes. In a dry run it does nothing."""
    if settings.dry:
        yield None
        return
    total = torch.cuda.get_device_properties(torch.device(settings.device)).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield int(share * total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
