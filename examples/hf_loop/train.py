"""A training loop as Hugging Face's `Trainer` has it, through Lightning Fabric, within a memory budget.

    python examples/hf_loop/train.py --budget 0.4

Gradients are accumulated over several batches and clipped, the learning rate warms up and falls, and the model is called with
a dictionary: all that is new is `rematerialize` around what computes the loss. Eager mode runs the same loop first, to compare.
The text is made here: sequences that count on from a random number.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Result, command_line, report

from lightning_remat import Plan, rematerialize
from lightning_remat.measure import held_bytes, track_peak
from lightning_remat.report import plan_figure

ACCUMULATED, WARM_UP = 2, 2


def counting(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count on from a random number, as a tokenizer and a collator hand them over."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(64, (count, 1), generator=generator)
    return [{"input_ids": tokens, "labels": tokens} for tokens in (first + torch.arange(length)) % 64]


def train(options: argparse.Namespace, planned: bool) -> tuple[Result, Plan | None]:
    """The loop. Both runs have the same seed, and all that differs is the line with ``rematerialize``."""
    length, batch, width, layers = (1024, 8, 768, 12) if options.large else (128, 4, 96, 4)
    fabric = L.Fabric(accelerator="gpu" if options.gpu else "cpu", devices=1)
    fabric.seed_everything(0, verbose=False)
    torch.use_deterministic_algorithms(options.gpu)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 32, "n_positions": length, "vocab_size": 512}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM")
    network = GPT2LMHeadModel(config)
    network.train()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=2e-3))
    schedule = get_linear_schedule_with_warmup(optimizer, options.steps // 4, options.steps)
    data = fabric.setup_dataloaders(DataLoader(counting(options.steps * ACCUMULATED * batch, length), batch))

    def loss_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**inputs).loss / ACCUMULATED

    step = loss_of
    if planned:
        state = 2 * sum(one.nbytes for one in network.parameters())  # AdamW's moments
        budget, limit = options.budget, options.time_limit
        step = rematerialize(loss_of, budget=budget, time_limit=limit, resident_bytes=state, accumulating=True)
    batches: Iterator[dict[str, torch.Tensor]] = iter(data)
    losses, seconds = [], []
    for number in range(options.steps):
        inputs = list(itertools.islice(batches, ACCUMULATED))
        measured = number == options.steps - 1
        held = held_bytes(network, optimizer, inputs[:1], gradients=True, device=fabric.device) if measured else 0
        started = time.perf_counter()
        with track_peak(fabric.device) if measured else contextlib.nullcontext() as peak:
            for one in inputs:
                loss = step(one)
                fabric.backward(loss)
        fabric.clip_gradients(network, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        seconds.append(time.perf_counter() - started)
    peak_bytes = held + (peak.peak_bytes or 0) if peak is not None else 0
    plan = step.plan if planned else None
    parameters = [one.detach().cpu() for one in network.parameters()]
    return Result(peak_bytes, statistics.median(seconds[WARM_UP:-1]), losses, parameters), plan


def main() -> int:
    """Train without and with a budget, and compare."""
    options = command_line(__doc__, "hf_loop", steps=10).parse_args()
    plain, _ = train(options, planned=False)
    planned, plan = train(options, planned=True)
    if plan is None:
        print("not planned: the step was not captured")
        return 1
    folder = options.folder / "remat"
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan-1.json")
    plan_figure(plan).savefig(folder / "plan-1.png")
    return report(plain, planned, plan, options.folder)


if __name__ == "__main__":
    sys.exit(main())
