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
        real_strides: for outputs that lie otherwise there than their specs say: pairs of the place and strides, in elements.
    """

    seconds: float
    workspace_bytes: int
    real_bytes: tuple[tuple[int, int], ...] = ()
    real_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def to_list(self) -> list[Any]:
        """Plain data, ready for JSON."""
        strides = [[place, list(steps)] for place, steps in self.real_strides]
        return [self.seconds, self.workspace_bytes, [list(pair) for pair in self.real_bytes], strides]

    @classmethod
    def from_list(cls, data: Any) -> OpCost:
        """The cost that `to_list` wrote.

        Raises:
            ValueError: for anything that it would not write.
        """
        match data:
            case [float() | int() as seconds, int() as workspace, list() as pairs, list() as strides] if (
                0 <= seconds < math.inf
                and workspace >= 0
                and all(map(_is_pair, pairs))
                and all(isinstance(one, list) and len(one) == 2 and _is_numbers([one[0]]) for one in strides)
                and all(_is_numbers(steps) for _, steps in strides)
            ):
                real_bytes = tuple((place, nbytes) for place, nbytes in pairs)
                return cls(
                    float(seconds), workspace, real_bytes, tuple((place, tuple(steps)) for place, steps in strides)
                )
        raise ValueError(f"not a cost: {data!r}")


def _is_pair(value: Any) -> bool:
    return _is_numbers(value) and len(value) == 2


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)


FREE = OpCost(0.0, 0)
"""The cost of what takes neither time nor memory, such as a view."""
