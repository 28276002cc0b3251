"""What a report reads of a plan."""

from __future__ import annotations

from typing import Protocol

from lightning_remat.graph import ComputationGraph
from lightning_remat.report._plan_table import PlanLike
from lightning_remat.schedule import Schedule, Timeline, WholeStep


class Planned(PlanLike, Protocol):
    """A plan, with its graph and its schedule."""

    @property
    def graph(self) -> ComputationGraph:
        """The graph that is scheduled."""

    @property
    def schedule(self) -> Schedule:
        """The schedule."""

    @property
    def untiled(self) -> ComputationGraph | None:
        """The graph as it was captured, where the scheduled one computes a part of it in slices."""

    @property
    def as_captured(self) -> ComputationGraph:
        """The graph of the step without rematerialization."""

    @property
    def whole(self) -> WholeStep | None:
        """The step as a whole, where the graph is one of several that it runs as."""

    def timeline(self) -> Timeline:
        """The memory timeline of the schedule."""

    def baseline_timeline(self) -> Timeline:
        """The memory timeline of the graph without rematerialization."""

    def baseline_schedule(self) -> Schedule:
        """The schedule of the step without rematerialization."""

    @property
    def baseline_seconds(self) -> float:
        """Time of a step without rematerialization, in seconds."""

    @property
    def lower_bound_seconds(self) -> float:
        """No schedule in ``bound_scope`` that fits the budget takes less time."""

    @property
    def bound_scope(self) -> str:
        """The schedules that the bound holds for, in words."""

    @property
    def predicted_allocated_bytes(self) -> int:
        """The most that the allocator counts as allocated, in bytes."""

    @property
    def arrangement(self) -> str:
        """How the device's memory is arranged, in words; "" where its allocator is not modelled."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened on the way, in words."""
