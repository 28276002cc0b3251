"""Packing, recurrent layers over packed sequences, their backwards, and padding, as functions and as ops to be traced.

Shapes: T time steps, B sequences, N rows packed, D directions, H hidden features, F features of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_remat.capture.packed._tape import ALIGNMENT, gradients_of, record
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
ops = torch.ops.lightning_remat

KINDS: dict[Callable[..., Any], str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}
"""Torch's functions that run recurrent layers, with the names by which `packed_layer` knows them."""


def pack_rows(x: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    """Rows of ``x``, of shape (T, B, ...), packed: (N, ...), with N = ``rows``, the sum of ``batch_sizes``."""
    del rows
    lengths = (batch_sizes.unsqueeze(1) > torch.arange(x.shape[1], device="cpu")).sum(0)
    return pack_padded_sequence(x, lengths).data


def _pack_rows(x: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    del batch_sizes
    return x.new_empty(rows, *x.shape[2:])


def pack_rows_backward(gradient: Tensor, batch_sizes: Tensor, steps: int, sequences: int) -> Tensor:
    """The gradient of what `pack_rows` packs, (T, B, ...) with T = ``steps``, B = ``sequences``."""
    shape = (steps, sequences, *gradient.shape[1:])
    unpacked: Tensor = aten._pack_padded_sequence_backward.default(gradient, shape, batch_sizes, False)
    return unpacked


def _pack_rows_backward(gradient: Tensor, batch_sizes: Tensor, steps: int, sequences: int) -> Tensor:
    del batch_sizes
    return gradient.new_empty(steps, sequences, *gradient.shape[1:])


def _of_packing(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    x, batch_sizes, _ = inputs
    ctx.save_for_backward(batch_sizes)
    ctx.shape = x.shape[:2]


def _packing_backward(ctx: Any, gradient: Tensor) -> Any:
    (batch_sizes,) = ctx.saved_tensors
    return ops.pack_rows_backward.default(gradient, batch_sizes, *ctx.shape), None, None


def _pad(data: Tensor, batch_sizes: Tensor, padding: float, steps: int) -> tuple[Tensor, Tensor]:
    return pad_packed_sequence(PackedSequence(data, batch_sizes), padding_value=padding, total_length=steps)


def pad_rows(data: Tensor, batch_sizes: Tensor, sequences: int, padding: float, steps: int) -> tuple[Tensor, Tensor]:
    """Rows packed, (N, ...), as sequences of ``steps`` each, (T, B, ...), filled up with ``padding``; their lengths, (B,)."""
    del sequences
    return _pad(data, batch_sizes, padding, steps)


def _pad_rows(data: Tensor, batch_sizes: Tensor, sequences: int, padding: float, steps: int) -> tuple[Tensor, Tensor]:
    del padding
    return data.new_empty(steps, sequences, *data.shape[1:]), batch_sizes.new_empty(sequences)


def pad_rows_backward(gradient: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    """The gradient of what `pad_rows` pads, (N, ...) with N = ``rows``: as autograd adds up that of the loop's copies."""
    with torch.enable_grad():
        data = gradient.new_zeros(rows, *gradient.shape[2:]).requires_grad_()
        padded, _ = _pad(data, batch_sizes, 0.0, gradient.shape[0])
        return torch.autograd.grad(padded, data, gradient)[0].contiguous()


def _pad_rows_backward(gradient: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    del batch_sizes
    return gradient.new_empty(rows, *gradient.shape[2:])


def _of_padding(ctx: Any, inputs: Any, output: Any) -> None:
    data, batch_sizes, *_ = inputs
    ctx.save_for_backward(batch_sizes)
    ctx.mark_non_differentiable(output[1])
    ctx.rows = data.shape[0]


def _padding_backward(ctx: Any, gradient: Tensor, _lengths: Any) -> Any:
    (batch_sizes,) = ctx.saved_tensors
    return ops.pad_rows_backward.default(gradient, batch_sizes, ctx.rows), None, None, None, None


def packed_layer(
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """One recurrent layer over packed rows: its output, (N, D * H), and its last states, (D, B, H) each.

    Args:
        data: the rows, (N, F).
        batch_sizes: how many sequences go on at each time, (T,), on the CPU.
        states: the first states, (D, B, H) each: hidden and cell for an LSTM, else hidden.
        weights: those of the layer, one direction after the other.
        kind: see `KINDS`.
        biases: whether there are biases among the weights.
        bidirectional: whether there are two directions.
    """
    layer, given = getattr(torch, kind), states if kind == "lstm" else states[0]
    return list(layer(data, batch_sizes, given, weights, biases, 1, 0.0, False, bidirectional))


def _packed_layer(
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
) -> list[Tensor]:
    del batch_sizes, weights, kind, biases
    directions = 2 if bidirectional else 1
    output = data.new_empty(data.shape[0], directions * states[0].shape[2])
    return [output, *(state.new_empty(state.shape) for state in states)]


def recorded_layer(
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """`packed_layer`, and after its results the tape for its backward (see ``_tape``), of `_tape_elements`.

    ``needed`` says for the rows, each state and each weight whether it has a gradient.
    """
    first = 1 + len(states)

    def call(given: Sequence[Tensor]) -> list[Tensor]:
        return packed_layer(given[0], batch_sizes, given[1:first], given[first:], kind, biases, bidirectional)

    elements = _tape_elements(data, batch_sizes, states, kind, bidirectional)
    results, tape = record(call, [data, *states, *weights], needed, elements)
    return [*results, tape]


def _tape_elements(data: Tensor, batch_sizes: Tensor, states: Sequence[Tensor], kind: str, bidirectional: bool) -> int:
    """Elements for all that autograd keeps of a layer beside what it is given: so much per row, and gaps at each time."""
    out, hidden = states[0].shape[2], states[-1].shape[2]  # they differ in an LSTM with projections
    directions = 2 if bidirectional else 1
    if kind == "lstm":  # four gates, the cell's old state and the new one's tanh; the hidden state, projected and not
        row, tensors = directions * (6 * hidden + out + (hidden if out != hidden else 0)), 5
    elif (
        kind == "gru"
    ):  # three gates, new and old state, and two terms as they were before they were multiplied in place
        row, tensors = directions * 7 * hidden, 5
    else:  # the state; once more where sequences begin, as in the second direction
        row, tensors = (2 * directions - 1) * hidden, 2
    return data.shape[0] * row + batch_sizes.shape[0] * directions * tensors * (ALIGNMENT // data.itemsize)


def _recorded_layer(
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    del needed
    results = ops.packed_layer.default(data, batch_sizes, states, weights, kind, biases, bidirectional)
    elements = _tape_elements(data, batch_sizes, states, kind, bidirectional)
    return [*results, data.new_empty(elements)]


def recorded_layer_backward(
    gradients: Sequence[Tensor],
    of: Sequence[int],
    data: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    tape: Tensor,
    several: bool,
    needed: Sequence[bool],
    earlier: Sequence[Tensor],
    to: Sequence[int],
) -> list[Tensor]:
    """The gradients of what `recorded_layer` is given, of those that have one; it returned the ``tape``.

    There are ``gradients`` for some of its results, those at the positions ``of``. What is returned at the positions ``to``
    is added to ``earlier`` gradients. ``several`` says whether the gradient of the rows is a sum.
    """
    del several, needed
    found = gradients_of(tape, [data, *states, *weights], of, gradients, dict(zip(to, earlier, strict=True)))
    return [one.contiguous() for one in found]


def _recorded_layer_backward(
    gradients: Sequence[Tensor],
    of: Sequence[int],
    data: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    tape: Tensor,
    several: bool,
    needed: Sequence[bool],
    earlier: Sequence[Tensor],
    to: Sequence[int],
) -> list[Tensor]:
    del gradients, of, tape, several, earlier, to
    tensors = [data, *states, *weights]
    return [tensor.new_empty(tensor.shape) for tensor, want in zip(tensors, needed, strict=True) if want]


def _of_layer(ctx: Any, inputs: Any, output: Any) -> None:
    data, _, states, weights, *_, bidirectional, needed = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(data, *states, *weights, output[-1])
    ctx.states, ctx.bidirectional, ctx.needed = len(states), bidirectional, needed


def _layer_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    data, *others, tape = ctx.saved_tensors
    states, weights = others[: ctx.states], others[ctx.states :]
    of = [place for place, gradient in enumerate(gradients) if gradient is not None]
    given = [gradients[place] for place in of]
    found = iter(
        ops.recorded_layer_backward.default(
            given, of, data, states, weights, tape, ctx.bidirectional, ctx.needed, [], []
        )
    )
    of_data, *rest = [next(found) if want else None for want in ctx.needed]
    return of_data, None, rest[: ctx.states], rest[ctx.states :], None, None, None, None


def _not_again(ctx: Any, *gradients: Any) -> Any:
    """The backward of a backward."""
    del ctx, gradients
    raise CaptureError("gradients that come through a packed sequence are differentiated again")


def _registered() -> dict[Any, Callable[..., Any]]:
    """Make a custom op of each function, to be traced; returns the functions by these ops."""
    found: dict[Any, Callable[..., Any]] = {}
    for function, shapes, backward, begin in (
        (pack_rows, _pack_rows, _packing_backward, _of_packing),
        (pack_rows_backward, _pack_rows_backward, _not_again, None),
        (pad_rows, _pad_rows, _padding_backward, _of_padding),
        (pad_rows_backward, _pad_rows_backward, _not_again, None),
        (packed_layer, _packed_layer, _not_again, None),
        (recorded_layer, _recorded_layer, _layer_backward, _of_layer),
        (recorded_layer_backward, _recorded_layer_backward, _not_again, None),
    ):
        op: Any = torch.library.custom_op(f"lightning_remat::{function.__name__}", function, mutates_args=())
        op.register_fake(shapes)
        op.register_autograd(backward, setup_context=begin)
        found[getattr(ops, function.__name__).default] = function
    return found


FUNCTIONS = _registered()
"""By each custom op, the function that a graph calls in its place: inside of an op there is no autograd."""
