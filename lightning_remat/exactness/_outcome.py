"""The results of a step as named tensors, and where those of two runs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from lightning_remat.exactness._bits import differing, plain, same_bits


class Kind(str, Enum):
    """What a compared tensor is to its step."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    PARAMETER = "parameter"
    RANDOM_STATE = "random state"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that has other bits in another run.

    Attributes:
        kind: what it is to the step.
        name: name of the output, the parameter (also for its gradient), the buffer, or the device (for its random
            state).
        elements: how many of its elements have other bits.
        of: how many elements it has.
        largest: the largest difference of two values; ``None`` where there is no number for it (a NaN or an infinity
            differs, the tensor has another shape or type, or only one of the runs has it).
    """

    kind: Kind
    name: str
    elements: int
    of: int
    largest: float | None

    def __str__(self) -> str:
        what = f"the {self.kind.value}" if self.kind is Kind.OUTPUT else f"the {self.kind.value} of"
        by = f" by up to {self.largest:.3g}" if self.largest else ""
        return f"{what} {self.name} ({self.elements:,} of {self.of:,} elements{by})"


Results = Iterator[tuple[Kind, str, torch.Tensor | None]]


def results(output: Any, modules: Mapping[str, torch.nn.Module]) -> Results:
    """All that a step has made and changed: what it returns, gradients, buffers, parameters and random states.

    Args:
        output: what the step has returned, tensors nested in containers.
        modules: the modules of the step, by the prefix of their parameters' names.

    Yields:
        Kind, name and tensor, one by one; ``None`` in place of a gradient that is not there.
    """
    for name, tensor in named_tensors(output):
        yield Kind.OUTPUT, name, tensor
    devices: dict[torch.device, None] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters(prefix=prefix):
            devices[parameter.device] = None
            yield Kind.PARAMETER, name, parameter
            if parameter.requires_grad:
                yield Kind.GRADIENT, name, parameter.grad
        for name, buffer in module.named_buffers(prefix=prefix):
            yield Kind.BUFFER, name, buffer
    yield Kind.RANDOM_STATE, "cpu", torch.get_rng_state()
    for device in devices:
        if device.type == "cuda":
            yield Kind.RANDOM_STATE, str(device), torch.cuda.get_rng_state(device)


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a step's output with names: ``loss`` where the output is a tensor, else by key, field or index."""
    if isinstance(value, torch.Tensor):
        yield name or "loss", value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    items: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}" if name else f"{key}")


class Outcome:
    """The results of one run, kept on the CPU, to compare those of other runs with."""

    def __init__(self, found: Results) -> None:
        self._values = {
            (kind, name): plain(value).to("cpu", copy=True) if value is not None else None
            for kind, name, value in found
        }

    def names(self, kind: Kind) -> list[str]:
        """Names of the tensors of a kind (gradients that are ``None`` are left out)."""
        return [name for (one, name), value in self._values.items() if one is kind and value is not None]

    def differences(self, found: Results) -> tuple[Difference, ...]:
        """Where another run's results differ, in the order of these results."""
        different, missing = [], dict(self._values)
        for kind, name, value in found:
            before = missing.pop((kind, name), None)
            different += _difference(kind, name, before, value)
        different += [one for (kind, name), before in missing.items() for one in _difference(kind, name, before, None)]
        return tuple(different)


def _difference(kind: Kind, name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> list[Difference]:
    if one is None and other is None:
        return []
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        size = max(tensor.numel() for tensor in (one, other) if tensor is not None)
        return [Difference(kind, name, size, size, None)]
    now = plain(other).cpu()
    if same_bits(one, now):
        return []
    return [Difference(kind, name, *_counted(one, now))]


def _counted(one: torch.Tensor, other: torch.Tensor) -> tuple[int, int, float | None]:
    count, largest = differing(one, other)
    return count, one.numel(), largest
