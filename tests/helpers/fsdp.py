"""Runs of several processes, each with a shard of the parameters (FSDP2): without the callback, and with it.

    python -m tests.helpers.fsdp FOLDER PROCESSES CASE...

Every process compares its own two runs bit by bit, and writes what the callback did to ``FOLDER/CASE-RANK.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import measure
from lightning_remat._collectives import COLLECTIVES
from lightning_remat.callbacks import RematCallback
from lightning_remat.strategies import RematFSDP2Strategy
from tests.helpers.failing import failing
from tests.helpers.garbage import set_aside
from tests.helpers.training import Run, assert_clean, assert_same, callback, fit

VOCABULARY, LENGTH, WIDTH = 500, 64, 64


class Block(nn.Module):
    """Of GPT-2: attention and two linear layers, each after a layer norm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.project(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.mix(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.last(x)))))


class GPT(nn.Module):
    """Embeddings, blocks in a loop, and a head."""

    def __init__(self, layers: int = 3, width: int = WIDTH, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sharded(pl.LightningModule):
    """A network whose blocks are units, and which is one itself."""

    options: ClassVar[dict[str, Any]] = {}
    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(tied=self.tied)
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        if isinstance(next(self.net.parameters()), torch.distributed.tensor.DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh, **self.options)
        fully_shard(self.net, mesh=mesh, **self.options)

    def loss(self, batch: Any) -> torch.Tensor:
        words, targets = batch
        return functional.cross_entropy(self.net(words).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


class Tied(Sharded):
    """As in Llama: embeddings and head are one."""

    tied = True


class Mixed(Sharded):
    """Computes in bfloat16, and reduces in float32."""

    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }


class Kept(Sharded):
    """Parameters stay whole between forward and backward."""

    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


def samples(number: int, batch_size: int = 4) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    words = torch.randint(VOCABULARY, (number, LENGTH + 1), generator=numbers)
    return DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), batch_size)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"val": lambda: samples(8)},
    "tied": {"make": Tied, "last_rows": 0},
    "mixed": {"make": Mixed, "gradient_clip_val": 0.1, "last_rows": 0},
    "kept": {"make": Kept},
    "accumulating": {"accumulate_grad_batches": 2, "last_rows": 0},
    "measured": {"remat": {"measure": True}, "rows": 16, "late": 0.01},
    "checked": {"remat": {"check": True}, "last_rows": 0},
    "auto": {"budget": "auto"},
    "resumed": {"resumed": True, "last_rows": 0},
    "named": {"strategy": "remat_fsdp2", "remat": {"artifacts": True}, "last_rows": 0},
    "forward fails": {"fails": "forward"},
    "backward fails": {"fails": "backward"},
}


@contextlib.contextmanager
def let_go_late(seconds: float) -> Iterator[None]:
    """Every third collective's tensors are held for a while after it has ended, as gloo's threads do now and then."""
    with contextlib.ExitStack() as replaced:
        for name in filter(partial(hasattr, distributed), COLLECTIVES):
            replaced.enter_context(mock.patch.object(distributed, name, late(getattr(distributed, name), seconds)))
        yield


def late(collective: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    calls = itertools.count()

    def called(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        if next(calls) % 3 == 0:
            threading.Thread(target=lambda *held: time.sleep(seconds), args=(*args, *kwargs.values())).start()
        return result

    return called


def run(name: str, folder: Path, processes: int) -> None:
    """One case in this process."""
    case = {"make": Sharded, "remat": {}, "budget": 0.3, "rows": 4, "batches": 6, **CASES[name]}
    make, budget, options, rows, batches = (case.pop(key) for key in ("make", "budget", "remat", "rows", "batches"))
    if "val" in case:
        case["val"] = case["val"]()
    case |= {"devices": processes, "default_root_dir": folder, "plugins": [LightningEnvironment()]}
    last = case.pop("last_rows", rows // 2)  # of each process; the others have ``rows``
    case["train"] = lambda: samples(processes * (batches * rows + last), rows)

    resumed, fails, seconds = case.pop("resumed", False), case.pop("fails", None), case.pop("late", None)
    kind = RematFSDP2Strategy if fails else ModelParallelStrategy

    named = case.pop("strategy", None)

    def trained(*callbacks: RematCallback, **others: Any) -> Run:
        strategy: Any = named if callbacks else None
        strategy = strategy or kind(data_parallel_size=processes, tensor_parallel_size=1)
        return fit(make, *callbacks, strategy=strategy, **case, **others)

    def from_its_checkpoint(ended: Run, *callbacks: RematCallback) -> Run:
        path = folder / f"{name}-{len(callbacks)}.ckpt"
        ended.trainer.save_checkpoint(path)
        return trained(*callbacks, max_epochs=2, ckpt_path=path)

    if fails:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        with failing(fails, times=1000, after=8) if rank == 1 else contextlib.nullcontext():
            trained(callback(budget, **options))
        return
    plain = trained()
    rank = plain.trainer.global_rank
    remat = callback(budget, **options)
    found: dict[str, Any] = {}
    try:
        held = let_go_late(seconds) if seconds else contextlib.nullcontext()
        with held, mock.patch.object(measure, "_note_release", wraps=measure._note_release) as noted:
            scheduled = trained(remat)
        found["sent"] = noted.call_count
        assert_same(whole(plain.results), whole(scheduled.results))
        assert_clean(scheduled.trainer, scheduled.module)
        if resumed:
            ended = scheduled
            plain = from_its_checkpoint(plain)
            scheduled = from_its_checkpoint(ended, remat)
            assert_same(whole(plain.results), whole(scheduled.results))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        found["failures"], found["runs"] = remat.failures, remat.runs
        found["check"] = remat.check_report.summary() if remat.check_report is not None else None
        found["measured"] = remat.measured_peak_bytes
        found["plans"] = [
            {
                "rematerializes": plan.rematerializes,
                "ops": len(plan.graph.ops),
                "modules": sorted({op.module for op in plan.graph.ops}),
                "budget": plan.budget_bytes,
                "predicted": plan.predicted_peak_bytes,
                "baseline": plan.baseline_peak_bytes,
                "schedule": hashlib.sha256(json.dumps(plan.schedule.to_dict()).encode()).hexdigest(),
            }
            for plan in remat.plans
        ]
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def whole(thing: Any) -> Any:
    """The same with this process's shards in the place of tensors that are distributed."""
    if isinstance(thing, torch.distributed.tensor.DTensor):
        return thing.to_local()
    if isinstance(thing, dict):
        return {key: whole(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [whole(value) for value in thing]
    return thing


def main() -> None:
    """Run the cases that are named."""
    torch.set_num_threads(1)
    folder, processes = Path(sys.argv[1]), int(sys.argv[2])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name in sys.argv[3:]:
        set_aside()
        run(name, folder, processes)


if __name__ == "__main__":
    main()
