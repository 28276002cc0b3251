"""Batch sizes that are made up, to time an op with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_remat.capture._call import OpCall
from lightning_remat.capture.packed._ops import (
    pack_rows,
    pack_rows_backward,
    packed_layer,
    pad_rows,
    pad_rows_backward,
    recorded_layer,
)


def made_up_batch_sizes(call: OpCall) -> Mapping[int, Tensor]:
    """For a call of one of the ops here: the position of ``batch_sizes`` among its inputs, and values that it accepts."""
    target, args = call.target, call.args
    if target in (pack_rows, pad_rows_backward):
        place, rows, sequences = 1, args[2], args[0].shape[1]
    elif target is pack_rows_backward:
        place, rows, sequences = 1, args[0].shape[0], args[3]
    elif target is pad_rows:
        place, rows, sequences = 1, args[0].shape[0], args[2]
    elif target in (packed_layer, recorded_layer):
        place, rows, sequences = 1, args[0].shape[0], args[2][0].shape[1]
    else:
        return {}
    steps = next(spec for i, spec in enumerate(call.inputs()) if i == place).shape[0]
    return {place: _spread(rows, sequences, steps)}


def _spread(rows: int, sequences: int, steps: int) -> Tensor:
    """Batch sizes for so many rows in all: of sequences from one that goes on for all steps down to short ones.

    Their lengths are as different as they can be: a layer holds the state in which each shorter one ended.
    """
    longest = max(1, min(steps, rows - sequences + 1))
    parts = [1 - i / sequences for i in range(1, sequences)]
    low, high = 0.0, 64.0
    for _ in range(64):  # the more they are bent, the fewer rows
        bend = (low + high) / 2
        lengths = [longest, *(1 + round((longest - 1) * part**bend) for part in parts)]
        low, high = (bend, high) if sum(lengths) > rows else (low, bend)
    change = 1 if sum(lengths) < rows else -1
    while sum(lengths) != rows and (free := [i for i in range(1, sequences) if 1 <= lengths[i] + change <= longest]):
        for i in free[: abs(rows - sum(lengths))]:
            lengths[i] += change
    times = torch.arange(longest, device="cpu").unsqueeze(1)
    return (torch.tensor(lengths, device="cpu") > times).sum(1)
