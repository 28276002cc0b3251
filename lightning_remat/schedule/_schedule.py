"""A schedule: the order in which ops are evaluated and tensors are given up.

A `Compute` step evaluates an op; all of its inputs must be present. Its outputs become present. Where an output is present
already (an op with several outputs, evaluated again for one of them), the present one stays and the new one is given up as
soon as the op is done. A `Free` step gives a tensor up; its storage is released with the last tensor that lies on it.
``boundary`` steps run before the loss is handed to the caller, the others when the caller starts the backward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_remat.errors import ScheduleError


class Compute(NamedTuple):
    """Evaluate op ``op`` (an index into ``graph.ops``)."""

    op: int


class Free(NamedTuple):
    """Give up tensor ``tensor`` (an index into ``graph.tensors``)."""

    tensor: int


Step = Compute | Free


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps in order, the first ``boundary`` of which run in the forward.

    Raises:
        ScheduleError: on construction, when the boundary lies outside the steps.
    """

    steps: tuple[Step, ...]
    boundary: int

    def __post_init__(self) -> None:
        if not 0 <= self.boundary <= len(self.steps):
            raise ScheduleError(f"a boundary after step {self.boundary}, of {len(self.steps)} steps")

    @property
    def evaluations(self) -> Counter[int]:
        """How often each op is evaluated."""
        return Counter(step.op for step in self.steps if isinstance(step, Compute))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: an op index for a compute step, ``-1 - tensor`` for a free step."""
        codes = [step.op if isinstance(step, Compute) else -1 - step.tensor for step in self.steps]
        return {"steps": codes, "boundary": self.boundary}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The inverse of `to_dict`.

        Raises:
            ScheduleError: for other data.
        """
        try:
            steps = tuple(Compute(code) if code >= 0 else Free(-1 - code) for code in data["steps"])
            return cls(steps, int(data["boundary"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a schedule: {error!r}") from error
