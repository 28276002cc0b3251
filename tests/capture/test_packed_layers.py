"""Layers over packed sequences one by one: the tape that autograd's memory lies on, and the batch sizes they are timed with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_remat.capture.packed import _tape
from lightning_remat.capture.packed._made_up import made_up_batch_sizes
from lightning_remat.capture.packed._ops import KINDS, packed_layer, recorded_layer, recorded_layer_backward
from lightning_remat.cost import profile
from lightning_remat.measure import peak_memory
from tests.helpers.op_calls import call, spec

WIDE, HIDDEN = 8, 6


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Zeros of the same sign, too."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


# -- tapes ----------------------------------------------------------------------------------------------------------------


def layer_arguments(kind: str, both: bool, biases: bool, projected: int, sizes: torch.Tensor) -> tuple[Any, ...]:
    gates, directions = {"lstm": 4, "gru": 3}.get(kind, 1), 2 if both else 1
    out = projected or HIDDEN
    wide = [out, HIDDEN] if kind == "lstm" else [out]
    states = [torch.randn(directions, int(sizes[0]), one) for one in wide]
    weights = []
    for _ in range(directions):
        weights += [torch.randn(gates * HIDDEN, WIDE), torch.randn(gates * HIDDEN, out)]
        weights += [torch.randn(gates * HIDDEN) for _ in range(2 * biases)]
        weights += [torch.randn(out, HIDDEN)] * bool(projected)
    return torch.randn(int(sizes.sum()), WIDE), sizes, states, weights, kind, biases, both


KINDS_OF_LAYERS = [
    (kind, both, biases, projected)
    for kind, both, biases, projected in itertools.product(KINDS.values(), (False, True), (False, True), (0, 3))
    if kind == "lstm" or not projected
]


@pytest.mark.parametrize(("kind", "both", "biases", "projected"), KINDS_OF_LAYERS)
def test_a_tape_holds_what_autograd_keeps(
    monkeypatch: pytest.MonkeyPatch, kind: str, both: bool, biases: bool, projected: int
) -> None:
    """All of it, for any batch sizes; and its gradients are eager's."""
    kept: list[Any] = []
    keep = _tape._Writer.keep
    monkeypatch.setattr(_tape._Writer, "keep", lambda self, tensor: kept.append(keep(self, tensor)) or kept[-1])
    for seed in range(5):
        numbers = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (7,), generator=numbers)
        sizes = (lengths.unsqueeze(0) > torch.arange(int(lengths.max())).unsqueeze(1)).sum(1)
        arguments = layer_arguments(kind, both, biases, projected, sizes)
        data, _, states, weights, *_ = arguments
        tensors = [data, *states, *weights]
        needed = [True] * len(tensors)
        *results, tape = recorded_layer(*arguments, needed)
        gradients = [torch.randn(result.shape, generator=numbers) for result in results]
        of = list(range(len(results)))
        found = recorded_layer_backward(gradients, of, data, states, weights, tape, both, needed, [], [])
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        first = 1 + len(states)
        eager = packed_layer(leaves[0], sizes, leaves[1:first], leaves[first:], *arguments[4:])
        assert all(map(same_bits, eager, results))
        assert all(map(same_bits, torch.autograd.grad(eager, leaves, gradients), found))
    assert kept and not [one for one in kept if isinstance(one, torch.Tensor) and one.numel()]


def test_a_tape_that_is_too_short_is_right_still() -> None:
    """It is never made so; what does not fit is held beside it."""
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def call(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(given[0] @ given[1]).tanh().exp()]

    (result,), tape = _tape.record(call, [x, w], [True, True], 20)
    (gradient,) = [torch.ones(3, 4)]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    (eager,) = call(leaves)
    found = _tape.gradients_of(tape, [x, w], [0], [gradient], {})
    assert same_bits(eager, result) and all(map(same_bits, torch.autograd.grad(eager, leaves, [gradient]), found))


def test_a_tape_is_freed_with_its_tensor() -> None:
    """Autograd's graph refers to nothing that refers to it, and keeps no tensor."""
    arguments = layer_arguments("lstm", False, True, 0, torch.arange(64, 0, -1))
    needed = [True] * 7

    def once() -> None:
        recorded_layer(*arguments, needed)

    once()
    *_, tape = recorded_layer(*arguments, needed)
    alone = peak_memory(once, "cpu")
    assert alone < 2 * tape.nbytes
    assert peak_memory(lambda: [once() for _ in range(4)], "cpu") == alone


# -- timed ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "sequences", "steps"), [(20, 4, 6), (24, 4, 6), (6, 1, 6), (9, 4, 6), (30, 4, 6), (5, 4, 6)]
)
def test_made_up_batch_sizes(rows: int, sequences: int, steps: int) -> None:
    states = [spec(1, sequences, HIDDEN)]
    weights = [spec(HIDDEN, WIDE), spec(HIDDEN, HIDDEN)]
    sizes = spec(steps, dtype=torch.int64)
    arguments = (spec(rows, WIDE), sizes, states, weights, "rnn_tanh", False, False)
    made = call(packed_layer, *arguments, outputs=(spec(rows, HIDDEN), spec(1, sequences, HIDDEN)))
    ((place, found),) = made_up_batch_sizes(made).items()
    assert (
        place == 1
        and found[0] == sequences
        and found.min() >= 1
        and found.tolist() == sorted(found.tolist(), reverse=True)
    )
    assert found.sum() == min(rows, sequences * steps) and len(found) == min(steps, rows - sequences + 1)


def test_layers_are_timed() -> None:
    numbers = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 5, (6,), generator=numbers).sort(descending=True)[0]
    arguments = layer_arguments("gru", True, True, 0, sizes)
    rows, sequences = int(sizes.sum()), int(sizes[0])
    specs = [spec(*tensor.shape) for tensor in (arguments[0], *arguments[2], *arguments[3])]
    given = (specs[0], spec(len(sizes), dtype=torch.int64), specs[1:2], specs[2:], *arguments[4:])
    outputs = (spec(rows, 2 * HIDDEN), spec(2, sequences, HIDDEN))
    (cost,) = profile([call(packed_layer, *given, outputs=outputs)], torch.device("cpu"))
    assert cost.seconds > 0 and not cost.real_bytes
