"""The largest batch that trains within a memory limit: eager's, measured, and the one that `RematBatchSizeFinder` finds.

    python benchmarks/batch_sizes.py --network mobilenet --limit 1GiB

Each network trains in a Lightning Trainer with Adam. Eager's largest batch is looked for by running its step: its measured
peak is within the limit, and one sample more is over it. The finder predicts, at most at one extra forward (Jain et al. 2020,
eq. 10), and confirms with one step, whose peak is measured. The training that follows ends after three batches, and the
seconds of three steps, forward and backward, are compared in turns on the same weights: eager's at its own largest batch,
eager's at the batch that was found (which fits this machine, if not the limit), and the scheduled one.

    python benchmarks/batch_sizes.py --search --network gpt2-124m --limit 2.5GiB

The seconds of the search alone, beside those of one plan (capture, measuring and solving) at the batch size that was found.
Each has a process and a cache of its own, so that nothing is known before.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import statistics
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.processes import add_worker, died, found_by
from benchmarks.common.results import RESULTS, stamp, write
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.report import format_bytes

NETWORKS = {"gpt2": 3.0, "unet": 3.0, "mobilenet-v1": 5.0, "mobilenet": 5.0, "gpt2-vocabulary": 3.0}
"""Networks, and how many times eager's batch is aimed at. The second MobileNet has its ReLUs in place: eager keeps less."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {"gpt2-vocabulary": ("gpt2", {"layers": 4, "vocabulary": 50257})}
"""Those that are another one's with other sizes: GPT-2 with its own vocabulary, whose logits are most of what it holds."""

WARM_UP = 3
"""Batches that are trained on before steps are timed."""

SEARCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 64}),
    **{name: OTHERS.get(name, (name, {})) for name in NETWORKS},
}
"""Networks that may be searched alone; the first is GPT-2 as published, with short sequences."""

PACKAGES = ("lightning_remat", "torch", "lightning", "transformers", "pytorchcv", "mip")


@dataclasses.dataclass
class Found:
    """What was found for one network.

    Attributes:
        name, description: of the network.
        limit_bytes: parameters, buffers, gradients, optimizer state, batch, activations and workspaces.
        eager: the largest batch whose measured peak is within the limit; ``eager_peak_bytes``: that peak, and
            ``eager_next_peak_bytes`` with one sample more.
        predicted_without: the finder's word for eager's.
        batch_size: the finder's; its peak as ``predicted_bytes`` and ``measured_bytes``, of the confirming step.
        overhead: predicted extra time, as a share of the step.
        finding_seconds: the whole search.
        eager_seconds: of a step of eager at its largest batch, a median, and ``eager_there_seconds`` at the batch that was
            found; ``seconds``: of the scheduled step there.
        measured_overhead: of the scheduled step over eager's at the same batch, the median over the turns.
        aim: times eager's that is aimed at.
    """

    name: str
    description: str
    limit_bytes: int
    eager: int
    eager_peak_bytes: int
    eager_next_peak_bytes: int
    predicted_without: int
    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    overhead: float
    finding_seconds: float
    eager_seconds: float
    eager_there_seconds: float
    seconds: float
    measured_overhead: float
    aim: float

    @property
    def times(self) -> float:
        """The finder's batch over eager's."""
        return self.batch_size / self.eager

    @property
    def holds(self) -> bool:
        """Whether what is aimed at is reached, within the limit."""
        return self.times >= self.aim and self.measured_bytes <= self.limit_bytes


@dataclasses.dataclass
class Searched:
    """How long the search takes for one network.

    Attributes:
        name, description: of the network.
        limit_bytes: everything counted.
        before, without, batch_size: that the search began with, that fits as it is, and that was found.
        overhead: predicted extra time of the confirming step.
        search_seconds: of the whole search, real steps included.
        plan_seconds: of one plan at ``batch_size``: capture with the first forward, measuring and solving.
        search_cpu_seconds, plan_cpu_seconds: the same in processor time, which other work on the machine changes less.
    """

    name: str
    description: str
    limit_bytes: int
    before: int
    without: int
    batch_size: int
    overhead: float
    search_seconds: float
    search_cpu_seconds: float
    plan_seconds: float = 0.0
    plan_cpu_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Plans that could be made in the time of the search."""
        return self.search_seconds / self.plan_seconds

    @property
    def cpu_ratio(self) -> float:
        """The same in processor time."""
        return self.search_cpu_seconds / self.plan_cpu_seconds


class Training(L.LightningModule):
    """A network with its loss inside, and samples that are repeated as often as needed."""

    def __init__(self, workload: networks.Workload, batch_size: int) -> None:
        super().__init__()
        self.net = copy.deepcopy(workload.module)
        self.samples = [one[:1] for one in workload.batch]
        self.batch_size = batch_size

    def training_step(self, batch: list[torch.Tensor], _batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        repeated = [one.expand(4096, *one.shape[1:]) for one in self.samples]
        return DataLoader(TensorDataset(*repeated), self.batch_size)


class TimedFinder(RematBatchSizeFinder):
    """Keeps the seconds that it took."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        started, worked = time.perf_counter(), time.process_time()
        super().on_fit_start(trainer, pl_module)
        self.seconds, self.cpu_seconds = time.perf_counter() - started, time.process_time() - worked


class TimedPlan(RematCallback):
    """Makes one plan, and keeps the seconds that it took."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        started, worked = time.perf_counter(), time.process_time()
        super().on_fit_start(trainer, pl_module)
        self.seconds, self.cpu_seconds = time.perf_counter() - started, time.process_time() - worked


class Turns(L.Callback):
    """Times eager steps and the scheduled one in turns, on the batch after the warm-up.

    Args:
        eager: samples in eager's smaller batch.
        turns: of all three.
    """

    def __init__(self, eager: int, turns: int) -> None:
        self.eager, self.turns = eager, turns
        self.seconds: dict[str, list[float]] = {"eager": [], "eager there": [], "scheduled": []}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < WARM_UP:
            return
        steps: dict[str, Callable[[], Any]] = {
            "eager": lambda: pl_module.training_step([one[: self.eager] for one in batch], batch_idx),
            "eager there": lambda: pl_module.training_step(batch, batch_idx),
            "scheduled": lambda: trainer.strategy.training_step(batch, batch_idx),
        }
        for turn in range(1 + self.turns):
            for name, step in steps.items():
                pl_module.zero_grad()
                started = time.perf_counter()
                step().backward()
                if turn:  # the first warms up what has not run yet
                    self.seconds[name].append(time.perf_counter() - started)
        pl_module.zero_grad()


def train(module: Training, callbacks: list[L.Callback], steps: int = WARM_UP + 1) -> None:
    """Train, by default until after the batch that `Turns` takes."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)


def eager_peak(module: Training, batch_size: int) -> int:
    """Bytes that a training step holds at most, with the gradients of the step before and Adam's state."""
    batch = [one.expand(batch_size, *one.shape[1:]).contiguous() for one in module.samples]
    net = module.net
    parameters = [p for p in net.parameters() if p.requires_grad]

    def step() -> None:
        loss = net(*batch)
        net.zero_grad()
        loss.backward()

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    held = held_bytes(net, batch, gradients=True)
    return held + 2 * held_bytes(parameters) + peak_memory(step, torch.device("cpu"))


def largest_eager(module: Training, limit: int) -> tuple[int, int, int]:
    """The largest batch of eager within the limit, its peak, and that of one sample more."""
    low, high = 0, 1
    peaks: dict[int, int] = {0: 0}
    while peaks.setdefault(high, eager_peak(module, high)) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        peaks[middle] = eager_peak(module, middle)
        low, high = (middle, high) if peaks[middle] <= limit else (low, middle)
    return low, peaks[low], peaks[high]


def measure(name: str, limit: int, steps: int) -> Found:
    """Find both batch sizes of one network."""
    network, changes = SEARCHED[name]
    workload = networks.build(network, **changes)
    eager, peak, next_peak = largest_eager(Training(workload, 1), limit)
    if eager < 1:
        raise SystemExit(
            f"{name}: a batch of one takes {format_bytes(next_peak)}, over the limit of {format_bytes(limit)}"
        )
    finder = TimedFinder()
    module = Training(workload, 4)
    remat = RematCallback(budget=limit, artifacts=False, measure=False)
    turns = Turns(eager, steps)
    train(module, [remat, finder, turns])
    assert turns.seconds["scheduled"], "no step was timed"
    found = finder.found
    assert found is not None and remat.plan is not None and remat.runs, "nothing was planned"
    assert found.batch_size == module.batch_size
    return Found(
        name=name,
        description=workload.description,
        limit_bytes=limit,
        eager=eager,
        eager_peak_bytes=peak,
        eager_next_peak_bytes=next_peak,
        predicted_without=found.without,
        batch_size=found.batch_size,
        predicted_bytes=found.plan.predicted_peak_bytes,
        measured_bytes=found.measured_peak_bytes,
        overhead=found.plan.overhead,
        finding_seconds=finder.seconds,
        eager_seconds=statistics.median(turns.seconds["eager"]),
        eager_there_seconds=statistics.median(turns.seconds["eager there"]),
        seconds=statistics.median(turns.seconds["scheduled"]),
        measured_overhead=statistics.median(
            ours / there - 1
            for there, ours in zip(turns.seconds["eager there"], turns.seconds["scheduled"], strict=True)
        ),
        aim=NETWORKS[name],
    )


def search(name: str, limit: int) -> Searched:
    """Find the batch size of one network, and train nothing."""
    network, changes = SEARCHED[name]
    workload = networks.build(network, **changes)
    finder = TimedFinder()
    train(Training(workload, 4), [RematCallback(budget=limit, artifacts=False), finder], steps=0)
    found = finder.found
    assert found is not None, "nothing was found"
    return Searched(
        name,
        workload.description,
        limit,
        found.before,
        found.without,
        found.batch_size,
        found.plan.overhead,
        finder.seconds,
        finder.cpu_seconds,
    )


def plan_seconds(name: str, limit: int, batch_size: int) -> tuple[float, float]:
    """One plan, and nothing else: its seconds, and those of the processor."""
    network, changes = SEARCHED[name]
    callback = TimedPlan(budget=limit, artifacts=False, plan_only=True)
    train(Training(networks.build(network, **changes), batch_size), [callback])
    assert callback.plan is not None and callback.plan.rematerializes, "nothing was planned"
    return callback.seconds, callback.cpu_seconds


def in_a_process(*arguments: str) -> Any:
    """What a process of this script finds that knows nothing of earlier ones."""
    found, exit_code = found_by([__file__, *arguments])
    if exit_code:
        raise SystemExit(f"{' '.join(arguments)}: {died(exit_code)}")
    return found


def search_table(rows: Sequence[Searched]) -> Table:
    """For people."""
    shown = Table(title="The search for the largest batch beside one plan, from empty caches")
    for title in ("network", "limit", "without", "found", "search", "one plan", "ratio", "of processor time"):
        shown.add_column(title, justify="left" if title == "network" else "right")
    for row in rows:
        shown.add_row(
            row.name,
            format_bytes(row.limit_bytes),
            str(row.without),
            f"{row.batch_size} ({row.overhead:+.1%})",
            f"{row.search_seconds:.0f} s",
            f"{row.plan_seconds:.0f} s",
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
        )
    return shown


def table(rows: Sequence[Found]) -> Table:
    """For people."""
    shown = Table(title="The largest batch within a limit, at most at one extra forward")
    for title in (
        "network",
        "limit",
        "eager",
        "found",
        "times",
        "aim",
        "peak",
        "overhead (predicted)",
        "samples a second",
        "search",
    ):
        shown.add_column(title, justify="left" if title == "network" else "right")
    for row in rows:
        shown.add_row(
            row.name,
            format_bytes(row.limit_bytes),
            f"{row.eager} ({format_bytes(row.eager_peak_bytes)})",
            str(row.batch_size),
            f"{row.times:.2f}" + ("" if row.holds else " NO"),
            f"{row.aim:g}",
            f"{format_bytes(row.measured_bytes)} ({row.predicted_bytes / row.measured_bytes - 1:+.2%})",
            f"{row.measured_overhead:+.1%} ({row.overhead:+.1%})",
            f"{row.batch_size / row.seconds:.1f} (eager {row.batch_size / row.eager_there_seconds:.1f},"
            f" at {row.eager} {row.eager / row.eager_seconds:.1f})",
            f"{row.finding_seconds:.0f} s",
        )
    return shown


def main() -> int:
    """Measure, print, and write JSON; returns 1 where something that is aimed at is not reached."""
    parser = command_line(__doc__)
    add_networks(parser, list(SEARCHED), f"all but {next(iter(SEARCHED))}, or with --search that")
    parser.add_argument("--limit", default="1GiB", help="of memory, everything counted")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--search", action="store_true", help="time the search, beside one plan")
    parser.add_argument("--out", type=Path)
    add_worker(parser)
    parser.add_argument("--plan-at", type=int, help=SUPPRESS)
    options = parser.parse_args()
    budget = parse_budget(options.limit)
    if budget.kind is not BudgetKind.SIZE:
        parser.error("--limit: give a size, such as 1GiB")
    if not options.search and set(options.networks or ()) - set(NETWORKS):
        parser.error(f"--network: without --search one of {', '.join(NETWORKS)}")
    limit = int(budget.value or 0)
    if options.worker:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        found: Any
        if options.plan_at:
            found = plan_seconds(options.networks[0], limit, options.plan_at)
        elif options.search:
            found = dataclasses.asdict(search(options.networks[0], limit))
        else:
            found = dataclasses.asdict(measure(options.networks[0], limit, options.steps))
        write(options.worker, found)
        return 0
    rows: list[Any] = []
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in options.networks or (["gpt2-124m"] if options.search else NETWORKS):
        asked = ["--network", name, "--limit", options.limit]
        if options.search:
            row = Searched(**in_a_process(*asked, "--search"))
            row.plan_seconds, row.plan_cpu_seconds = in_a_process(*asked, "--search", "--plan-at", str(row.batch_size))
            rows.append(row)
            console.print(search_table(rows))
        else:
            rows.append(Found(**in_a_process(*asked, "--steps", str(options.steps))))
            console.print(table(rows))
    data = {
        "format": "lightning_remat.batch_size_search" if options.search else "lightning_remat.batch_sizes",
        "version": 1,
        **stamp(PACKAGES, "cpu"),
        "torch": torch.__version__,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rows": [
            {**dataclasses.asdict(row), "ratio": row.ratio, "cpu_ratio": row.cpu_ratio}
            if options.search
            else {**dataclasses.asdict(row), "times": row.times, "holds": row.holds}
            for row in rows
        ],
    }
    write(options.out or RESULTS / ("batch-size-search-cpu.json" if options.search else "batch-sizes-cpu.json"), data)
    return 0 if options.search or all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
