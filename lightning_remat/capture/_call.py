"""A call of one op without its data: the op, its arguments with specs for tensors, and which other calls make these."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_remat._blocks import block_bytes


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (in elements), dtype and device of a strided tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor, size: Callable[[Any], int] = int) -> TensorSpec:
        """The spec of a real or fake tensor; ``size`` makes a number of each size and stride, which may be symbolic."""
        return cls(tuple(map(size, tensor.shape)), tuple(map(size, tensor.stride())), tensor.dtype, tensor.device)

    @functools.cached_property
    def span(self) -> int:
        """Elements of storage from the first to the last element, 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of ``span``."""
        return self.span * self.dtype.itemsize

    def bytes_on(self, device: torch.device) -> int:
        """Bytes of the allocator's block for ``span`` on ``device``; 0 where the tensor lies on another device."""
        return block_bytes(self.nbytes, device.type) if same_device(self.device, device) else 0

    @functools.cached_property
    def whole(self) -> bool:
        """Whether ``span`` is as many elements as the tensor has: no gaps between them, and none expanded."""
        expanded = any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride, strict=True))
        return self.span == math.prod(self.shape) and not expanded

    @functools.cached_property
    def contiguous(self) -> bool:
        """Whether the elements follow one another in memory, the last dimension's first."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return 0 in self.shape
            expected *= size
        return True

    def lies_as(self, other: TensorSpec) -> bool:
        """Whether a tensor of the same shape has its elements at the same places: strides of dimensions of 1 do not count."""
        return 0 in self.shape or all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.stride, other.stride, strict=True)
        )


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether both name one device; one without an index stands for any of its type."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an input comes from: the call that makes it, and its place among the tensors that this call returns."""

    call: OpCall
    output: int


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of ``target``, with a `TensorSpec` in the place of each tensor among its arguments.

    Attributes:
        target: an ``OpOverload``, or any function of tensors.
        args: positional arguments; tuples, lists and dicts may nest.
        kwargs: keyword arguments, likewise.
        outputs: specs of the tensors that it returns, in order.
        sources: one for each of ``inputs()``: where it comes from, if only the op that makes it can give its values (a
            random state, a mask, indices, a kernel's reserve space), or if that op makes such an input too; ``None``
            for the others. Empty where there are no such inputs.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]
    sources: tuple[Source | None, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.sources:
            _ = self.key  # found now, while those of its sources are known: later, it might recurse too deep

    @functools.cached_property
    def key(self) -> str:
        """Equal for calls that do the same work: target, shapes, dtypes, strides, device, plain arguments and sources."""
        plain = inspect.isfunction(self.target)  # its `str` holds an address, of this process only
        name = f"{self.target.__module__}.{self.target.__name__}" if plain else str(self.target)
        key = f"{name}({self.args!r}, {sorted(self.kwargs.items())!r})"
        made = [
            f"{i}: {hashlib.sha256(source.call.key.encode()).hexdigest()[:16]}[{source.output}]"
            for i, source in enumerate(self.sources)
            if source is not None
        ]
        return f"{key} of {', '.join(made)}" if made else key

    def producers(self) -> list[OpCall]:
        """All calls that its inputs come from, directly or not, each once (by `key`) and after those that it reads."""
        found: dict[str, OpCall] = {}
        waiting: list[tuple[OpCall, bool]] = [(self, False)]
        while waiting:
            call, ready = waiting.pop()
            if call.key in found:
                continue
            if ready:
                found[call.key] = call
                continue
            waiting.append((call, True))
            waiting.extend((source.call, False) for source in reversed(call.sources) if source is not None)
        found.pop(self.key)
        return list(found.values())

    def inputs(self) -> Iterator[TensorSpec]:
        """The tensors among the arguments, in order."""
        yield from _specs(self.args)
        yield from _specs(self.kwargs)

    def with_tensors(self, make: Callable[[TensorSpec], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with every `TensorSpec` replaced by ``make(spec)``."""
        args = tuple(_replace(value, make) for value in self.args)
        return args, {name: _replace(value, make) for name, value in self.kwargs.items()}


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _specs(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _specs(item)


def _replace(value: Any, make: Callable[[TensorSpec], Any]) -> Any:
    if isinstance(value, TensorSpec):
        return make(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_replace(item, make) for item in value)
    if isinstance(value, Mapping):
        return {name: _replace(item, make) for name, item in value.items()}
    return value
