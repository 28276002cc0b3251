"""A call that autograd differentiates as in eager mode, with all that it keeps for that on one tensor, its tape.

A kernel that is a loop in C++ makes as many tensors as it has turns, and autograd keeps some of each. In a captured graph
the call is one op, so what is kept has to be one tensor of a known size: one that a schedule keeps, or drops and makes
again. While the call runs, each tensor that autograd would keep is written to the tape (those that the call was given are
not: they are given again). Autograd's graph of the call holds no tensor then, and hangs on the tape. Each tensor begins
at a multiple of 64 bytes, as torch allocates on the CPU: a kernel may round otherwise where its memory begins elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

ALIGNMENT = 64
"""Bytes; each storage on a tape begins at a multiple of it."""


_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies that autograd keeps: the position of one of `_Given.tensors` (the last is the tape), the offset in it
in elements, and the tensor's shape and strides."""


class _Given:
    """What a call's backward reads: the tensors that the call was given, and the tape. Empty but while it runs."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, int]] = []
        """Each with its offset in its storage."""

    def find(self, place: _Place | Tensor) -> Tensor:
        """What autograd has kept."""
        if isinstance(place, Tensor):
            return place
        base, begin = self.tensors[place[0]]
        return base.as_strided(place[2], place[3], begin + place[1])


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """Autograd's graph of a call: where gradients come in and go out."""

    results: list[GradientEdge]
    tensors: list[GradientEdge]
    given: _Given


class _Writer:
    """Writes what autograd keeps to a tape. (Autograd's graph holds on to it, so it holds nothing at the end.)

    What lies on a new storage may still be written to in the same turn of the loop. Another turn has begun when a tensor
    that the call was given is kept for the second time: then all is written that is new, as soon as there is more of it.

    Attributes:
        written: elements of the tape that are taken.
    """

    def __init__(self, tensors: Sequence[Tensor], tape: Tensor) -> None:
        self._tape: Tensor | None = tape
        self._given: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
        for i, tensor in enumerate(tensors):
            first = int(tensor.storage_offset())
            self._given[tensor.untyped_storage().data_ptr()].append((i, first, first + _span(tensor)))
        self._count, self._size, self._dtype = len(tensors), tape.numel(), tape.dtype
        self._aligned = ALIGNMENT // tape.itemsize
        self._new: dict[int, tuple[Tensor, int, int]] = {}
        self._read: set[int] = set()
        self._ended = False
        self.written = 0

    def keep(self, tensor: Tensor) -> _Place | Tensor:
        """Where a tensor will be found; the tensor itself, where the tape is full or of another type."""
        if tensor.dtype is not self._dtype:
            return tensor
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        pointer = storage.data_ptr()
        for i, first, end in self._given.get(pointer, ()):
            if first <= offset and offset + _span(tensor) <= end:
                if i in self._read:
                    self._read, self._ended = set(), True
                self._read.add(i)
                return i, offset - first, tensor.shape, tensor.stride()
        found = self._new.get(pointer)
        if found is None:
            elements = storage.nbytes() // tensor.itemsize
            if self.written + elements > self._size:
                return tensor
            if self._ended:
                self._write()
            found = self._new[pointer] = tensor.detach(), self.written, elements
            self.written += -(-elements // self._aligned) * self._aligned
        return self._count, found[1] + offset, tensor.shape, tensor.stride()

    def end(self) -> None:
        """Write what is not on the tape yet."""
        self._write()
        self._tape = None

    def _write(self) -> None:
        to: Any = self._tape
        for tensor, begin, elements in self._new.values():
            to.as_strided((elements,), (1,), begin).copy_(tensor.as_strided((elements,), (1,), 0))
        self._new, self._ended = {}, False


class _Begin(torch.autograd.Function):
    """The identity: autograd's graph of a call begins here, and not at tensors, which it would hold."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        del ctx, token
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError  # gradients are taken where they arrive


def record(
    call: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    elements: int,
) -> tuple[list[Tensor], Tensor]:
    """Run a call, and write to a tape what its backward needs.

    Args:
        call: takes the tensors, and returns others.
        tensors: what it is given.
        needed: for each of these, whether it has a gradient.
        elements: size of the tape.

    Returns:
        The results, and the tape, of the type of the tensors.
    """
    tape = torch.empty(elements, dtype=tensors[0].dtype, device=tensors[0].device)
    writer, given = _Writer(tensors, tape), _Given()

    with torch.enable_grad(), saved_tensors_hooks(writer.keep, given.find):
        token = torch.empty(0, device="cpu", requires_grad=True)
        apply: Any = _Begin.apply
        begun = iter(apply(token, *(tensor for tensor, want in zip(tensors, needed, strict=True) if want)))
        inside = [next(begun) if want else tensor.detach() for tensor, want in zip(tensors, needed, strict=True)]
        results = list(call(inside))
        edges = [get_gradient_edge(tensor) for tensor, want in zip(inside, needed, strict=True) if want]
        recorded = _Recorded([get_gradient_edge(result) for result in results], edges, given)
        with torch.no_grad():
            writer.end()
    tape.remat_recorded = recorded  # type: ignore[attr-defined]
    return [result.detach() for result in results], tape


def gradients_of(
    tape: Tensor,
    tensors: Sequence[Tensor],
    of: Sequence[int],
    gradients: Sequence[Tensor],
    earlier: Mapping[int, Tensor],
) -> list[Tensor]:
    """The backward of a recorded call.

    Args:
        tape: of the call.
        tensors: what the call was given.
        of: the places of results.
        gradients: of these results.
        earlier: by the position of a gradient that is returned, what it is added to before all else.

    Returns:
        The gradient of each tensor that has one.
    """
    recorded: _Recorded = tape.remat_recorded  # type: ignore[attr-defined]
    recorded.given.tensors = [(tensor, int(tensor.storage_offset())) for tensor in (*tensors, tape)]
    try:
        edges: Any = [*(recorded.tensors[place] for place in earlier), *(recorded.results[place] for place in of)]
        arriving = [*earlier.values(), *gradients]
        return list(torch.autograd.grad(edges, recorded.tensors, arriving, retain_graph=True))
    finally:
        recorded.given.tensors = []


def _span(tensor: Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
