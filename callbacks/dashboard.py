"""Plans and measurements in the user's loggers, and beside them in the log directory."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import Console

from lightning_remat.callbacks.lightning_internals import steps_logged
from lightning_remat.errors import RematError
from lightning_remat.measure import PeakMemory
from lightning_remat.planner import Plan, RematWarning
from lightning_remat.report import plan_figure, plan_table

GIB = 1024**3

TABLE_WIDTH = 130
"""Width of the printed table, in characters."""


def plan_metrics(plan: Plan) -> dict[str, float]:
    """Scalars of a plan for the loggers, units in their names."""
    plan = plan.of_whole()
    reserved = (
        {"remat/predicted_reserved_GiB": plan.predicted_reserved_bytes / GIB} if plan.footprint is not None else {}
    )
    waits = {"remat/on_the_host_GiB": plan.host_bytes / GIB} if plan.copies else {}
    return (
        reserved
        | waits
        | {
            "remat/baseline_peak_GiB": plan.baseline_peak_bytes / GIB,
            "remat/budget_GiB": plan.budget_bytes / GIB,
            "remat/predicted_peak_GiB": plan.predicted_allocated_bytes / GIB,
            "remat/predicted_saving_percent": 100 * plan.saving,
            "remat/predicted_overhead_percent": 100 * plan.overhead,
            "remat/planning_seconds": plan.cost_seconds + plan.solve_seconds,
        }
    )


def measured_metrics(plan: Plan, measured_bytes: int, reserved_bytes: int | None = None) -> dict[str, float]:
    """Scalars of a measured step for the loggers, units in their names; reserved memory on CUDA only."""
    saving = 1 - measured_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 0.0
    reserved = {"remat/measured_reserved_GiB": reserved_bytes / GIB} if reserved_bytes is not None else {}
    return reserved | {
        "remat/measured_peak_GiB": measured_bytes / GIB,
        "remat/measured_saving_percent": 100 * saving,
    }


OVER = 0.01
"""Share by which a measured step may exceed its prediction before there is a warning."""

NEAR = 0.9
"""Share of the budget from which on a measured step may be over it at another time."""


def over_prediction(plan: Plan, peak: PeakMemory, measured_bytes: int, recorded: bool = False) -> str:
    """The warning for a measured step that took more memory than its plan says; "" where it did not.

    Reserved memory counts only if the step itself reserved more: segments may be left from a validation, say. Of steps that are
    recorded (``cuda_graphs``) it does not count: they have segments of their own.
    """
    over = []
    if measured_bytes > (1 + OVER) * plan.predicted_allocated_bytes:
        over.append(f"{measured_bytes:,} bytes where {plan.predicted_allocated_bytes:,} were predicted")
    reserved = peak.reserved_bytes if peak.reserved_more and plan.footprint is not None and not recorded else None
    if reserved is not None and reserved > (1 + OVER) * plan.predicted_reserved_bytes:
        over.append(f"{reserved:,} bytes of reserved memory where {plan.predicted_reserved_bytes:,} were predicted")
    if not over:
        return ""
    near = max(measured_bytes, reserved or 0) > NEAR * plan.budget_bytes
    so = "so that it may be over its" if near else "which is well within its"
    larger = "" if near else ", but a larger step may take more than predicted too"
    return (
        f"a step of {plan.graph.name or 'the scheduled function'} took {' and '.join(over)}, {so} budget of "
        f"{plan.budget_bytes:,} bytes{larger}. If something of your own holds memory during the step, name its size as "
        "RematCallback(reserve=...). Cost models other than 'profile' know no workspaces. Otherwise please report this, with "
        f"the plan that is saved as remat/plan-*.json in the log directory, torch {torch.__version__}, and the device's name"
    )


MOST_SHOWN = 4
"""Plans of parts of a step that are shown each, where they were not made together; of more, the one with the largest peak."""


def worth_showing(plans: Sequence[Plan]) -> list[Plan]:
    """Of the plans that one step has brought, those to show and save.

    Of plans for the graphs of a whole step that is the one that sets the peak. What the graphs had before those were made does
    not run any more, and what is made for once is shown with the whole only.
    """
    together = [plan for plan in plans if plan.whole is not None]
    if together:
        whole = together[-1].whole
        # The last of those with the largest peak: what it holds, the earlier graphs count as needed after their forwards.
        return [max((p for p in reversed(together) if p.whole == whole), key=lambda plan: plan.predicted_peak_bytes)]
    found = [plan for plan in plans if not plan.for_once]
    return found if len(found) <= MOST_SHOWN else [max(found, key=lambda plan: plan.predicted_peak_bytes)]


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Send scalars to every logger, at the step that Lightning logs training metrics at."""
    step = steps_logged(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def show_plan(trainer: pl.Trainer, plan: Plan) -> None:
    """Print a table with the plan so that the progress bar is not disturbed; in the first of several processes only."""
    if not trainer.is_global_zero:
        return
    text = io.StringIO()
    Console(file=text, width=TABLE_WIDTH).print(
        plan_table({plan.graph.name: plan.of_whole()}, title="Rematerialization")
    )
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        bar.print(text.getvalue())
    else:
        rank_zero_info(text.getvalue())


def plan_folder(trainer: pl.Trainer) -> Path:
    """Where plans are written. All processes must call this together: the first one's log directory is broadcast."""
    return Path(trainer.log_dir or trainer.default_root_dir) / "remat"


def write_plan(trainer: pl.Trainer, plan: Plan, number: int, folder: Path) -> Path | None:
    """Save a plan as JSON, with a page about it where Bokeh is installed, and, where matplotlib is, its memory timeline as PNG;
    show the picture in the loggers.

    Returns:
        The folder, or ``None`` where nothing is to be written (``fast_dev_run``, other ranks than the first, or a folder
        that cannot be written to, which warns).
    """
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / f"plan-{number}.json")
    except OSError as error:
        warnings.warn(f"the plan was not saved in {folder}: {error}", RematWarning, stacklevel=2)
        return None
    if number <= PAGES:
        _write_page(plan, folder / f"plan-{number}.html")
    path = folder / f"plan-{number}.png"
    try:
        figure = plan_figure(plan)
        figure.savefig(path, dpi=120)
    except (RematError, OSError) as error:
        warnings.warn(f"no picture of the plan was made: {error}", RematWarning, stacklevel=2)
        return folder
    step = steps_logged(trainer)
    for logger in trainer.loggers:
        try:
            _show(logger, figure, path, path.with_suffix(".json"), step)
        except Exception as error:  # noqa: BLE001 - whatever a client raises: training goes on
            warnings.warn(f"{type(logger).__name__} did not take the plan: {error}", RematWarning, stacklevel=2)
    return folder


PAGES = 8
"""The plans that get a page, of nearly two megabytes: of others (sizes that vary) ``lightning-remat report`` makes one."""


def _write_page(plan: Plan, path: Path) -> None:
    """The page without other budgets, which would take seconds: ``lightning-remat report`` has them."""
    try:
        plan.report(path, curve_seconds=0)
    except Exception as error:  # noqa: BLE001 - whatever a drawing library raises: training goes on
        _tell_once(f"no page about the plan was made: {error}")


@functools.cache
def _tell_once(words: str) -> None:
    rank_zero_info(words)


def _show(logger: Logger, figure: Any, picture: Path, plan: Path, step: int) -> None:
    """Hand the picture, and the plan as an artifact, to a logger that takes them."""
    if isinstance(logger, WandbLogger):
        logger.log_image("remat/memory_timeline", [str(picture)], step=step)
        logger.experiment.log_artifact(str(plan), type="remat_plan")
    elif isinstance(logger, MLFlowLogger):
        for file in (picture, plan):
            logger.experiment.log_artifact(logger.run_id, str(file), "remat")
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_figure("remat/memory_timeline", figure, global_step=step, close=False)
    elif hasattr(logger, "log_image"):  # others that follow Lightning's signature
        logger.log_image("remat/memory_timeline", [str(picture)], step=step)
