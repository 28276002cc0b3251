"""Tensors that are not strided: sparse gradients, a sparse matrix, and nested sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.models.wild import ROWS, Wild, assert_in_parts, assert_not_captured, assert_only_a_rest, model_name


class SparseEmbedding(Wild):
    """Gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=True)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.embed((x.abs() * 10).long().clamp(max=49)).mean(1))

    def on_after_backward(self) -> None:
        self.seen.append(self.embed.weight.grad.to_dense().clone())

    def on_train_end(self) -> None:
        self.embed.weight.grad = None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class CheckpointedBesideSparse(SparseEmbedding):
    """What cannot be captured has a checkpoint with dropout in it, whose second evaluation draws the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Tanh())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.noisy, super().features(x), use_reentrant=False)


class SparseProduct(Wild):
    """A constant sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        index = torch.stack([torch.arange(ROWS), torch.arange(ROWS).flip(0)])
        adjacency = torch.sparse_coo_tensor(index, torch.ones(ROWS), (ROWS, ROWS), check_invariants=True)
        self.adjacency = [adjacency.coalesce()]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.sparse.mm(self.adjacency[0], x) + x)


class Nested(Wild):
    """Sequences of several lengths as one nested tensor."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x[:5], x[5:20], x[20:]], layout=torch.jagged)
        return torch.cat([one.tanh() for one in self.net(nested).unbind()])


IN_PARTS = [Nested]


@pytest.mark.parametrize("make", IN_PARTS, ids=model_name)
def test_in_parts(make: type[Wild]) -> None:
    assert_in_parts(make)


NOT_CAPTURED = [
    (SparseEmbedding, "only strided tensors can be scheduled"),
    (CheckpointedBesideSparse, "only strided tensors can be scheduled"),
]


@pytest.mark.parametrize(("make", "reason"), NOT_CAPTURED, ids=model_name)
def test_not_captured_and_the_reason_is_said(make: type[Wild], reason: str) -> None:
    assert_not_captured(make, reason)


A_REST = [SparseProduct]


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)
