"""Several networks, or one several times: Siamese ones, and teachers that follow their students, or do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.training import assert_same, fit
from tests.models.wild import (
    OLD,
    ROWS,
    Wild,
    assert_not_captured,
    assert_whole,
    assert_whole_in_several_ways,
    model_name,
    tight,
    vectors,
)


class Siamese(Wild):
    """Two and three calls before one backward."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        one, other = self.features(x), self.features(x.flip(0))
        same = (y == y.flip(0)).float()
        distance = functional.pairwise_distance(one, other)
        pairs = same * distance.square() + (1 - same) * (1 - distance).clamp(min=0).square()
        return pairs.mean() + functional.triplet_margin_loss(one, self.features(x + 0.01 * torch.randn_like(x)), other)


class Byol(Wild):
    """A student follows a teacher that follows the student; both see noise of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            targets = self.teacher(one), self.teacher(two)
        guesses = self.head(self.net(two)), self.head(self.net(one))
        return sum(2 - 2 * functional.cosine_similarity(g, t).mean() for g, t in zip(guesses, targets, strict=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


class ByolThatFollowsInTheStep(Byol):
    """The teacher is moved inside the step, through its data, before it is asked."""

    def loss(self, batch: Any) -> torch.Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class MovesItsData(Byol):
    """The teacher's data are exchanged for others inside the step."""

    def loss(self, batch: Any) -> torch.Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Dino(Byol):
    """Centred and sharpened targets; the centre is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 16))

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        views = [x + 0.1 * torch.randn_like(x) for _ in range(3)]
        with torch.no_grad():
            taught = torch.cat([self.teacher(view) for view in views[:2]])
            targets = ((taught - self.center) / 0.04).softmax(1).chunk(2)
            self.center = self.center * 0.9 + taught.mean(0, keepdim=True) * 0.1
        guesses = [(self.net(view) / 0.1).log_softmax(1) for view in views]
        return -sum((t * g).sum(1).mean() for i, t in enumerate(targets) for j, g in enumerate(guesses) if i != j)


class Moco(Byol):
    """A queue of keys; here it is rolled on, and the whole step is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(16, 2 * ROWS), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        self.queue.copy_(torch.cat([keys.t(), self.queue[:, : -len(keys)]], 1))

    def compared(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries = functional.normalize(self.net(x), dim=1)
        with torch.no_grad():
            shuffled = torch.randperm(len(x))
            keys = functional.normalize(self.teacher(x[shuffled]), dim=1)[shuffled.argsort()]
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone().detach()
        return torch.cat([positive, negative], 1) / 0.07, keys

    def loss(self, batch: Any) -> torch.Tensor:
        logits, keys = self.compared(batch[0])
        self.enqueue(keys)
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class MocoWithAPointer(Moco):
    """As it was published: the pointer is read as a number, and the queue written to there."""

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + len(keys)] = keys.t()
        self.pointer[0] = (pointer + len(keys)) % self.queue.shape[1]


class MocoThatEnqueuesLater(Moco):
    """The queue moves on between the step and its backward, past autograd, which cannot notice."""

    def loss(self, batch: Any) -> torch.Tensor:
        logits, self.keys = self.compared(batch[0])
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.queue.data[:, : len(self.keys)] = self.keys.t()


class Taught(Wild):
    """A teacher that is no part of the state, and labels that the network itself has made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.net).eval().requires_grad_(False)]

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        with torch.inference_mode():
            guess = self.head(self.features(x)).softmax(1)
        confidence, label = guess.clone().max(1)
        h = self.features(x + torch.randn_like(x))
        with torch.no_grad():
            taught = self.teachers[0](x)
        soft = functional.kl_div((h / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean")
        losses = functional.cross_entropy(self.head(h), label, reduction="none")
        return (losses * (confidence > 0.26)).mean() + soft


@torch.inference_mode()
def right(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the first rows and of all, by views of what was not made in inference mode."""
    return torch.stack([(scores[:2].argmax(1) == y[:2]).float().mean(), (scores.argmax(1) == y).float().mean()])


class Measured(Wild):
    """Metrics that a library computes in inference mode, with gradients enabled before and after, and not in between."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        scores = self.head(self.features(x))
        self.log("first", right(scores, y)[0])
        with torch.no_grad():
            self.log("all", right(scores.detach(), y)[1] + scores.detach()[0].mean())
        return functional.cross_entropy(scores, y) + scores[0].square().mean()


WHOLE = [Siamese, ByolThatFollowsInTheStep, MovesItsData, Dino, Moco, *([] if OLD else [Taught, Measured])]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)


IN_SEVERAL_WAYS = [(MocoThatEnqueuesLater, 1, {})]


@pytest.mark.parametrize(("make", "plans", "options"), IN_SEVERAL_WAYS, ids=model_name)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    assert_whole_in_several_ways(make, plans, options)


@pytest.mark.skipif(not OLD, reason="captured")
def test_not_captured_and_the_reason_is_said() -> None:
    assert_not_captured(Taught, "torch.inference_mode cannot be captured")


def test_a_buffer_that_moves_where_its_pointer_says() -> None:
    """What Python reads of it decides which graphs there are; the queue is written after it was read."""
    plain, remat = fit(MocoWithAPointer, train=vectors), tight()
    run = fit(MocoWithAPointer, remat, train=vectors)
    assert_same(plain.results, run.results)
    assert not remat.failures
    assert any(plan.rematerializes and runs for plan, runs in zip(remat.plans, remat.runs, strict=True))
