"""The host's memory, beside that of the device: what a tensor may be copied to, and fetched back from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from lightning_remat.errors import GraphError


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
