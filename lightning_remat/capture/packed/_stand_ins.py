"""What Dynamo traces in the place of torch's functions for packed sequences (see ``_tracing``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

ops = torch.ops.lightning_remat


def pack_padded(
    batch_sizes: Tensor,
    rows: Tensor,
    x: Tensor,
    lengths: Tensor,
    batch_first: bool = False,
    enforce_sorted: bool = True,
) -> PackedSequence:
    """``pack_padded_sequence``, of which ``batch_sizes`` and how many ``rows`` there are is known."""
    order = back = None
    if not enforce_sorted:
        order = torch.sort(lengths, descending=True)[1].to(x.device)
        x = x.index_select(0 if batch_first else 1, order)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    if batch_first:
        x = x.transpose(0, 1)
    return PackedSequence(ops.pack_rows.default(x, batch_sizes, rows.size(0)), batch_sizes, order, back)


def pad_packed(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``pad_packed_sequence``."""
    data, batch_sizes, _, back = sequence
    sequences = batch_sizes[0]  # a number: see ``_tracing``
    steps = batch_sizes.size(0) if total_length is None else total_length
    padded, lengths = ops.pad_rows.default(data, batch_sizes, sequences, padding_value, steps)
    if batch_first:
        padded = padded.transpose(0, 1)
    if back is None:
        return padded, lengths
    return padded.index_select(0 if batch_first else 1, back), lengths[back.cpu()]


def recurrent_layers(
    kind: str,
    fused: bool,
    data: Tensor,
    batch_sizes: Tensor,
    states: Any,
    weights: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu`` over packed rows, layer by layer.

    Where it is ``fused``, an LSTM over sequences that are all of one length is the one of padded sequences.
    """
    equal = data.size(0) == batch_sizes.size(0) * (states[0] if kind == "lstm" else states).size(1)
    if fused and equal and states[0].size(2) == states[1].size(2):  # without projections
        x = data.view(batch_sizes.size(0), -1, data.size(1))
        output, *last_states = torch.lstm(x, states, weights, biases, layers, dropout, train, bidirectional, False)
        return output.reshape(data.size(0), -1), *last_states
    directions = 2 if bidirectional else 1
    each = len(weights) // layers
    firsts = [state.split(directions) for state in (states if kind == "lstm" else [states])]
    lasts = []
    for i in range(layers):
        own, own_weights = [first[i] for first in firsts], weights[i * each : (i + 1) * each]
        given = (data, batch_sizes, own, own_weights, kind, biases, bidirectional)
        needed = [torch.is_grad_enabled() and one.requires_grad for one in [data, *own, *own_weights]]
        if any(needed):
            data, *last, _ = ops.recorded_layer.default(*given, needed)
        else:
            data, *last = ops.packed_layer.default(*given)
        lasts.append(last)
        if dropout and train and i < layers - 1:
            data = torch.dropout(data, dropout, True)
    return data, *(torch.cat(several) for several in zip(*lasts, strict=True))
