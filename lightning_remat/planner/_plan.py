"""A plan: a graph, the schedule chosen for it, and what is known about both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_remat._disk import replace_file
from lightning_remat.allocator import Arrangement, Footprint
from lightning_remat.errors import GraphError
from lightning_remat.graph import ComputationGraph
from lightning_remat.report import (
    TradePoint,
    analyse,
    explanation,
    format_bytes,
    format_seconds,
    notebook_view,
    report_page,
)
from lightning_remat.schedule import Copy, Schedule, Timeline, WholeStep, simulate
from lightning_remat.solvers import Problem, Solution, Status, plan_curve

FORMAT = "lightning_remat.plan"
FORMAT_VERSION = 1

FOR_ONCE = "the smallest, until the call as a whole is known"
"""Note in the plan of one part of a call for which alone no schedule within the budget was found, or looked for."""

FOR_NOW = "made in a moment, until the call as a whole is known"
"""Note in the plan of one part of a call for which the first schedule was taken that was found within the budget."""

CURVE_POINTS, CURVE_SECONDS = 12, 10.0
"""How many budgets a plan's trade-off has, and the seconds that it may take."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for one captured graph at one set of shapes, with what is predicted of it.

    Attributes:
        graph: the captured graph, with costs.
        schedule: the verified schedule.
        budget_bytes: the most that may be held at any moment, everything counted.
        predicted_peak_bytes, predicted_seconds: peak and time of a step under the schedule.
        baseline_peak_bytes, baseline_seconds: peak and time of the captured step without rematerialization.
        solver: the method that made the schedule.
        status: how the solve ended.
        lower_bound_seconds: no schedule of ``graph`` in ``bound_scope`` that fits the budget takes less time.
        bound_scope: the schedules that the bound holds for, in words.
        solve_seconds, cost_seconds: wall time of solving, and of measuring the ops, in seconds.
        notes: what happened on the way, in words.
        footprint: what the CUDA caching allocator does with the schedule, by a model of it; ``None`` on the CPU and
            with allocators that are not modelled.
        untiled: the graph as it was captured, where ``graph`` computes a part of it in slices: the step without
            rematerialization is that. ``None`` elsewhere.
        whole: the step as a whole, as it was planned, where ``graph`` is one of several that it runs as; ``None`` elsewhere. Of
            steps that begin with the same graphs, and share these graphs' plans, it is the first that was planned.

    Example:
        >>> import torch
        >>> from lightning_remat import rematerialize
        >>> step = rematerialize(torch.nn.Linear(4, 4), budget="min", cost_model="unit")
        >>> _ = step(torch.ones(2, 4))
        >>> step.plan.predicted_peak_bytes <= step.plan.budget_bytes
        True
    """

    graph: ComputationGraph
    schedule: Schedule
    budget_bytes: int
    predicted_peak_bytes: int
    baseline_peak_bytes: int
    predicted_seconds: float
    baseline_seconds: float
    solver: str
    status: Status
    lower_bound_seconds: float
    bound_scope: str
    solve_seconds: float
    cost_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    footprint: Footprint | None = None
    untiled: ComputationGraph | None = None
    whole: WholeStep | None = None

    @property
    def predicted_allocated_bytes(self) -> int:
        """The most that the allocator counts as allocated, in bytes: the predicted peak, rounded up to its blocks."""
        return self.footprint.allocated_bytes if self.footprint is not None else self.predicted_peak_bytes

    @property
    def predicted_reserved_bytes(self) -> int:
        """The most that the allocator reserves on the device, in bytes; 0 where ``footprint`` is ``None``."""
        return self.footprint.reserved_bytes if self.footprint is not None else 0

    @property
    def arrangement(self) -> str:
        """How the device's memory is arranged for it, in words; "" where ``footprint`` is ``None``."""
        return self.footprint.arrangement.value if self.footprint is not None else ""

    @property
    def overhead(self) -> float:
        """Extra time as a share of the step without rematerialization: ``predicted / baseline - 1``."""
        return self.predicted_seconds / self.baseline_seconds - 1.0 if self.baseline_seconds > 0 else 0.0

    @property
    def gap(self) -> float:
        """How far the schedule can be from the lower bound: ``predicted / bound - 1`` (``inf`` for a bound of 0)."""
        if self.lower_bound_seconds <= 0:
            return 0.0 if self.predicted_seconds <= 0 else float("inf")
        return max(0.0, self.predicted_seconds / self.lower_bound_seconds - 1.0)

    @property
    def rematerializes(self) -> bool:
        """Whether any op is evaluated more than once (views do not count)."""
        return any(count > 1 for op, count in self.schedule.evaluations.items() if not self.graph.is_view[op])

    @property
    def for_once(self) -> bool:
        """Whether it was made for one part of a step, in a moment or as small as can be, before the whole step was known."""
        return FOR_ONCE in self.notes or FOR_NOW in self.notes

    @property
    def copies(self) -> int:
        """How many copies of tensors a step makes to the host, and back."""
        return sum(isinstance(step, Copy) and not step.ended for step in self.schedule.steps)

    @property
    def host_bytes(self) -> int:
        """Bytes of the tensors that wait in the host's memory."""
        sent = {step.tensor for step in self.schedule.steps if isinstance(step, Copy) and not step.to_device}
        return sum(self.graph.storages[self.graph.tensors[t].storage] for t in sent)

    @property
    def saving(self) -> float:
        """Share of the baseline peak that is saved: ``1 - predicted / baseline``."""
        return 1.0 - self.predicted_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 0.0

    def of_whole(self) -> Plan:
        """The plan with peak and times of the whole step, where its graph is one of several; the gap is unknown then."""
        if self.whole is None:
            return self
        return dataclasses.replace(
            self,
            predicted_peak_bytes=self.whole.after.most_bytes,
            predicted_seconds=float(self.whole.after.seconds.sum()),
            baseline_seconds=float(self.whole.before.seconds.sum()),
            lower_bound_seconds=0.0,
        )

    def solution(self) -> Solution:
        """The plan as the solution that a solver would have returned."""
        return Solution(
            schedule=self.schedule,
            status=self.status,
            seconds=self.predicted_seconds,
            peak_bytes=self.predicted_peak_bytes,
            lower_bound_seconds=self.lower_bound_seconds,
            bound_scope=self.bound_scope,
            solve_seconds=self.solve_seconds,
            method=self.solver,
            notes=self.notes,
        )

    def timeline(self) -> Timeline:
        """The memory timeline of the schedule."""
        return simulate(self.graph, self.schedule)

    def baseline_schedule(self) -> Schedule:
        """The schedule without rematerialization: every op of the graph as it was captured once, in the captured order."""
        problem = Problem(self.as_captured)
        return problem.expand(problem.captured)

    def baseline_timeline(self) -> Timeline:
        """The memory timeline of the step without rematerialization."""
        return simulate(self.as_captured, self.baseline_schedule())

    @property
    def as_captured(self) -> ComputationGraph:
        """The graph of the step that nothing is computed in slices of."""
        return self.graph if self.untiled is None else self.untiled

    def summary(self) -> str:
        """The plan as one line of text."""
        reserved = f", reserved {format_bytes(self.predicted_reserved_bytes)}" if self.footprint is not None else ""
        if self.footprint is not None and self.footprint.arrangement is not Arrangement.AS_IT_IS:
            reserved += f" ({self.footprint.arrangement.value})"
        waits = f", {format_bytes(self.host_bytes)} on the host ({self.copies} copies)" if self.copies else ""
        others = f", one of {self.whole.graphs} graphs" if self.whole is not None else ""
        together = f" (the whole step {self.whole.overhead:+.1%})" if self.whole is not None else ""
        return (
            f"{len(self.graph.ops):,} ops on {self.graph.device or 'an unknown device'}{others}: baseline peak "
            f"{format_bytes(self.baseline_peak_bytes)}, budget {format_bytes(self.budget_bytes)}, predicted peak "
            f"{format_bytes(self.predicted_peak_bytes)} ({-self.saving:+.0%}){reserved}{waits}, predicted overhead "
            f"{self.overhead:+.1%}{together}; solver {self.solver} ({self.status.value}, gap {self.gap:.1%} to "
            f"{self.bound_scope}), planned in {format_seconds(self.cost_seconds + self.solve_seconds)}"
        )

    def explain(self, *, curve_seconds: float = CURVE_SECONDS) -> str:
        """Why the step needs what it needs, module by module, what sets its peak, and the three changes that would help most.

        Args:
            curve_seconds: seconds for the trade-off with other budgets, by which changes are judged; 0 leaves it out.
        """
        return explanation(analyse(self, trade_off(self, curve_seconds)))

    def report(self, path: str | Path, *, curve_seconds: float = CURVE_SECONDS) -> None:
        """Write a page about the plan: one HTML file, for a browser without network.

        It shows memory over the step before and after (point at it for the op, its module and the largest tensors), by module,
        what is kept, computed again, sliced and offloaded, the trade-off with other budgets, what costs most, and how to
        get lower. Needs the extra ``[report]``.

        Args:
            path: the file.
            curve_seconds: seconds for the trade-off; 0 leaves it out.

        Raises:
            RematError: where Bokeh is not installed.
            OSError: when the file cannot be written.
        """
        replace_file(path, report_page(analyse(self, trade_off(self, curve_seconds))))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return notebook_view(analyse(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION}
        for field in dataclasses.fields(self):
            data[field.name] = getattr(self, field.name)
        data.update(
            graph=self.graph.to_dict(),
            schedule=self.schedule.to_dict(),
            status=self.status.value,
            notes=list(self.notes),
            overhead=self.overhead,
            **({"copies": self.copies, "host_bytes": self.host_bytes} if self.copies else {}),
            gap=self.gap if self.gap != float("inf") else None,
            footprint=self.footprint.to_dict() if self.footprint is not None else None,
            untiled=self.untiled.to_dict() if self.untiled is not None else None,
            whole=self.whole.to_dict() if self.whole is not None else None,
        )
        return data

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically: whoever reads the file sees all of it.

        Raises:
            OSError: when the file cannot be written.
        """
        replace_file(path, json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            GraphError: when the file is no plan, or one of another format version.
            OSError: when the file cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise GraphError(f"{path} is not a JSON file: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise GraphError(f'{path} is not a plan: expected a JSON object with "format": "{FORMAT}"')
        if data.get("version") != FORMAT_VERSION:
            raise GraphError(
                f"plan format version {data.get('version')!r} cannot be read: this release reads {FORMAT_VERSION}"
            )
        try:
            return cls.from_dict(data, ComputationGraph.from_dict(data["graph"]))
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"{path} is a plan with a missing or malformed field: {error!r}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], graph: ComputationGraph) -> Plan:
        """A plan of ``graph`` from what `to_dict` gave; the graph in that is ignored.

        Raises:
            KeyError, TypeError, ValueError: where a field is missing or malformed.
        """
        # A plan that was saved before there were these has none, but for the graph.
        others = ("graph", "footprint", "untiled", "whole")
        values = {field.name: data[field.name] for field in dataclasses.fields(cls) if field.name not in others}
        footprint, untiled, whole = data.get("footprint"), data.get("untiled"), data.get("whole")
        values.update(
            schedule=Schedule.from_dict(data["schedule"]),
            status=Status(data["status"]),
            notes=tuple(data["notes"]),
            footprint=Footprint.from_dict(footprint) if footprint is not None else None,
            untiled=ComputationGraph.from_dict(untiled) if untiled is not None else None,
            whole=WholeStep.from_dict(whole) if whole is not None else None,
        )
        return cls(graph=graph, **values)


def trade_off(plan: Plan, seconds: float) -> tuple[TradePoint, ...]:
    """What the step of a plan costs at other budgets, by schedules found in about so many seconds; none in 0.

    Nor is there one of a plan that is one of several: the others would have to change with it.
    """
    if seconds <= 0 or plan.whole is not None or not any(op.seconds for op in plan.graph.ops):
        return ()
    # In slices a step can be smaller, and is slower.
    graphs = [plan.graph] if plan.untiled is None else [plan.untiled, plan.graph]
    curves = [plan_curve(graph, CURVE_POINTS, seconds / len(graphs)) for graph in graphs]
    points = [point for curve in curves for point in zip(curve.budgets_bytes, curve.solutions, strict=True)]
    return tuple(TradePoint(budget, one.peak_bytes, one.seconds) for budget, one in points)


def with_beside(plan: Plan, nbytes: int, budget_bytes: int = 0) -> Plan:
    """The plan with ``nbytes`` more held all through the step, and a budget that is larger by ``budget_bytes``."""
    graph, untiled, whole = plan.graph, plan.untiled, plan.whole
    return dataclasses.replace(
        plan,
        graph=graph.replace(resident_bytes=graph.resident_bytes + nbytes),
        untiled=None if untiled is None else untiled.replace(resident_bytes=untiled.resident_bytes + nbytes),
        whole=None if whole is None else whole.with_beside(nbytes),
        budget_bytes=plan.budget_bytes + budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes + nbytes,
        baseline_peak_bytes=plan.baseline_peak_bytes + nbytes,
    )
