"""Models with checkpoints in them already, with dropout in what is evaluated twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.models.wild import OLD, Wild, assert_not_captured, assert_only_a_rest, assert_whole, model_name


class Checkpointed(Wild):
    """A checkpoint that is there already, with dropout in it."""

    reentrant, preserve, norm = False, True, False

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(32) if self.norm else nn.LayerNorm(32)
        self.net = nn.Sequential(
            nn.Linear(16, 32), norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 16), nn.Dropout(0.2)
        )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.head.weight.mean()).tanh()
        options = {"use_reentrant": self.reentrant, "preserve_rng_state": self.preserve}
        return self.net(torch.utils.checkpoint.checkpoint(self.net, x, **options).sin())


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedBatchNorm(Checkpointed):
    """Eager evaluates the block twice, and moves the running statistics twice."""

    norm = True


class CheckpointedOtherNoise(Checkpointed):
    """The second evaluation draws other numbers, and eager's gradients are made of those."""

    preserve = False


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.tanh()


class CheckpointedCounter(Checkpointed):
    """The second evaluation counts once more."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Counted())


class CheckpointedInSegments(Checkpointed):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint_sequential(self.net, 3, x, use_reentrant=False)


class CheckpointedSelectively(Checkpointed):
    """A policy says what to keep: all products of matrices."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        def contexts() -> Any:
            return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False, context_fn=contexts).sin()


WHOLE = [Checkpointed, CheckpointedReentrant]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


NOT_CAPTURED = [
    (CheckpointedSelectively, "TORCH_LOGS" if OLD else "context_fn"),
    (CheckpointedBatchNorm, "a batch norm inside of torch.utils.checkpoint"),
    (CheckpointedCounter, "is written to inside of torch.utils.checkpoint"),
    (CheckpointedOtherNoise, "draws random numbers inside of torch.utils.checkpoint"),
]


@pytest.mark.parametrize(("make", "reason"), NOT_CAPTURED, ids=model_name)
def test_not_captured_and_the_reason_is_said(make: type[Wild], reason: str) -> None:
    assert_not_captured(make, reason)


A_REST = [CheckpointedInSegments]


@pytest.mark.parametrize("make", A_REST, ids=model_name)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    assert_only_a_rest(make)
