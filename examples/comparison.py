"""What several examples do with their model and data: train twice from the same seed, without and with a budget, and compare.

All that differs between the two trainings is the callback. The exit code is 1 where a loss or a parameter has other bits, or
where a step holds more than its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch

sys.path.append(str(Path(__file__).parent))
from byte_gpt.train import WARM_UP, Observer

from lightning_remat import Plan
from lightning_remat.callbacks import RematCallback
from lightning_remat.report import format_bytes, format_seconds

Made = tuple[L.LightningModule, Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Result:
    """One training: what a step held at most and took, its losses, and the parameters at the end."""

    peak_bytes: int
    step_seconds: float
    losses: list[torch.Tensor]
    parameters: list[torch.Tensor]

    def equals(self, other: Result) -> bool:
        """Whether all losses and all parameters are the same, bit for bit."""
        mine, theirs = [*self.losses, *self.parameters], [*other.losses, *other.parameters]
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def to_dict(self) -> dict[str, float]:
        """What a table shows of it."""
        first, last = self.losses[0].item(), self.losses[-1].item()
        return {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "first_loss": first,
            "last_loss": last,
        }


def command_line(
    description: str | None, name: str, *, budget: str = "0.4", steps: int = 12
) -> argparse.ArgumentParser:
    """The options that these examples have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default=budget, help="a share, a size, auto or min")
    parser.add_argument("--steps", type=_steps, default=steps, help="training steps")
    parser.add_argument("--large", action="store_true", help="a size for a GPU")
    parser.add_argument("--gpu", action="store_true", help="train on the CUDA device")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each plan, at most")
    parser.add_argument(
        "--folder", type=Path, default=Path("lightning_logs") / name, help="for the plan and its picture"
    )
    return parser


def _steps(text: str) -> int:
    if int(text) < WARM_UP + 2:
        raise argparse.ArgumentTypeError(f"give {WARM_UP + 2} or more: the first are not timed, nor is the last")
    return int(text)


def compare(make: Callable[[], Made], options: argparse.Namespace, repeatable_on_cuda: bool = True) -> int:
    """Train what ``make`` makes, without and with the callback, and say what that changed.

    Args:
        make: a module and its batches, the same ones for the same seed.
        options: those of `command_line`.
        repeatable_on_cuda: whether torch has deterministic algorithms on CUDA for all ops; if not, bits do not count there.

    Returns:
        An exit code.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", message=".*(does not have many workers|smaller than the logging interval|LeafSpec).*"
    )
    remat = RematCallback(budget=options.budget, time_limit=options.time_limit)
    repeatable = repeatable_on_cuda or not options.gpu
    plain = _train(make, options, repeatable)
    planned = _train(make, options, repeatable, remat)
    plan = max(remat.plans, key=lambda one: one.predicted_peak_bytes, default=None)
    if plan is None:
        print("not planned: the step was not captured")
        return 1
    return report(plain, planned, plan, options.folder, repeatable)


def report(plain: Result, planned: Result, plan: Plan, folder: Path, repeatable: bool = True) -> int:
    """Say what the budget changed, and keep the numbers in ``folder``; returns the exit code."""
    equal, within = planned.equals(plain), planned.peak_bytes <= plan.budget_bytes
    results = {"without": plain.to_dict(), "with": planned.to_dict(), "budget_bytes": plan.budget_bytes, "equal": equal}
    (folder / "result.json").write_text(json.dumps(results, indent=1))
    print(
        f"peak: {format_bytes(plain.peak_bytes)} without, {format_bytes(planned.peak_bytes)} with, both measured; budget "
        f"{format_bytes(plan.budget_bytes)}{'' if within else ': OVER'}\n"
        f"a step: {format_seconds(plain.step_seconds)} without, {format_seconds(planned.step_seconds)} with\n"
        f"loss: {plain.losses[0].item():.3f} at first, {plain.losses[-1].item():.3f} at last; losses and parameters are "
        f"{'bitwise equal' if equal else 'DIFFERENT'}\n"
        f"plan and picture: {folder / 'remat'}"
    )
    return 0 if (equal or not repeatable) and within else 1


def _train(
    make: Callable[[], Made], options: argparse.Namespace, repeatable: bool, *callbacks: RematCallback
) -> Result:
    L.seed_everything(0, verbose=False)
    module, batches = make()
    observer = Observer(measured_step=options.steps - 1)  # when all has been planned
    trainer = L.Trainer(
        accelerator="gpu" if options.gpu else "cpu",
        devices=1,
        deterministic=options.gpu and repeatable,  # on CUDA, eager does not repeat its own bits without
        max_steps=options.steps,
        callbacks=[observer, *callbacks],
        default_root_dir=options.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    return Result(
        peak_bytes=observer.peak_bytes or 0,
        step_seconds=statistics.median(observer.seconds[WARM_UP:-1]),
        losses=[loss.cpu() for loss in observer.losses],
        parameters=[parameter.detach().cpu() for parameter in module.parameters()],
    )
