"""The cost of one operation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OpCost:
    """Time and memory of one evaluation.

    Attributes:
        seconds: time of one evaluation, in seconds (the static models document their own unit).
        workspace_bytes: bytes held during the evaluation only, beside inputs and outputs.
    """

    seconds: float
    workspace_bytes: int


FREE = OpCost(0.0, 0)
"""What a view costs."""
