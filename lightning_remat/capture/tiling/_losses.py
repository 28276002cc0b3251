"""The loss of a classifier computed in slices of rows: what float32 logits, their log-softmax and its gradient take is gone.

Cross entropy over N rows of V classes runs as (a cast,) ``_log_softmax`` and ``nll_loss_forward``, and backward as
``nll_loss_backward``, ``_log_softmax_backward_data`` (and a cast): each makes a tensor as large as the logits. Rows know
nothing of one another. So `loss_of_rows` and `gradient_of_rows` take the logits as they come, whole, and run the same
kernels on slices of rows, with the same bits:

* forward, what each row's target is given is picked, and ``nll_loss_forward`` runs on those N numbers: it sums in the order of
  the rows, whatever the number of classes;
* backward, a slice is normalized again, and its gradient may be written over the logits themselves.

On CUDA the kernels of softmax read a row in vectors of 16 bytes, from the first aligned address on, and how a row is summed
depends on where it begins. So each slice lies as far from such an address as its rows do where they lie together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._torch import hint

aten = torch.ops.aten

Node = torch.fx.Node

Box = Sequence[tuple[int | None, int | None]] | None
"""Of each dimension of the logits but the last, the rows that the loss is of: (start, stop); ``None`` for all rows."""

SLICES = 64
"""How many slices the rows are cut into, unless they are then smaller than `LEAST_BYTES`."""

LEAST_BYTES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""A slice has as many rows as take so many bytes at least, by the device's type: smaller ones take longer, and save nothing."""

LOGITS = 1
"""Place of the logits among the arguments of `gradient_of_rows`."""

VECTOR_BYTES = 16
IGNORED = -100


def loss_of_rows(
    logits: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int, box: Box, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``nll_loss_forward`` returns for the log-softmax of all rows, cast to ``dtype``.

    Args:
        logits: of shape (..., V); with a box, the others are rows that the loss is not of.
        target: the class of each of the N rows.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: of rows that do not count.
        box: which rows.
        dtype: in which log-softmax is computed.

    Returns:
        The loss, and the total weight.
    """
    own = torch.empty(len(target), 1, dtype=dtype, device=logits.device)
    room = _room(logits, box, dtype)
    for begin, rows in _slices(logits, box, dtype):
        end = begin + len(rows)
        normalized = _log_softmax(rows, box, _as_it_would_lie(rows, begin, room))
        own[begin:end] = picked(normalized, target[begin:end], ignore_index)
    found: tuple[torch.Tensor, torch.Tensor] = aten.nll_loss_forward.default(
        own, counted(target, ignore_index), None, reduction, IGNORED
    )
    return found


def picked(normalized: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Of the classes' values (N, V, ...), those of the targets (N, ...): as values of one class, (N, 1, ...)."""
    return normalized.gather(1, torch.where(target != ignore_index, target, 0).unsqueeze(1))


def counted(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Targets for what is `picked`: its only class, or `IGNORED`."""
    return torch.where(target != ignore_index, 0, IGNORED)


def gradient_of_rows(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    box: Box,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits: of their shape and dtype, zero for the rows that the loss is not of.

    Args:
        gradient: that of the loss.
        logits: of shape (..., V).
        target: the class of each of the N rows.
        reduction: as in `loss_of_rows`.
        ignore_index: of rows that do not count.
        total_weight: what `loss_of_rows` returned.
        box: which rows.
        dtype: in which log-softmax is computed.
        out: where to write it; may be ``logits``.
    """
    result = torch.empty_like(logits) if out is None else out
    room, other = (_room(logits, box, dtype) for _ in range(2))
    for (begin, rows), (_, place) in zip(_slices(logits, box, dtype), _slices(result, box, dtype), strict=True):
        end = begin + len(rows)
        normalized = _log_softmax(rows, box, _as_it_would_lie(rows, begin, room))
        made = _as_it_would_lie(rows, begin, other)
        own = gradient if gradient.dim() == 0 else gradient[begin:end]
        aten.nll_loss_backward.grad_input(
            own, normalized, target[begin:end], None, reduction, ignore_index, total_weight, grad_input=made
        )
        aten._log_softmax_backward_data.out(made, normalized, 1, dtype, out=made)
        place.copy_(made)
    for outside in _outside(result, box):
        outside.zero_()
    return result


def _log_softmax(rows: torch.Tensor, box: Box, out: torch.Tensor) -> torch.Tensor:
    if box is not None or rows.dtype != out.dtype:  # what the kernel reads is a tensor of its own
        rows = out.copy_(rows)
    aten._log_softmax.out(rows, 1, False, out=out)
    return out


def _room(logits: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Memory for any slice, wherever it begins."""
    _, size = _shape_and_size(_inside(logits, box), dtype)
    return torch.empty(VECTOR_BYTES // dtype.itemsize + size * logits.shape[-1], dtype=dtype, device=logits.device)


def _as_it_would_lie(rows: torch.Tensor, begin: int, room: torch.Tensor) -> torch.Tensor:
    """Memory for rows, of which the first has this number, as far from an aligned address as in a tensor of all rows."""
    shift = begin * rows.shape[1] % (VECTOR_BYTES // room.itemsize)
    return room[shift : shift + rows.numel()].view(rows.shape)


def _shape_and_size(inside: torch.Tensor, dtype: torch.dtype) -> tuple[list[int], int]:
    """The shape in which rows are numbered, whose last dimension are rows that lie one after the other; a slice's most rows."""
    *shape, classes = inside.shape
    if inside.is_contiguous():
        shape = [math.prod(shape)]
    nbytes = LEAST_BYTES.get(inside.device.type, LEAST_BYTES["cuda"])
    least = -(-nbytes // max(1, classes * dtype.itemsize))
    return shape, max(1, min(shape[-1], max(least, -(-math.prod(shape) // SLICES))))


def _slices(logits: torch.Tensor, box: Box, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices of the rows that the loss is of, in order: the number of the first row, and the rows, of shape (n, V)."""
    inside = _inside(logits, box)
    (*outer, inner), size = _shape_and_size(inside, dtype)
    inside = inside.reshape(*outer, inner, inside.shape[-1])
    for number, place in enumerate(itertools.product(*map(range, outer))):
        for begin in range(0, inner, size):
            yield number * inner + begin, inside[place][begin : begin + size]


def _inside(logits: torch.Tensor, box: Box) -> torch.Tensor:
    return logits if box is None else logits[tuple(slice(start, stop) for start, stop in box)]


def _outside(logits: torch.Tensor, box: Box) -> Iterator[torch.Tensor]:
    """The rows that the loss is not of, in pieces."""
    for dim, (start, stop) in enumerate(box or ()):
        begin, end, _ = slice(start, stop).indices(logits.shape[dim])
        yield logits.narrow(dim, 0, begin)
        yield logits.narrow(dim, end, logits.shape[dim] - end)


# -- in a graph -------------------------------------------------------------------------------------------------------


def tile_losses(graph: torch.fx.Graph) -> list[Node]:
    """Have each loss of a joint graph that is one of rows computed in slices; returns what these are losses of."""
    found = [loss for node in graph.nodes if (loss := _Loss.around(node)) is not None]
    for loss in found:
        loss.tile(graph)
    return [loss.logits for loss in found]


def pick_targets(graph: torch.fx.Graph) -> None:
    """Have losses over classes computed from what the targets are given, which no op needs all classes for.

    The sum is over the same numbers in the same order. (With weights it is not: they are looked up by class.)
    """
    for target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        for node in graph.find_nodes(op="call_function", target=target):
            normalized, classes, weight, reduction, ignore_index = node.args
            if weight is not None:
                continue
            meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
            value = normalized.meta["val"]
            made = (
                (picked, (normalized, classes, ignore_index), value.new_empty((value.shape[0], 1, *value.shape[2:]))),
                (counted, (classes, ignore_index), torch.empty_like(classes.meta["val"])),
            )
            args = []
            for function, given, value in made:
                with graph.inserting_before(node):
                    args.append(graph.call_function(function, given))
                args[-1].meta = {**meta, "val": value}
            node.args = (*args, None, reduction, IGNORED)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The nodes of a cross entropy.

    Attributes:
        logits: what all of it is computed from.
        box: which of its rows.
        forward, backward: ``nll_loss_forward`` and its gradient.
        gradient: the gradient of ``logits``.
        dtype: in which log-softmax is computed.
    """

    logits: Node
    box: Box
    forward: Node
    backward: Node
    gradient: Node
    dtype: torch.dtype

    @classmethod
    def around(cls, softmax: Node) -> _Loss | None:
        """The loss whose log-softmax this is; ``None`` where it is none, or where something else reads what lies between."""
        if softmax.target is not aten._log_softmax.default or softmax.meta["val"].dim() != 2 or softmax.args[2]:
            return None
        by_target = {user.target: user for user in softmax.users}
        forward, backward, gradient = (by_target.get(target) for target in _READERS)
        if len(softmax.users) != len(_READERS) or forward is None or backward is None or gradient is None:
            return None
        whole = softmax.args[1] in (1, -1) and forward.args[0] is softmax and forward.args[2] is None
        if not whole or backward.args[1] is not softmax or gradient.args[:2] != (backward, softmax):
            return None
        way = _Way(softmax.args[0], gradient)
        while way.before_a_cast() or way.before_a_view() or way.before_slices():
            pass
        if not TensorSpec.of(way.logits.meta["val"], hint).contiguous:
            return None
        return cls(way.logits, way.box, forward, backward, way.gradient, softmax.meta["val"].dtype)

    def tile(self, graph: torch.fx.Graph) -> None:
        """Put `loss_of_rows` and `gradient_of_rows` in the place of the nodes."""
        _, target, _, reduction, ignore_index = self.forward.args
        common = (self.logits, target, reduction, ignore_index)
        softmax: Any = self.forward.args[0]
        self.forward.target, self.forward.args = loss_of_rows, (*common, self.box, self.dtype)
        loss_gradient, total_weight = self.backward.args[0], self.backward.args[-1]
        with graph.inserting_before(self.backward):
            made = graph.call_function(
                gradient_of_rows, (loss_gradient, *common, total_weight, self.box, self.dtype), name="gradient_of_rows"
            )
        made.meta = {**self.backward.meta, "val": self.gradient.meta["val"]}
        self.gradient.replace_all_uses_with(made)
        erase_unread(graph, [self.gradient, softmax])


def erase_unread(graph: torch.fx.Graph, nodes: Iterable[Node]) -> None:
    """Erase those of these nodes that nothing reads, and then what they alone have read."""
    waiting, erased = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in erased and not node.users and node.op == "call_function":
            waiting += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)


_READERS = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten._log_softmax_backward_data.default,
)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_LAST = 9223372036854775807


class _Way:
    """From log-softmax back to what its input is made of, and from the gradient of the one on to that of the other.

    Each step is taken only where nobody reads what lies between.
    """

    def __init__(self, made: Any, gradient: Node) -> None:
        self.logits, self.gradient = made, gradient
        self.box: Box = None

    def before_a_cast(self) -> bool:
        """Go on to what is cast, if a cast is next; returns whether."""
        cast, back = self.logits, only(self.gradient.users)
        if not casts(cast) or len(cast.users) > 1 or back is None or not casts(back):
            return False
        source = cast.args[0]
        if back.kwargs["dtype"] != source.meta["val"].dtype:
            return False
        self.logits, self.gradient = source, back
        return True

    def before_a_view(self) -> bool:
        """Go on to what is a view with the same rows, one after the other."""
        source, back = _source_of(self.logits, _VIEWS), only(self.gradient.users)
        if self.box is not None or source is None or back is None or back.target not in _VIEWS:
            return False
        shape, classes = source.meta["val"].shape, self.logits.meta["val"].shape[-1]
        if shape[-1] != classes or back.meta["val"].shape != shape:
            return False
        self.logits, self.gradient = source, back
        return True

    def before_slices(self) -> bool:
        """Go on to what slices of rows are copied from, which lie one after the other then."""
        sliced = _source_of(self.logits, (aten.clone.default,))
        if self.box is not None or sliced is None or sliced.target is not aten.slice.Tensor:
            return False
        box: list[tuple[Any, Any]] = [(None, None)] * (sliced.meta["val"].dim() - 1)
        gradient: Node | None = self.gradient
        while sliced.target is aten.slice.Tensor:
            whole, dim, start, stop, step = _slice(sliced.args)
            gradient = only(gradient.users) if gradient is not None else None
            if gradient is None or gradient.target is not aten.slice_backward.default or len(sliced.users) > 1:
                return False
            rows = 0 <= dim < len(box) and box[dim] == (None, None) and step == 1
            if not rows or tuple(gradient.args[2:]) != (dim, start, stop, step):
                return False
            box[dim] = (start, stop)
            sliced = whole
        assert gradient is not None
        self.logits, self.gradient, self.box = sliced, gradient, tuple(box)
        return True


def casts(node: Node) -> bool:
    """Whether a node is a copy in another dtype, and alike otherwise."""
    if node.target is not aten._to_copy.default or "dtype" not in node.kwargs:
        return False
    value = node.all_input_nodes[0].meta["val"]
    others = {"layout": value.layout, "device": value.device}
    return all(name == "dtype" or others.get(name) == given for name, given in node.kwargs.items())


def only(users: Iterable[Node]) -> Node | None:
    """The one node among ``users``; ``None`` where there are none or several."""
    found = list(users)
    return found[0] if len(found) == 1 else None


def _source_of(node: Any, targets: Sequence[Any]) -> Any:
    """What a node is made of by one of these ops, where it has one reader; else ``None``."""
    return node.args[0] if node.target in targets and len(node.users) == 1 else None


def _slice(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of a slice: those that are not given have their defaults."""
    source, dim, start, stop, step = args + (None, 0, 0, _LAST, 1)[len(args) :]
    return source, dim, 0 if start is None else start, _LAST if stop is None else stop, step
