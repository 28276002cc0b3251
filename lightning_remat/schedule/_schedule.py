"""A schedule: the order in which ops are evaluated and tensors are given up.

A `Compute` step evaluates an op; all of its inputs must be present. Its outputs become present. Where an output is
present already (an op with several outputs, evaluated again for one of them), the present one stays and the new one is
freed as soon as the op is done. With ``over``, the result takes the storage of that input, and every tensor on it is
gone. The op must allow that, the caller must not hold the input, and the input must have been made on the same side of
the boundary, since the caller may run the backward again on what the forward has saved. A `Free` step gives a tensor
up; its storage is released with the last tensor that lies on it.

`Copy` steps move tensors between the device and the host, beside the ops, where the graph has a `Host`. Copies in one
direction begin in the order of their steps, each when the one before has ended. A copy to the host begins with one step,
at which the tensor is present, and has ended with another; in between its memory is neither given up nor written to, and
from then on the tensor may be freed, and fetched as often as it is wanted until the step ends. A copy to the device
begins with one step, from which on it takes memory of its own, and the tensor, which was not present, is so from the step
on with which it has ended. Copies that begin in the forward have ended when that ends. What is copied is a tensor whose
storage no op mutates, and that fills its storage. ``boundary`` steps run before the loss is handed to
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


class Copy(NamedTuple):
    """Begin to copy tensor ``tensor``, or, with ``ended``, wait until that copy has ended.

    Attributes:
        tensor: an index into ``graph.tensors``.
        to_device: whether it is fetched back to the device; otherwise it goes to the host.
        ended: whether this step waits for the copy that has begun.
    """

    tensor: int
    to_device: bool
    ended: bool


Step = Compute | Free | Copy


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
        """Plain data, ready for JSON.

        A compute step is an op index (or a pair with ``over``), a free step ``-1 - tensor``, and a copy step a list of
        tensor, ``to_device`` and ``ended``.
        """
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
    if isinstance(step, Copy):
        return [step.tensor, int(step.to_device), int(step.ended)]
    return step.op if step.over < 0 else [step.op, step.over]


def _decoded(code: int | list[int]) -> Step:
    if isinstance(code, list):
        return Compute(*code) if len(code) == 2 else Copy(code[0], *map(bool, code[1:]))
    return Compute(code) if code >= 0 else Free(-1 - code)
