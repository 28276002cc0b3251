"""What `solve` returns: a verified schedule, its cost, how the solve ended, and a lower bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from lightning_remat.errors import RematError, SolverError
from lightning_remat.schedule import Schedule

FORMAT = "lightning_remat.solution"
FORMAT_VERSION = 2


class Status(str, Enum):
    """How a solve ended; ``sentence`` says it to a person."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMEOUT = "timeout"
    REFUSED = "refused"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Status.OPTIMAL: "a schedule was found, and none that the bound speaks of is cheaper",
    Status.FEASIBLE: "a schedule within the budget was found; a cheaper one may exist",
    Status.INFEASIBLE: "this method has no schedule that stays within the budget",
    Status.TIMEOUT: "no schedule was found within the time limit; one may exist",
    Status.REFUSED: "this method does not take graphs of this size",
}


@dataclasses.dataclass(frozen=True)
class Solution:
    """A schedule with what is known about it.

    Attributes:
        schedule: the schedule, verified; ``None`` if none was found.
        status: how the solve ended.
        seconds: time of one step under the schedule, the sum of its evaluations'; ``inf`` without one.
        peak_bytes: its peak, as `verify` finds it; 0 without one.
        lower_bound_seconds: no schedule in ``bound_scope`` that stays within the budget is faster.
        bound_scope: the schedules that the bound holds for, in words.
        solve_seconds: wall time of the solve.
        method: the solver's registered name (for ``"auto"`` with the method that won, such as ``"auto:greedy"``).
        options: the options it ran with.
        notes: what happened on the way, for people (methods tried, fallbacks and why).
    """

    schedule: Schedule | None
    status: Status
    seconds: float
    peak_bytes: int
    lower_bound_seconds: float
    bound_scope: str
    solve_seconds: float
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far the schedule can be from the bound: ``seconds / lower_bound_seconds - 1``, never negative.

        ``inf`` without a schedule, and where the bound is 0 and the time is not.
        """
        if self.schedule is None:
            return float("inf")
        if self.lower_bound_seconds <= 0:
            return 0.0 if self.seconds <= 0 else float("inf")
        return max(0.0, self.seconds / self.lower_bound_seconds - 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, of a solution with a schedule.

        Raises:
            SolverError: for a solution without a schedule.
        """
        if self.schedule is None:
            raise SolverError("a solution without a schedule is not written: there is nothing to come back to")
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "schedule": self.schedule.to_dict(),
            "status": self.status.value,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "lower_bound_seconds": self.lower_bound_seconds,
            "bound_scope": self.bound_scope,
            "solve_seconds": self.solve_seconds,
            "method": self.method,
            "options": dict(self.options),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Solution:
        """The inverse of `to_dict`. Whether its schedule is one of the graph at hand is for `verify` to say.

        Raises:
            SolverError: for other data.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != FORMAT_VERSION:
            raise SolverError(f"not a {FORMAT} of version {FORMAT_VERSION}")
        try:
            return cls(
                schedule=Schedule.from_dict(data["schedule"]),
                status=Status(data["status"]),
                seconds=float(data["seconds"]),
                peak_bytes=int(data["peak_bytes"]),
                lower_bound_seconds=float(data["lower_bound_seconds"]),
                bound_scope=str(data["bound_scope"]),
                solve_seconds=float(data["solve_seconds"]),
                method=str(data["method"]),
                options=dict(data["options"]),
                notes=tuple(map(str, data["notes"])),
            )
        except (KeyError, TypeError, ValueError, RematError) as error:
            raise SolverError(f"a solution with a missing or malformed field: {error!r}") from error
