"""Lightning Fabric: `rematerialize` around the part of the loop that computes the loss.

python examples/fabric/train.py --budget 0.4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt.train import SMALL, ByteGPT, Size, StandardLibrary

from lightning_remat import rematerialize


def main() -> int:
    """Train, and say what was planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.4", help="a share, a size, auto or min")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan, at most")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=options.precision)
    fabric.seed_everything(0)
    model = ByteGPT(size)
    weights = sum(p.nbytes for p in model.parameters())
    model, optimizer = fabric.setup(model, model.configure_optimizers())
    loader = fabric.setup_dataloaders(DataLoader(StandardLibrary(size.length), size.batch))

    def loss_of(text: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    state = 2 * weights  # AdamW keeps two numbers a weight
    step = rematerialize(loss_of, budget=options.budget, time_limit=options.time_limit, resident_bytes=state)
    for _, text in zip(range(options.steps), loader, strict=False):
        loss = step(text)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    if step.plan is None or step.failures:
        print("not captured:", *step.failures)
        return 1
    print(f"last loss {loss.item():.3f}; {step.plan.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
