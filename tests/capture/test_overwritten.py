"""Inputs that a step overwrites: who reads a copy of the old value, and what tells tensors without gaps."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_remat.capture import TensorSpec
from lightning_remat.capture._sizes import unlike_any
from lightning_remat.capture.rewritings import _overwritten

aten = torch.ops.aten


def test_a_gradient_that_is_only_returned_reads_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new value is written over the old one when the forward ends, and the backward comes after that."""
    graph = torch.fx.Graph()
    x, buffer, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    new = graph.call_function(aten.add.Tensor, (buffer, 1))
    out = graph.call_function(aten.sin.default, (x,))
    gradient = graph.call_function(aten.mul.Tensor, (tangent, buffer))
    graph.output(((new, out, gradient),))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(3)
    graph.output_node().args = (tuple(graph.output_node().args[0][0]),)
    monkeypatch.setattr(_overwritten, "new_values", lambda *_: [(new, buffer)])
    _overwritten.clone_overwritten_inputs(graph, 2)
    read = gradient.args[1]
    assert read.target is aten.clone.default and read.args == (buffer,)
    assert new.args[0] is buffer and new.meta["remat_once"]


@pytest.mark.parametrize(
    ("shape", "stride", "whole"),
    [
        ((2, 2), (2, 1), True),
        ((2, 2), (1, 2), True),
        ((2, 2), (4, 1), False),
        ((2, 2), (0, 3), False),
        ((1, 4), (0, 1), True),
    ],
)
def test_whole(shape: tuple[int, ...], stride: tuple[int, ...], whole: bool) -> None:
    assert TensorSpec(shape, stride, torch.float32, torch.device("cpu")).whole is whole


def test_sizes_unlike_any_are_primes() -> None:
    found = list(unlike_any(dict.fromkeys(range(60))).values.values())
    assert len(set(found)) == 60
    assert all(n % divisor for n in found for divisor in range(2, math.isqrt(n) + 1))
