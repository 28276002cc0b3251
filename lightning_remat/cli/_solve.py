"""The commands ``solve``, ``compare`` and ``curve``: run methods on a graph file, at one budget or over many."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_remat.budget import device_bytes, parse_budget
from lightning_remat.errors import BudgetError, InfeasibleBudgetError, SolverError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import Plan
from lightning_remat.schedule import simulate
from lightning_remat.solvers import Evaluation, Problem, Solution, find_smallest, options_of, solve

Say = Callable[..., None]
"""Called with a text about the work in progress, and with how much of how much is done where that is known."""


def holds(path: Path, kind: str) -> bool:
    """Whether a file is a JSON file of lightning_remat's of this kind: ``"graph"`` or ``"plan"``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False  # whoever loads it says what is wrong with it
    return isinstance(data, dict) and data.get("format") == f"lightning_remat.{kind}"


def graph_in(path: Path) -> ComputationGraph:
    """The graph in a graph file, or the step that the plan in a plan file is of, as it was captured.

    Raises:
        GraphError: where it is neither.
        OSError: where it cannot be read.
    """
    return Plan.load(path).as_captured if holds(path, "plan") else ComputationGraph.load(path)


@dataclasses.dataclass
class Case:
    """A graph to be solved, with the baseline and the limits that are the same for every method.

    Attributes:
        graph: the graph, with costs.
        time_limit: seconds that each solve may take, and the search for the smallest peak.
        say: see `Say`.
        baseline: time and peak of the step without rematerialization.
    """

    graph: ComputationGraph
    time_limit: float
    say: Say

    def __post_init__(self) -> None:
        problem = Problem(self.graph)
        self.baseline: Evaluation = problem.evaluate(problem.captured)
        self._smallest: Solution | None = None

    def smallest(self) -> Solution:
        """The schedule of the smallest peak that is found (searched for once)."""
        if self._smallest is None:
            self.say("looking for the smallest peak")
            self._smallest = find_smallest(self.graph, self.time_limit)
        return self._smallest

    def budget_bytes(self, budget: str) -> int:
        """A budget as a user writes it, in bytes. ``"auto"`` asks this machine; a size may be over what it has.

        Raises:
            BudgetError: when it cannot be read, or for ``"auto"`` where the graph's device is not here.
        """
        floor, baseline = self.graph.floor_bytes, self.baseline.peak_bytes
        return parse_budget(budget).resolve(floor, baseline, lambda: self.smallest().peak_bytes, self._device_bytes)

    def _device_bytes(self) -> int:
        device = torch.device(self.graph.device or "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise BudgetError(
                f"budget='auto': the graph's device {str(device)!r} is not here; give a size, such as '8GiB'"
            )
        return device_bytes(device)

    def solve(self, budget_bytes: int, method: str, options: Mapping[str, Any]) -> Solution:
        """One method at one budget."""
        return solve(self.graph, budget_bytes, method, self.time_limit, **options)

    def plan(self, solution: Solution, budget_bytes: int) -> Plan | None:
        """A solution as a plan, which can be shown and saved; ``None`` without a schedule."""
        if solution.schedule is None:
            return None
        return Plan(
            graph=self.graph,
            schedule=solution.schedule,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=solution.peak_bytes,
            baseline_peak_bytes=self.baseline.peak_bytes,
            predicted_seconds=solution.seconds,
            baseline_seconds=self.baseline.seconds,
            solver=solution.method,
            status=solution.status,
            lower_bound_seconds=solution.lower_bound_seconds,
            bound_scope=solution.bound_scope,
            solve_seconds=solution.solve_seconds,
            notes=solution.notes,
        )

    def overhead(self, seconds: float) -> float:
        """Extra time as a share of the step without rematerialization."""
        return seconds / self.baseline.seconds - 1.0 if self.baseline.seconds > 0 else 0.0


def planned(case: Case, budget: str, method: str, options: Mapping[str, Any]) -> Plan:
    """One method at one budget.

    Raises:
        InfeasibleBudgetError: when no method has a schedule at this budget; it names the smallest feasible one.
        SolverError: when this method has none, and another one has.
    """
    budget_bytes = case.budget_bytes(budget)
    case.say(f"solving with {method}")
    solution = case.solve(budget_bytes, method, options)
    plan = case.plan(solution, budget_bytes)
    if plan is not None:
        return plan
    least = case.smallest()
    if least.peak_bytes > budget_bytes and least.schedule is not None:
        where = simulate(case.graph, least.schedule)
        error = InfeasibleBudgetError(budget_bytes, least.peak_bytes, where.peak_op, where.peak_module)
        error.add_note(f"({failure(method, solution)})")
        raise error
    raise SolverError(
        f"{failure(method, solution)}. There is a schedule with a peak of {least.peak_bytes:,} bytes, within the budget of "
        f"{budget_bytes:,}: try another method or a longer --time-limit."
    )


def failure(method: str, solution: Solution) -> str:
    """Why a method has found no schedule, in one line."""
    notes = f" ({'; '.join(solution.notes)})" if solution.notes else ""
    return f"{method}: {solution.status.sentence}{notes}"


def compared(case: Case, budget_bytes: int, methods: Sequence[str]) -> tuple[dict[str, Plan], list[str]]:
    """Plans by method, the cheapest first, and a line for each method that has none.

    A method that cannot run here (an optional package that is missing, another package's that is broken) is such a line.
    """
    plans: dict[str, Plan] = {}
    failures: list[str] = []
    for done, method in enumerate(methods):
        case.say(f"solving with {method}", done, len(methods))
        try:
            solution = case.solve(budget_bytes, method, {})
        except SolverError as error:
            failures.append(f"{method}: {error}")
            continue
        plan = case.plan(solution, budget_bytes)
        if plan is None:
            failures.append(failure(method, solution))
        else:
            plans[method] = plan
    return dict(sorted(plans.items(), key=lambda item: item[1].predicted_seconds)), failures


@dataclasses.dataclass(frozen=True)
class Point:
    """One method at one budget of a curve; times are ``inf`` and the peak 0 without a schedule."""

    method: str
    budget_bytes: int
    status: str
    seconds: float
    overhead: float
    peak_bytes: int
    lower_bound_seconds: float
    bound_scope: str
    solve_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = dataclasses.asdict(self)
        return {name: None if value == math.inf else value for name, value in plain.items()}


def curve(case: Case, methods: Sequence[str], count: int) -> tuple[list[Point], list[str]]:
    """Every method at ``count`` budgets, evenly from the smallest peak found to the one without rematerialization.

    Returns:
        The points, budget by budget, and a line for each method that cannot run here.
    """
    low, high = case.smallest().peak_bytes, case.baseline.peak_bytes
    budgets = sorted({low + (high - low) * i // max(1, count - 1) for i in range(count)})
    points: list[Point] = []
    failures: dict[str, str] = {}
    total = len(budgets) * len(methods)
    for done, (budget_bytes, method) in enumerate((b, m) for b in budgets for m in methods):
        if method in failures:
            continue
        case.say(f"solving with {method}", done, total)
        try:
            solution = case.solve(budget_bytes, method, {})
        except SolverError as error:
            failures[method] = f"{method}: {error}"
            continue
        points.append(
            Point(
                method,
                budget_bytes,
                solution.status.value,
                solution.seconds,
                case.overhead(solution.seconds),
                solution.peak_bytes,
                solution.lower_bound_seconds,
                solution.bound_scope,
                solution.solve_seconds,
            )
        )
    return points, list(failures.values())


def checked_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a method as they were given on the command line, each of the type of its default.

    Raises:
        SolverError: for an unknown method or option, or a value of another type.
    """
    known = options_of(method)
    checked: dict[str, Any] = {}
    for name, value in given.items():
        default = known.get(name)  # an unknown name is `solve`'s to refuse
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if isinstance(default, tuple) and not isinstance(value, tuple):
            value = (value,)
        if default is not None and type(value) is not type(default):
            raise SolverError(f"option {name}={value!r} of {method!r}: give {_article(type(default).__name__)}")
        checked[name] = value
    return checked


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
