"""Train a graph network, which passes messages along edges, within a memory budget.

    python examples/gnn/train.py --budget 0.4

Graphs are made here: points in a square, joined to those near them. Of each point the network learns in which community it
lies, of its own and its neighbours' noisy marks. What edges carry is held for the backward, in each layer, and edges are many.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Made, command_line, compare

COMMUNITIES = 4
Graph = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """Each edge makes a message of both its ends, and each point adds up what arrives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.update = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        messages = self.message(torch.cat([x[source], x[target]], 1))
        arrived = torch.zeros_like(x).index_add(0, target, messages)
        out: torch.Tensor = x + self.update(torch.cat([x, arrived], 1))
        return out


class Network(L.LightningModule):
    """Some layers, and a community for each point."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(COMMUNITIES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last = nn.Linear(width, COMMUNITIES)

    def training_step(self, graph: Graph) -> torch.Tensor:
        marks, edges, community = graph
        x = self.first(marks)
        for layer in self.layers:
            x = layer(x, edges[0], edges[1])
        loss = functional.cross_entropy(self.last(x), community)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def neighbours(points: int, degree: int, seed: int) -> Graph:
    """Points' noisy marks, (points, communities); edges from the nearest of each, (2, edges); and each one's community."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(points, 2, generator=generator)
    community = 2 * (places[:, 0] > 0.5).long() + (places[:, 1] > 0.5).long()
    marks = functional.one_hot(community, COMMUNITIES) + 1.5 * torch.randn(points, COMMUNITIES, generator=generator)
    nearest = torch.cdist(places, places).topk(degree, largest=False).indices
    return marks, torch.stack([nearest.flatten(), torch.arange(points).repeat_interleave(degree)]), community


def main() -> int:
    """Train without and with the callback, and compare."""
    options = command_line(__doc__, "gnn", steps=16).parse_args()
    points, degree, width, layers = (20_000, 16, 256, 8) if options.large else (600, 8, 48, 5)

    def make() -> Made:
        graphs = [neighbours(points, degree, seed) for seed in range(options.steps)]
        return Network(width, layers), DataLoader(graphs, batch_size=None)

    return compare(make, options)


if __name__ == "__main__":
    sys.exit(main())
