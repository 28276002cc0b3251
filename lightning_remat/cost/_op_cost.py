"""The cost of one operation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class OpCost:
    """Time and memory of one evaluation.

    Attributes:
        seconds: time of one evaluation, in seconds (the static models `flops` and `unit` have units of their own).
        workspace_bytes: bytes held during the evaluation only, beside inputs and outputs.
        real_bytes: for outputs that really take other memory on the device than their specs say: pairs of the place
            among the call's outputs, and bytes.
    """

    seconds: float
    workspace_bytes: int
    real_bytes: tuple[tuple[int, int], ...] = ()

    def to_list(self) -> list[Any]:
        """Plain data, ready for JSON."""
        return [self.seconds, self.workspace_bytes, [list(pair) for pair in self.real_bytes]]

    @classmethod
    def from_list(cls, data: Any) -> OpCost:
        """The cost that `to_list` wrote.

        Raises:
            ValueError: for anything that it would not write.
        """
        match data:
            case [float() | int() as seconds, int() as workspace, list() as pairs] if (
                0 <= seconds < math.inf and workspace >= 0 and all(map(_is_pair, pairs))
            ):
                return cls(float(seconds), workspace, tuple((place, nbytes) for place, nbytes in pairs))
        raise ValueError(f"not a cost: {data!r}")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n >= 0 for n in value)


FREE = OpCost(0.0, 0)
"""The cost of what takes neither time nor memory, such as a view."""
