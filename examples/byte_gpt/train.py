"""Train a small GPT on the source code of Python's own standard library, without and with a memory budget.

    python examples/byte_gpt/train.py

The same training runs three times from the same seed: as it is, with half of the memory that its activations take, and with
three tenths. One table says what that saved, what it cost, and whether anything else changed. It must not: the exit code is 1
where a loss or a parameter differs in one bit, or where a step took more memory than its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_remat import Plan
from lightning_remat.callbacks import RematCallback
from lightning_remat.measure import PeakMemory, held_bytes, track_peak
from lightning_remat.report import format_bytes, format_seconds

VOCABULARY = 256  # the values of a byte
BUDGETS = (None, 0.5, 0.3)
WARM_UP, MEASURED_STEP = 4, 3  # steps that are not timed; the one whose memory is measured

# -- the model --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the model and its batches are."""

    layers: int = 6
    width: int = 192
    heads: int = 6
    length: int = 256
    batch: int = 4


SMALL = Size(layers=4, width=64, heads=2, length=64, batch=4)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to what came in; (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.queries_keys_values(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        attended = self.attended(attended.transpose(1, 2).reshape(batch, time, width))
        x = x + functional.dropout(attended, self.dropout, self.training)
        out: torch.Tensor = x + self.feed_forward(x)
        return out


class ByteGPT(L.LightningModule):
    """A GPT over bytes, whose output layer shares its weight with the embedding."""

    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, VOCABULARY, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.output.weight = self.bytes.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.bytes(text) + self.positions.weight[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


# -- the text ---------------------------------------------------------------------------------------------------------


class StandardLibrary(Dataset[torch.Tensor]):
    """Pieces of Python's standard library: source code, as bytes.

    Args:
        length: bytes that the model sees at a time; an item has one more, the last to be predicted.
        files: how many files to read.
    """

    def __init__(self, length: int, files: int = 60) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        chosen = random.Random(0).sample(paths, min(files, len(paths)))
        text = bytearray(b"\n".join(path.read_bytes() for path in chosen))
        pieces = len(text) // (length + 1)
        if not pieces:
            raise RuntimeError("this Python comes without the source code of its standard library: nothing to train on")
        self.pieces = torch.frombuffer(text, dtype=torch.uint8)[: pieces * (length + 1)].view(pieces, length + 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pieces[index].long()


# -- the runs ---------------------------------------------------------------------------------------------------------


class Observer(Callback):
    """Notes the loss and the time of every step, and the peak memory of one."""

    def __init__(self, measured_step: int = MEASURED_STEP) -> None:
        self.measured_step = measured_step
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self._started = 0.0
        self._tracking: Any = None
        self._peak: PeakMemory | None = None
        self._held = 0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if len(self.losses) == self.measured_step:
            device = pl_module.device
            self._held = held_bytes(pl_module, trainer.optimizers, batch, gradients=True, device=device)
            self._tracking = track_peak(device)
            self._peak = self._tracking.__enter__()
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.seconds.append(time.perf_counter() - self._started)
        if self._tracking is not None and self._peak is not None:
            self._tracking.__exit__(None, None, None)
            self._tracking = None
            self.peak_bytes = None if self._peak.peak_bytes is None else self._held + self._peak.peak_bytes
        self.losses.append(outputs["loss"].detach().clone())


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run left, and what its plan had said (``None`` without the callback) and draws."""

    name: str
    losses: list[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    step_seconds: float
    peak_bytes: int | None
    budget_bytes: int | None
    predicted_bytes: int | None
    pictures: tuple[Path, ...] = ()

    @property
    def over_budget(self) -> bool:
        """Whether the measured peak is over the budget, or was not measured."""
        return self.budget_bytes is not None and (self.peak_bytes is None or self.peak_bytes > self.budget_bytes)

    def equals(self, other: Result) -> bool:
        """Whether all losses and all parameters are the same, bit for bit."""
        return (
            len(self.losses) == len(other.losses)
            and all(map(torch.equal, self.losses, other.losses))
            and self.parameters.keys() == other.parameters.keys()
            and all(torch.equal(one, other.parameters[name]) for name, one in self.parameters.items())
        )


def train(budget: float | None, size: Size, steps: int, time_limit: float, folder: Path, gpu: bool) -> Result:
    """One training run. All that differs between runs is the callback."""
    L.seed_everything(0, verbose=False)
    model = ByteGPT(size)
    data = DataLoader(StandardLibrary(size.length), batch_size=size.batch, shuffle=True, drop_last=True)
    observer = Observer()
    remat = RematCallback(budget=budget, time_limit=time_limit) if budget is not None else None
    trainer = L.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        deterministic=gpu,  # on CUDA, eager does not repeat its own bits without
        max_steps=steps,
        callbacks=[observer, *([remat] if remat is not None else [])],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    plan = remat.plan if remat is not None else None
    if remat is not None and plan is None:
        raise RuntimeError("the training step was not captured, and ran as before")
    return Result(
        name="without the callback" if budget is None else f"RematCallback(budget={budget:g})",
        losses=observer.losses,
        parameters={name: one.detach().cpu() for name, one in model.named_parameters()},
        step_seconds=statistics.median(observer.seconds[WARM_UP:]),
        peak_bytes=observer.peak_bytes,
        budget_bytes=plan.budget_bytes if plan is not None else None,
        predicted_bytes=plan.predicted_peak_bytes if plan is not None else None,
        pictures=pictures(plan, folder) if plan is not None else (),
    )


def pictures(plan: Plan, folder: Path) -> tuple[Path, ...]:
    """The picture that the callback has drawn of a plan, and the page that a browser shows."""
    page = folder / "remat" / "plan-1.html"
    plan.report(page)  # in the place of the callback's own, which leaves out the other budgets
    return folder / "remat" / "plan-1.png", page


def comparison(results: list[Result], title: str) -> Table:
    """One row a run; the first is what the others are compared with."""
    plain = results[0]
    table = Table(title=title, title_justify="left")
    table.add_column("run")
    for name in ("budget", "predicted peak", "measured peak", "step", "last loss"):
        table.add_column(name, justify="right")
    table.add_column("losses and parameters")
    for result in results:
        table.add_row(
            result.name,
            _size(result.budget_bytes),
            _size(result.predicted_bytes),
            _size(result.peak_bytes) + (" OVER" if result.over_budget else ""),
            format_seconds(result.step_seconds),
            f"{result.losses[-1].item():.4f}",
            "" if result is plain else "bitwise equal" if result.equals(plain) else "DIFFERENT",
        )
    return table


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan, at most")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a quick look")
    parser.add_argument("--gpu", action="store_true", help="train on the CUDA device")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("lightning_logs/byte_gpt"),
        help="where plans and their pictures are written",
    )
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP:
        parser.error(f"--steps: give more than {WARM_UP}, the first are not timed")
    # Lightning's advice on hardware and data loading is not what this is about.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

    console = Console(width=None if sys.stdout.isatty() else 140)
    size = SMALL if options.small else Size()
    results = []
    for budget in BUDGETS:
        name = "without the callback" if budget is None else f"with a budget of {budget:g}"
        console.print(f"training {options.steps} steps {name} ...")
        folder = options.folder / ("plain" if budget is None else f"budget-{budget:g}")
        results.append(train(budget, size, options.steps, options.time_limit, folder, options.gpu))
    parameters = sum(one.numel() for one in results[0].parameters.values())
    title = f"A GPT of {size.layers} layers, width {size.width}, on {size.batch} x {size.length} bytes of Python source code"
    console.print(comparison(results, f"{title} ({parameters:,} parameters)"))
    for path in (path for result in results for path in result.pictures):
        console.print(f"{'picture' if path.suffix == '.png' else 'report'}: {path}", markup=False, soft_wrap=True)
    right = all(result.equals(results[0]) and not result.over_budget for result in results[1:])
    if not right:
        console.print("Something differs, or is over its budget: see the table.", style="red")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
