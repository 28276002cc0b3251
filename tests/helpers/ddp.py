"""Runs of two processes or four, each with its part of the data: without the callback, and with it.

    python -m tests.helpers.ddp FOLDER CASE...

Every process compares its own two runs bit by bit, and writes what the callback did to ``FOLDER/CASE-RANK.json``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback, distributed
from lightning_remat.strategies import RematDDPStrategy
from tests.helpers.failing import failing
from tests.helpers.training import Classifier, Validated, assert_same, callback, fit, loader


class Unused(Classifier):
    """With a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Taught(Classifier):
    """With a teacher that each step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        return super().training_step(batch, batch_idx) + self.teacher(batch[0]).square().mean()


class OwnShapes(Classifier):
    """Every process has batches of its own size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        rows = len(x) - 2 * self.global_rank
        return super().training_step((x[:rows], y[:rows]), batch_idx)


class Wide(Classifier):
    """Large enough for its peak to be measured well."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))]
        self.net = nn.Sequential(nn.Linear(16, 256), *layers, nn.Linear(256, 4))


def halves() -> DataLoader[Any]:
    """Three batches of 8 in each of two processes."""
    return loader(48)


def large() -> DataLoader[Any]:
    """Four batches of 512 in each of two processes."""
    return loader(4096, 512)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"make": Validated, "val": True},
    "unused": {"make": Unused, "ddp": {"find_unused_parameters": True}},
    "static": {"ddp": {"static_graph": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 2},
    "accumulating": {"accumulate_grad_batches": 2},
    "shapes": {"make": OwnShapes},
    "auto": {"budget": "auto"},
    "artifacts": {"make": OwnShapes, "remat": {"artifacts": True}},
    "measured": {"make": Wide, "train": large, "remat": {"measure": True}},
    "measured-views": {
        "make": Wide,
        "train": large,
        "ddp": {"gradient_as_bucket_view": True},
        "remat": {"measure": True},
    },
    "offloaded": {"make": Wide, "train": large, "remat": {"measure": True, "offload": "host", "time_limit": 2.0}},
    "checked": {"make": Unused, "ddp": {"find_unused_parameters": True}, "remat": {"check": True}},
    "checked-static": {"ddp": {"static_graph": True}, "remat": {"check": True}},
    "four": {"make": Validated, "val": True, "devices": 4, "train": lambda: loader(96)},
    "infeasible": {"budget": 2000},
    "forward fails": {"make": Taught, "fails": "forward", "budget": 0.7},
    "backward fails": {"make": Taught, "fails": "backward", "budget": 0.7},
    "backward always fails": {"fails": "backward", "budget": 0.7, "times": 100},
}


def run(name: str, folder: Path) -> None:
    """One case in this process."""
    case = {"make": Classifier, "train": halves, "ddp": {}, "remat": {}, "budget": 0.4, **CASES[name]}
    make, ddp, budget, options = (case.pop(key) for key in ("make", "ddp", "budget", "remat"))
    fails, times = case.pop("fails", None), case.pop("times", 1)
    case = {"devices": 2, "use_distributed_sampler": True, "default_root_dir": folder, **case}
    plain = fit(make, strategy=DDPStrategy(**ddp), **case)
    rank = plain.trainer.global_rank
    if name == "auto":  # what the devices have differs; the smaller is that of the second process
        distributed.device_bytes = lambda *_args, **_kwargs: 17_000 - 1_000 * rank  # type: ignore[attr-defined]
    remat: RematCallback = callback(budget, **options)
    found: dict[str, Any] = {}
    strategy = RematDDPStrategy(retries=2, **ddp) if fails else DDPStrategy(**ddp)
    trouble = failing(fails, times) if fails and rank == 1 else contextlib.nullcontext()
    try:
        with trouble:
            scheduled = fit(make, remat, strategy=strategy, **case)
        assert_same(plain.results, scheduled.results)
    except Exception as error:  # noqa: BLE001 - told to the test
        found["error"] = f"{type(error).__name__}: {error}"
    found["recoveries"] = getattr(strategy, "recoveries", 0)
    found["failures"] = remat.failures
    found["runs"] = remat.runs
    found["check"] = remat.check_report.summary() if remat.check_report is not None else None
    found["measured"] = remat.measured_peak_bytes
    found["plans"] = [
        {
            "rematerializes": plan.rematerializes,
            "copies": plan.copies,
            "budget": plan.budget_bytes,
            "predicted": plan.predicted_peak_bytes,
            "resident": plan.graph.resident_bytes,
            "schedule": hashlib.sha256(json.dumps(plan.schedule.to_dict()).encode()).hexdigest(),
            "solve_seconds": plan.solve_seconds,
        }
        for plan in remat.plans
    ]
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Run the cases that are named."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        run(name, folder)


if __name__ == "__main__":
    main()
