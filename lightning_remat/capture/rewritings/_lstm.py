"""Layers of LSTMs run the kernel that eager runs where gradients are enabled (`lstm_layer`).

A captured graph runs with gradients disabled: the op itself would choose the kernel for inference, which has other bits.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _ops

aten = torch.ops.aten


def keep_lstm_kernels(graph: torch.fx.Graph) -> None:
    """Layers of LSTMs run the kernel that eager runs (`_ops.lstm_layer`)."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = _ops.lstm_layer
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer_backward.default):
        if node.meta["val"][0].dtype is not torch.float32:  # as torch 2.11 traces them: the kernel's are float32
            node.target = _ops.lstm_layer_backward
