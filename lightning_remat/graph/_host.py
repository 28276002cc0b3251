"""The host's memory, beside that of the device: what a tensor may be copied to, and fetched back from."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from lightning_remat._blocks import block_bytes
from lightning_remat.errors import GraphError
from lightning_remat.graph._op import Tensor, TensorRole

if TYPE_CHECKING:
    from lightning_remat.graph._graph import ComputationGraph


@dataclasses.dataclass(frozen=True)
class Host:
    """How fast tensors are copied between the device and pinned memory of the host, as it was measured there.

    Copies in one direction wait for one another; they run beside the ops, and beside those in the other direction.

    Attributes:
        bytes: the most that may lie on the host at any moment, for this step.
        to_host: bytes a second, from the device to the host.
        to_device: bytes a second, from the host to the device.
        latency: seconds that any copy takes, whatever its size.

    Raises:
        GraphError: on construction, for bytes or seconds below zero, or a speed that is not positive.
    """

    bytes: int
    to_host: float
    to_device: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 0:
            raise GraphError(f"{self.bytes!r} bytes of host memory: give a whole number, 0 or more")
        for name in ("to_host", "to_device"):
            if not 0 < (speed := getattr(self, name)) < math.inf:
                raise GraphError(f"{name}={speed!r}: give a positive number of bytes a second")
        if not 0 <= self.latency < math.inf:
            raise GraphError(f"latency={self.latency!r}: give seconds, 0 or more")

    def seconds(self, nbytes: int, *, to_device: bool) -> float:
        """How long one copy takes."""
        return self.latency + nbytes / (self.to_device if to_device else self.to_host)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            GraphError: for other data.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise GraphError(f"not a description of host memory: {error}") from error


def copyable(graph: ComputationGraph) -> tuple[bool, ...]:
    """Whether each tensor may be copied to the host: alone made with its storage, which it fills and no op mutates."""
    made: dict[int, list[int]] = {}
    for op in graph.ops:
        read = {graph.tensors[t].storage for t in op.inputs}
        for t in op.outputs:
            if (storage := graph.tensors[t].storage) not in read:
                made.setdefault(storage, []).append(t)
    mutated = {graph.tensors[t].storage for op in graph.ops for t in op.mutates}
    kind = graph.device.partition(":")[0]

    def may(index: int, tensor: Tensor) -> bool:
        storage = tensor.storage
        if tensor.role is not TensorRole.INTERMEDIATE or made.get(storage) != [index] or storage in mutated:
            return False
        nbytes = _nbytes(tensor)
        return graph.storages[storage] > 0 and (nbytes is None or block_bytes(nbytes, kind) == graph.storages[storage])

    return tuple(may(index, tensor) for index, tensor in enumerate(graph.tensors))


def _nbytes(tensor: Tensor) -> int | None:
    """Bytes of the elements, those of an unnamed type being unknown."""
    if not tensor.dtype:
        return None
    bits = re.search(r"\d+", tensor.dtype.replace("bool", "bool8"))
    return math.prod(tensor.shape) * int(bits[0]) // 8 if bits else -1
