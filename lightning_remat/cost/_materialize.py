"""Real arguments for an operation that is known by its specs only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch

from lightning_remat.capture import OpCall, TensorSpec, made_up_batch_sizes
from lightning_remat.cost._indices import index_bounds

_PATTERN_ELEMENTS = 1 << 16
_LOW, _HIGH = 0.1, 1.0
"""Positive and never tiny: safe under logarithms, roots and divisions, and never subnormal (slow on CPUs)."""


class ProducerError(RuntimeError):
    """An op that makes inputs of another cannot be run, so that the other one cannot either."""


_Result = tuple[str, int]
"""One result: the key of a call, and a place among the tensors that it returns."""


def materialize(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with a real tensor for every `TensorSpec`, each on the device of its spec.

    Floats are between 0.1 and 1, booleans true, integers 0, indices (see `index_bounds`) spread over the rows they
    index, the batch sizes of a packed sequence such as it may have. Strides are those of
    the spec: an expanded tensor stays one. The default random generators are not used.

    Inputs with a source (`OpCall.sources`) come from a real run of that, whatever their specs say; such indices do not.
    The sources run one after the other, each on arguments that are dropped before the next; of what they return, only
    what is read again is held meanwhile.

    Raises:
        ProducerError: when a source cannot be run.
    """
    readers = Counter(_taken(call).values())
    needed: list[OpCall] = []
    for one in reversed(call.producers()):
        if any(key == one.key for key, _ in readers):
            needed.append(one)
            readers.update(_taken(one).values())
    made: dict[_Result, torch.Tensor] = {}
    for one in reversed(needed):
        made.update(_results(one, made, readers))
        for result in _taken(one).values():
            readers[result] -= 1
            if not readers[result]:
                del made[result]
    return _arguments(call, made)


def _results(
    call: OpCall, made: Mapping[_Result, torch.Tensor], wanted: Container[_Result]
) -> dict[_Result, torch.Tensor]:
    """Run a call, and return those of its results that are wanted.

    Raises:
        ProducerError: when it cannot be run.
    """
    try:
        args, kwargs = _arguments(call, made)
        returned = enumerate(tensors_in(call.target(*args, **kwargs)))
        return {(call.key, i): tensor for i, tensor in returned if (call.key, i) in wanted}
    except Exception as error:
        raise ProducerError(
            f"{call.target}, which makes what it reads, cannot be run: {type(error).__name__}: {error}"
        ) from error


def _taken(call: OpCall) -> dict[int, _Result]:
    """The inputs, by position, that are taken from a real run of their source."""
    bounds = index_bounds(call)
    return {
        position: (source.call.key, source.output)
        for position, source in enumerate(call.sources)
        if source is not None and position not in bounds
    }


def _arguments(call: OpCall, made: Mapping[_Result, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, with the results in ``made`` for those that have a source.

    Raises:
        ProducerError: when one of these is not in ``made``.
    """
    bounds, known = index_bounds(call), made_up_batch_sizes(call)
    taken = _taken(call)
    missing = taken.values() - made.keys()
    if missing:
        raise ProducerError(f"{call.target} reads results that were announced and not returned")
    position = itertools.count()

    def one(spec: TensorSpec) -> torch.Tensor:
        place = next(position)
        if place in taken:
            return made[taken[place]]
        return known[place] if place in known else tensor(spec, bounds.get(place))

    return call.with_tensors(one)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def tensor(spec: TensorSpec, index_bound: int | None = None) -> torch.Tensor:
    """A tensor of this spec, over a buffer of ``spec.span`` elements.

    Args:
        spec: what to make.
        index_bound: for integers: draw them from 0 up to this bound, exclusive; ``None`` for zeros.
    """
    buffer = torch.empty(spec.span, dtype=spec.dtype, device=spec.device)
    if spec.dtype is torch.bool:
        buffer.fill_(True)
    elif spec.dtype.is_complex:
        _fill_with_pattern(torch.view_as_real(buffer).view(-1))
    elif spec.dtype.is_floating_point:
        if spec.dtype.itemsize == 1:  # the 8-bit floats have no random kernels
            buffer.fill_(0.5)
        else:
            _fill_with_pattern(buffer)
    elif index_bound is not None:
        buffer.random_(0, index_bound, generator=_generator(spec.device))
    else:
        buffer.zero_()
    return buffer.as_strided(spec.shape, spec.stride) if spec.span else buffer.new_empty(spec.shape)


def _fill_with_pattern(buffer: torch.Tensor) -> None:
    """Fill with random numbers at the speed of a copy, without memory beside ``buffer``: a short pattern is doubled."""
    filled = min(_PATTERN_ELEMENTS, buffer.numel())
    buffer[:filled].uniform_(_LOW, _HIGH, generator=_generator(buffer.device))
    while filled < buffer.numel():
        more = min(filled, buffer.numel() - filled)
        buffer[filled : filled + more].copy_(buffer[:more])
        filled += more


def _generator(device: torch.device) -> torch.Generator:
    """A new generator, which gives the same numbers every time."""
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    return generator
