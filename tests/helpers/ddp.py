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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback, distributed, training_step
from lightning_remat.capture.gradients._stages import StagedBackward, Stages
from lightning_remat.planner import _make
from lightning_remat.runtime import _backend
from lightning_remat.solvers import solve
from lightning_remat.strategies import RematDDPStrategy
from tests.helpers.failing import failing
from tests.helpers.garbage import set_aside
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


class Asking(Classifier):
    """What each process asks of its batches has answers of its own: which layers run, how many rows, and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        own = y + (batch_idx % 3 - 1) * self.global_rank
        rows = 4 + (own.max() > 2).long() + self.global_rank * (batch_idx % 2)
        x, y = x[: int(rows)], y[: int(rows)]
        loss = super().training_step((x, y), batch_idx)
        if (own > 1).any():
            loss = loss + self.net(x.roll(1, 0)).square().mean()
        return loss * own.float().mean().item()


class Large(Classifier):
    """With gradients of 8 MiB: their reduction may begin before all of them are there."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.1))]
        self.net = nn.Sequential(nn.Linear(16, 512), *layers, nn.Linear(512, 4))


def clamp(weight: torch.Tensor) -> None:
    weight.grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]


class Tied(Large):
    """With a weight that is used twice, a layer that no step uses, and hooks that look at gradients on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight = self.net[10].weight
        self.unused = nn.Linear(3, 3)
        self.net[7].weight.register_hook(lambda gradient: gradient * 2)
        self.net[13].weight.register_post_accumulate_grad_hook(clamp)


class Added(Large):
    """Parameters that are added have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.ParameterList([nn.Parameter(torch.zeros(512, 512)) for _ in range(2)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = self.added[0] + self.added[1]
        return nn.functional.cross_entropy(self.net[1:](self.net[0](x) @ weight), y) + self.net(x).mean()


class Sometimes(Large):
    """Half of the layers have no part in every other loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 2:
            return nn.functional.cross_entropy(nn.Sequential(*self.net[:13], self.net[-1])(x), y)
        return super().training_step(batch, batch_idx)


class Wide(Classifier):
    """Large enough for its peak to be measured well."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))]
        self.net = nn.Sequential(nn.Linear(16, 256), *layers, nn.Linear(256, 4))


class ByHand(Wide):
    """Every other batch adds to gradients that are not reduced yet."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx) / 2
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss)
        return loss


def halves() -> DataLoader[Any]:
    """Three batches of 8 in each of two processes."""
    return loader(48)


def large() -> DataLoader[Any]:
    """Four batches of 512 in each of two processes."""
    return loader(4096, 512)


class Waiting(Callback):
    """The first plan is a dear one, and before the fourth batch training waits until a cheaper one was found."""

    def __init__(self) -> None:
        _make.solve = lambda graph, budget, *_, **__: solve(graph, budget, "chen_sqrt")  # type: ignore[attr-defined]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        (remat,) = (one for one in trainer.callbacks if isinstance(one, RematCallback))  # type: ignore[attr-defined]
        assert remat._step is not None
        improving, known = remat._step._improving, len(remat.plans)
        while batch_idx == 3 and improving.search is not None and len(remat.plans) == known:
            improving.take()
            time.sleep(0.1)


def rows() -> DataLoader[Any]:
    """Nine batches of 128 in each of two processes, the last of 64."""
    return loader(17 * 128, 128)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"make": Validated, "val": True},
    "unused": {"make": Unused, "ddp": {"find_unused_parameters": True}},
    "static": {"make": Wide, "train": large, "ddp": {"static_graph": True}, "remat": {"measure": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 2, "budget": 0.7},
    "accumulating": {"accumulate_grad_batches": 2, "budget": 0.7},
    "shapes": {"make": OwnShapes},
    "answers": {"make": Asking, "train": lambda: loader(192), "budget": 0.7},
    "auto": {"budget": "auto"},
    "artifacts": {"make": OwnShapes, "remat": {"artifacts": True}},
    "measured": {"make": Wide, "train": large, "remat": {"measure": True}},
    "measured-views": {
        "make": Wide,
        "train": large,
        "ddp": {"gradient_as_bucket_view": True},
        "remat": {"measure": True},
    },
    "measured-by-hand": {"make": ByHand, "train": large, "remat": {"measure": True}, "budget": 0.7, "max_epochs": 2},
    "offloaded": {"make": Wide, "train": large, "remat": {"measure": True, "offload": "host", "time_limit": 2.0}},
    "checked": {"make": Unused, "ddp": {"find_unused_parameters": True}, "remat": {"check": True}},
    "checked-static": {"ddp": {"static_graph": True}, "remat": {"check": True}},
    "four": {"make": Validated, "val": True, "devices": 4, "train": lambda: loader(96)},
    "infeasible": {"budget": 2000},
    "background": {"make": Large, "train": rows, "remat": {"background": True, "time_limit": 60.0}, "budget": 0.6},
    "overlapped": {"make": Large, "train": rows, "remat": {"measure": True}, "noted": True},
    "overlapped-narrow": {"make": Large, "train": lambda: loader(96, 8), "budget": 1.0},
    **{
        f"accumulated, {way}": {
            "make": Large,
            "train": lambda: loader(96, 8),
            "accumulate_grad_batches": 2,
            "remat": {"measure": True},
            "budget": 1.0,
        }
        for way in ("taken", "returned")
    },
    "overlapped-static": {"make": Large, "train": rows, "ddp": {"static_graph": True}},
    "overlapped-tied": {"make": Tied, "train": rows, "ddp": {"find_unused_parameters": True}},
    "overlapped-added": {"make": Added, "train": rows, "gradient_clip_val": 0.1, "budget": 0.7},
    "overlapped-sometimes": {"make": Sometimes, "train": rows, "ddp": {"find_unused_parameters": True}, "budget": 0.7},
    "overlapped-bf16": {"make": Large, "train": rows, "precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "overlapped-views": {
        "make": Large,
        "train": rows,
        "ddp": {"gradient_as_bucket_view": True},
        "remat": {"measure": True},
        "budget": 0.7,
    },
    "overlapped-accumulating": {
        "make": Large,
        "train": rows,
        "accumulate_grad_batches": 2,
        "remat": {"measure": True},
        "budget": 0.7,
    },
    "overlapped-views-accumulating": {
        "make": Large,
        "train": rows,
        "accumulate_grad_batches": 2,
        "ddp": {"gradient_as_bucket_view": True},
        "remat": {"measure": True},
        "budget": 0.7,
    },
    "overlapped-offloaded": {"make": Large, "train": rows, "remat": {"offload": "host", "solver": "auto"}},
    "overlapped-checked": {"make": Large, "train": rows, "remat": {"check": True}},
    "overlapped-four": {"make": Large, "train": rows, "devices": 4},
    "stage fails": {"make": Large, "train": rows, "fails": "stage", "times": 3, "budget": 0.9},
    "stage fails, accumulating": {
        "make": Large,
        "train": rows,
        "accumulate_grad_batches": 2,
        "fails": "stage",
        "times": 2,
        "budget": 0.9,
    },
    "first stages fail, static": {
        "make": Large,
        "train": rows,
        "ddp": {"static_graph": True},
        "fails": "stage",
        "after": 0,
        "times": 2,
        "budget": 0.9,
    },
    "stage always fails": {"make": Large, "train": rows, "fails": "stage", "budget": 0.9, "times": 100},
    "forward fails": {"make": Taught, "fails": "forward", "budget": 0.7},
    "backward fails": {"make": Taught, "fails": "backward", "budget": 0.7},
    "backward always fails": {"fails": "backward", "budget": 0.7, "times": 100},
}


class Noting(Callback):
    """It is noted when DDP begins to reduce a bucket."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        self.events = events

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = trainer.strategy.model
        model.register_comm_hook(None, lambda state, bucket: self.reduced(state, bucket))  # DDP reads no annotations

    def reduced(self, state: Any, bucket: GradBucket) -> Any:
        """Reduce it as DDP does."""
        self.events.append(("bucket", bucket.index()))
        return allreduce_hook(state, bucket)


@contextlib.contextmanager
def stages_noted(events: list[tuple[str, int]]) -> Iterator[None]:
    """While open, it is noted which stage of a backward begins, and at what percentage of its ops the first one ends."""
    run, cut = StagedBackward._next, _backend.in_stages

    def noted_cut(backward: torch.fx.GraphModule, stages: Stages) -> torch.fx.GraphModule:
        module = cut(backward, stages)
        ops = [node for node in module.graph.nodes if node.op == "call_function"]
        first = next(i for i, node in enumerate(ops) if node.name.startswith("hand_out"))
        events.append(("first stage ends", 100 * first // len(ops)))
        return module

    def noted(self: StagedBackward, number: int) -> Any:
        events.append((f"stage of {self.stages.last + 1}", number))
        return run(self, number)

    StagedBackward._next, _backend.in_stages = noted, noted_cut  # type: ignore[method-assign]
    try:
        yield
    finally:
        StagedBackward._next, _backend.in_stages = run, cut  # type: ignore[method-assign]


def run(name: str, folder: Path) -> None:
    """One case in this process."""
    case = {"make": Classifier, "train": halves, "ddp": {}, "remat": {}, "budget": 0.4, **CASES[name]}
    make, ddp, budget, options = (case.pop(key) for key in ("make", "ddp", "budget", "remat"))
    fails, times, after = case.pop("fails", None), case.pop("times", 1), case.pop("after", 1)
    case = {"devices": 2, "use_distributed_sampler": True, "default_root_dir": folder, **case}
    events: list[tuple[str, int]] = []
    noting: list[Callback] = [Noting(events)] if case.pop("noted", False) else []
    plain = fit(make, *noting, strategy=DDPStrategy(**ddp), **case)
    events.clear()
    rank = plain.trainer.global_rank
    if name == "background":
        noting = [Waiting()]
    if name == "auto":  # what the devices have differs; the smaller is that of the second process
        distributed.device_bytes = lambda *_args, **_kwargs: 17_000 - 1_000 * rank  # type: ignore[attr-defined]
    if name == "accumulated, returned":
        training_step.TrainingStep._takes_gradients = lambda _: False  # type: ignore[method-assign]
        training_step.reduces_gradients = lambda _: False  # type: ignore[attr-defined]
    remat: RematCallback = callback(budget, **options)
    found: dict[str, Any] = {}
    strategy = RematDDPStrategy(retries=3, **ddp) if fails else DDPStrategy(**ddp)
    trouble = failing(fails, times, after) if fails and rank == 1 else contextlib.nullcontext()
    try:
        with trouble, stages_noted(events):
            scheduled = fit(make, remat, *noting, strategy=strategy, **case)
        assert_same(plain.results, scheduled.results)
    except Exception as error:  # noqa: BLE001 - told to the test
        found["error"] = f"{type(error).__name__}: {error}"
    found["recoveries"] = getattr(strategy, "recoveries", 0)
    found["failures"] = remat.failures
    found["runs"] = remat.runs
    found["check"] = remat.check_report.summary() if remat.check_report is not None else None
    found["events"] = events
    found["measured"] = remat.measured_peak_bytes
    found["plans"] = [
        {
            "rematerializes": plan.rematerializes,
            "copies": plan.copies,
            "budget": plan.budget_bytes,
            "seconds": plan.predicted_seconds,
            "predicted": plan.predicted_peak_bytes,
            "resident": plan.graph.resident_bytes,
            "gradients": plan.graph.gradient_bytes,
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
        set_aside()
        run(name, folder)


if __name__ == "__main__":
    main()
