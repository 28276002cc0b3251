"""Networks of graphs, of PyTorch Geometric."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.architectures._architecture import Architecture, Training, WithLoss, cross_entropy
from benchmarks.architectures._inputs import LABELS

_NETWORKS: dict[str, Mapping[str, Any]] = {
    "GCN": {},
    "GAT": {"heads": 4},
    "GraphSAGE": {},
    "GIN": {},
    "PNA": {
        "aggregators": ["mean", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": torch.ones(20).long(),
    },
    "EdgeCNN": {},
}


def _graph(nodes: int = 400, edges: int = 1600) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(nodes, 16), "edge_index": torch.randint(0, nodes, (2, edges))}


def _geometric(name: str, options: Mapping[str, Any]) -> Training:
    """A network of nodes, each of one class."""
    from torch_geometric import nn as layers

    network = getattr(layers, name)(
        in_channels=16, hidden_channels=64, num_layers=3, out_channels=LABELS, dropout=0.1, **options
    )

    batch = _graph()
    return Training(
        WithLoss(network, cross_entropy),
        {**batch, "targets": {"classes": torch.randint(0, LABELS, (len(batch["x"]),))}},
    )


GEOMETRIC: tuple[Architecture, ...] = tuple(
    Architecture("torch_geometric", name, functools.partial(_geometric, name, options))
    for name, options in _NETWORKS.items()
)
