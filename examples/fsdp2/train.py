"""Parameters sharded among processes (FSDP2), and one budget for all that each of them holds.

python examples/fsdp2/train.py --devices 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt.train import SMALL, ByteGPT, Size, StandardLibrary

from lightning_remat.callbacks import RematCallback


class ShardedGPT(ByteGPT):
    """Each block is a unit, whose parameters are whole only while it computes; the rest is one more."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def main() -> int:
    """Train in all processes; each says what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.5", help="a share, a size, auto or min: of each process")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan, at most")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    L.seed_everything(0)
    size = SMALL if options.small else Size()
    remat = RematCallback(budget=options.budget, time_limit=options.time_limit)
    trainer = L.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1),
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        callbacks=[remat],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ShardedGPT(size), DataLoader(StandardLibrary(size.length), size.batch))
    plan, measured = remat.plan, remat.measured_peak_bytes
    if plan is None or measured is None:
        return 1
    print(f"process {trainer.global_rank}: measured {measured:,} of {plan.budget_bytes:,} bytes")
    return 0 if measured <= plan.budget_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
