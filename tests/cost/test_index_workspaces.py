"""What an op needs that goes by indices: on the CPU the same bytes wherever they point, so that any may stand for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_remat import rematerialize
from lightning_remat.measure import held_bytes, peak_memory

ROWS, MANY, WIDTH = 512, 4096, 8
aten = torch.ops.aten

INDICES: dict[str, Callable[[], torch.Tensor]] = {
    "one row": lambda: torch.zeros(MANY, dtype=torch.long),
    "spread": lambda: torch.randint(ROWS, (MANY,)),
    "sorted": lambda: torch.randint(ROWS, (MANY,)).sort().values,
    "skewed": lambda: (torch.rand(MANY).pow(8) * ROWS).long(),
    "in turns": lambda: torch.arange(MANY) % ROWS,
}

Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Given a table of (rows, width), values of (many, width) and indices into the table."""


def wide(index: torch.Tensor) -> torch.Tensor:
    return index[:, None].expand(-1, WIDTH)


OPS: dict[str, Op] = {
    "index_select": lambda table, values, index: aten.index_select(table, 0, index),
    "index": lambda table, values, index: aten.index(table, [index]),
    "gather": lambda table, values, index: aten.gather(table, 0, wide(index)),
    "embedding": lambda table, values, index: aten.embedding(table, index),
    "embedding_dense_backward": lambda table, values, index: aten.embedding_dense_backward(values, index, ROWS, -1, False),
    "index_add": lambda table, values, index: aten.index_add(table, 0, index, values),
    "index_copy": lambda table, values, index: aten.index_copy(table, 0, index, values),
    "index_put": lambda table, values, index: aten.index_put(table, [index], values, True),
    "index_put, the last stays": lambda table, values, index: aten.index_put(table, [index], values, False),
    "index_reduce": lambda table, values, index: aten.index_reduce(table, 0, index, values, "amax"),
    "scatter": lambda table, values, index: aten.scatter(table, 0, wide(index), values),
    "scatter_add": lambda table, values, index: aten.scatter_add(table, 0, wide(index), values),
    "scatter_reduce": lambda table, values, index: aten.scatter_reduce(table, 0, wide(index), values, "mean"),
    "scatter_reduce, the largest": lambda table, values, index: aten.scatter_reduce(table, 0, wide(index), values, "amax"),
    "index_select_backward": lambda table, values, index: aten.index_select_backward(values, table.shape, 0, index),
    "sort": lambda table, values, index: aten.sort(index),
    "a stable sort": lambda table, values, index: aten.sort(index, stable=True),
    "topk": lambda table, values, index: aten.topk(index, 100),
    "one_hot": lambda table, values, index: torch.nn.functional.one_hot(index, ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_the_same_bytes_wherever_they_point(name: str) -> None:
    table, values = torch.randn(ROWS, WIDTH), torch.randn(MANY, WIDTH)
    found = {}
    for kind, make in INDICES.items():
        index = make()
        found[kind] = peak_memory(lambda index=index: OPS[name](table, values, index))
    assert len(set(found.values())) == 1, found
    assert found["spread"] > 0


class MeanOfNeighbours(torch.nn.Module):
    """A layer of a graph network: messages along edges, their mean at each node, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(2)])

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            messages = torch.nn.functional.elu(layer(x[source]))
            x = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand_as(messages), messages, "mean")
        return x.square().mean()


@pytest.mark.parametrize("kind", ["spread", "skewed", "one row"])
def test_a_graph_network_is_predicted(kind: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, 32), INDICES["spread"](), INDICES[kind]()
    network = MeanOfNeighbours()
    step = rematerialize(network, budget=0.7, solver="greedy")

    def trained() -> None:
        loss = step(*batch)
        network.zero_grad()
        loss.backward()

    trained()
    trained()
    held = held_bytes(network, batch, gradients=True)
    measured = held + peak_memory(trained)
    assert step.plan is not None and step.plan.rematerializes and len(step.plans) == 1
    assert measured <= step.plan.budget_bytes
    assert abs(step.plan.predicted_peak_bytes / measured - 1) <= 0.02
