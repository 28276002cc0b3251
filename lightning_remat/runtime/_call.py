"""One call of a step: the tensors that it is given, and the graphs that it has run so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_remat.capture import _torch as internals
from lightning_remat.runtime._graph import Graph, Path

Shapes = tuple[tuple[tuple[int, ...], torch.dtype, torch.device, bool], ...]
"""Shape, dtype, device and ``requires_grad`` of every tensor that a call is given."""


class Call:
    """The present call of a step, or the last one as long as no other has begun.

    Attributes:
        shapes: the `Shapes` of the tensors that it is given.
        batch: ids of these tensors.
        number: how many calls of these shapes there have been, this one included.
        planned: how many calls have run by plans so far.
        began: when it began, in seconds since the epoch.
        ran: the captured graphs that it has run so far, each with the number of its plan.
        captured: numbers of the plans of the graphs that were captured in it; a plan may have been there before.
        nodes: nodes of autograd's graph that its graphs have made.
        runs: whether it has not returned yet.
        measures: whether ops were measured in it, for new sizes of a graph that is known.
        otherwise: says how later calls are to be captured (`NoSymbols`, `NoPacking`); ``None`` where that is as this one was.
    """

    def __init__(self) -> None:
        self.shapes: Shapes = ()
        self.batch: frozenset[int] = frozenset()
        self.number = 0
        self.planned = 0
        self.began = 0.0
        self.ran: list[tuple[Graph, int]] = []
        self.captured: list[int] = []
        self.nodes: set[Any] = set()
        self.runs = self.measures = False
        self.otherwise: BaseException | None = None

    def begin(self, leaves: Sequence[torch.Tensor]) -> None:
        """The next call begins, and is given these tensors."""
        self.shapes = shapes_of(leaves)
        self.batch = frozenset(map(id, leaves))
        self.began = time.time()
        self.ran.clear()
        self.captured.clear()
        self.nodes.clear()
        self.runs, self.measures, self.otherwise = True, False, None

    @property
    def path(self) -> Path:
        """The graphs that it has run so far."""
        return tuple(graph for graph, _ in self.ran)


def shapes_of(leaves: Sequence[torch.Tensor]) -> Shapes:
    """`Shapes` of a call that is given these tensors."""
    return tuple((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) for leaf in leaves)


def alike_but_for_sizes(one: Shapes, other: Shapes) -> bool:
    """Whether two calls differ in the sizes of dimensions at most."""
    return [(len(shape), *rest) for shape, *rest in one] == [(len(shape), *rest) for shape, *rest in other]


def growth(one: Shapes, other: Shapes) -> float | None:
    """By what factor a tensor of the first call is larger than that of the second; ``None`` where more differs than sizes.

    A dimension that is smaller makes up for none that is larger: at least 1.
    """
    if not alike_but_for_sizes(one, other):
        return None
    pairs = [(shape, before) for (shape, *_), (before, *_) in zip(one, other, strict=True)]
    return max((math.prod(max(1.0, a / max(1, b)) for a, b in zip(*pair, strict=True)) for pair in pairs), default=1.0)


def varying(shapes: Shapes, known: Sequence[Shapes]) -> list[tuple[int, ...]]:
    """For each tensor of a call, the dimensions whose sizes differ from those of any of the ``known`` calls."""
    found = []
    for i, (shape, *_) in enumerate(shapes):
        found.append(tuple(d for d in range(len(shape)) if any(other[i][0][d] != shape[d] for other in known)))
    return found


def leaves_a_loss_to_do(result: Any) -> bool:
    """Whether a call returns no loss yet, but tensors that a loss is computed from outside of it."""
    differentiable = [one for one in internals.tensor_leaves(result) if one.requires_grad]
    return bool(differentiable) and all(one.numel() > 1 for one in differentiable)
