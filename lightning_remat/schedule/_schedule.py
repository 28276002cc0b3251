"""A schedule: the order in which ops are evaluated and tensors are given up.

A `Compute` step evaluates an op; all of its inputs must be present. Its outputs become present. Where an output is
present already (an op with several outputs, evaluated again for one of them), the present one stays and the new one is
freed as soon as the op is done. With ``over``, the result takes the storage of that input, and every tensor on it is
gone. The op must allow that, the caller must not hold the input, and the input must have been made on the same side of
the boundary, since the caller may run the backward again on what the forward has saved. A `Free` step gives a tensor
up; its storage is released with the last tensor that lies on it. ``boundary`` steps run before the loss is handed to
the caller, the others when the caller starts the backward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_remat.errors import ScheduleError


class Compute(NamedTuple):
    """Evaluate op ``op`` (an index into ``graph.ops``), on the storage of tensor ``over`` unless that is -1."""

    op: int
    over: int = -1


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
        """Plain data, ready for JSON: an op index (or a pair with ``over``) for a compute step, ``-1 - tensor`` for a free."""
        return {"steps": [_encoded(step) for step in self.steps], "boundary": self.boundary}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The inverse of `to_dict`.

        Raises:
            ScheduleError: for other data.
        """
        try:
            return cls(tuple(_decoded(code) for code in data["steps"]), int(data["boundary"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a schedule: {error!r}") from error


def _encoded(step: Step) -> int | list[int]:
    if isinstance(step, Free):
        return -1 - step.tensor
    return step.op if step.over < 0 else [step.op, step.over]


def _decoded(code: int | list[int]) -> Step:
    if isinstance(code, list):
        return Compute(*code)
    return Compute(code) if code >= 0 else Free(-1 - code)
