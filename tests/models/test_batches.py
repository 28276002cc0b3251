"""Batches of other kinds: dicts with all sorts of things in them, graphs, and batches that the step writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.training import assert_same, callback, fit
from tests.models.wild import (
    ROWS,
    STEPS,
    GraphTuple,
    Wild,
    assert_whole,
    assert_whole_in_several_ways,
    graphs,
    model_name,
    vectors,
)


def several_tasks() -> DataLoader[Any]:
    """Dicts with texts, numbers, nothing, and lists of tensors in them."""

    def collate(samples: list[Any]) -> dict[str, Any]:
        x = torch.stack([x for x, _ in samples])
        y = torch.stack([y for _, y in samples])
        task = "first" if float(x[0, 0]) > 0 else "second"
        return {"task": task, "views": [x, x.flip(1)], "y": y, "scale": 0.5, "mask": None, "ids": ["a"] * len(samples)}

    return DataLoader(list(vectors().dataset), ROWS, collate_fn=collate)


class SeveralTasks(Wild):
    """A head for each task, chosen by the text in the batch."""

    train_loader = staticmethod(several_tasks)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"first": nn.Linear(16, 4), "second": nn.Linear(16, 4)})

    def loss(self, batch: Any) -> torch.Tensor:
        head = self.heads[batch["task"]]
        losses = [functional.cross_entropy(head(self.features(x)), batch["y"]) for x in batch["views"]]
        return batch["scale"] * sum(losses)


class Graph:
    """What `GraphTuple` has, in a class of one's own, in the manner of graph libraries."""

    def __init__(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.edges, self.y = x, edges, y

    def to(self, device: torch.device, **options: Any) -> Graph:
        return Graph(self.x.to(device), self.edges.to(device), self.y.to(device))


class MessagePassing(Wild):
    train_loader = staticmethod(lambda: graphs(Graph, *[ROWS] * STEPS))

    def loss(self, batch: Any) -> torch.Tensor:
        source, target = batch.edges
        messages = self.features(batch.x[source])
        h = torch.zeros_like(batch.x).index_add(0, target, messages).tanh() + batch.x
        return functional.cross_entropy(self.head(h), batch.y)


class ModifiesTheBatch(Wild):
    """Masked modelling: labels and inputs are written over in place."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = torch.bernoulli(torch.full(y.shape, 0.3)).bool()
        y[~hidden] = -100
        x[hidden] = 0.0
        return functional.cross_entropy(self.head(self.features(x)), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [part.clone() for part in batch]


WHOLE = [MessagePassing, ModifiesTheBatch]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(SeveralTasks, 2, {})]  # one for each task


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)


@pytest.mark.parametrize("kind", [GraphTuple, Graph])
def test_a_small_batch_that_fits_says_nothing_of_a_large_one(kind: Any) -> None:
    sizes = {"train": lambda: graphs(kind, 32, 1024)}
    plain, remat = fit(MessagePassing, **sizes), callback(1_500_000, solver="greedy", time_limit=0.1)
    run = fit(MessagePassing, remat, **sizes)
    assert_same(plain.results, run.results)
    assert [plan.rematerializes for plan in remat.plans] == [False, True]
