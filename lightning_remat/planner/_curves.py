"""The schedules that the graphs of a step may choose from when they are planned together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

from lightning_remat._recent import Recent
from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._alike import Alike
from lightning_remat.planner._beside import needing
from lightning_remat.planner._plan_cache import fingerprint
from lightning_remat.schedule import OUTSIDE, Schedule, Step, simulate, verify
from lightning_remat.solvers import OpSequence, Problem, plan_curve

NEEDS = (0.0, 1.0)
"""Workspaces of `OUTSIDE` for which curves are made, as shares of the graph's peak: a large one makes keeping dear."""

POINTS = 12
"""Budgets of one curve."""

MOST = 64
"""Graphs whose schedules are kept, at most: those that were planned last."""

MOST_ALIKE = 2
"""Graphs of the same ops whose schedules stand in for those of other sizes, at most."""

ENDED = 0.03
"""Share of the time limit up to which more time would find nothing else: no part of the search has less time than that."""


class Curves:
    """Finds these schedules, once for graphs that are alike: the blocks of a network, or a graph that is planned again.

    What is held all through a step is the same at each moment of each schedule, so it does not tell graphs apart.
    """

    def __init__(self) -> None:
        self._known: Recent[str, tuple[float, list[Schedule]]] = Recent(MOST)
        self._alike = Alike(MOST_ALIKE)

    def schedules(self, graph: ComputationGraph, time_limit: float, *, moved: bool = False) -> list[Schedule]:
        """The schedules for one graph with the op `OUTSIDE`; the first is the one without rematerialization.

        Args:
            graph: the graph.
            time_limit: seconds for the curve of each of `NEEDS`.
            moved: whether to take those of graphs with the same ops at other sizes, where there are any, and search for none.
        """
        graph = graph.replace(resident_bytes=0)
        key = fingerprint(graph)
        enough, found = self._known.get(key) or (0.0, [])
        if not found and moved and (sequences := self._alike.of(graph)):
            found = _moved(sequences, graph)
            self._known[key] = 0.0, found  # a curve is made where one is asked for
        elif not found or (time_limit > enough and not moved):
            enough, found = _made(graph, time_limit)
            self._known[key] = enough, found
            self._alike.add(graph, found)
        return found


def plain_schedule(graph: ComputationGraph) -> Schedule:
    """The schedule without rematerialization."""
    problem = Problem(graph)
    return problem.expand(problem.captured)


def outside_bytes(graph: ComputationGraph) -> int:
    """What others need between the forward and the backward of a graph with the op `OUTSIDE`."""
    return max(op.workspace_bytes for op in graph.ops if op.name == OUTSIDE)


def _moved(sequences: Iterable[OpSequence], graph: ComputationGraph) -> list[Schedule]:
    """The schedule without rematerialization, and those of other sizes that are valid for the graph."""
    problem = Problem(graph)
    found = [problem.expand(problem.captured)]
    for sequence in sequences:
        if (nodes := sequence.on(problem)) is not None:
            schedule = problem.expand(nodes)
            with contextlib.suppress(ScheduleError):
                verify(graph, schedule, problem.evaluate(nodes).peak_bytes)
                found.append(schedule)
    return list(dict.fromkeys(found))


def _made(graph: ComputationGraph, time_limit: float) -> tuple[float, list[Schedule]]:
    """The schedules, and the time limit up to which they would be the same."""
    plain = plain_schedule(graph)
    own, measured = simulate(graph, plain).peak_bytes, outside_bytes(graph)
    curves = [plan_curve(needing(graph, max(measured, int(share * own))), POINTS, time_limit) for share in NEEDS]
    schedules = [solution.schedule for curve in curves for solution in curve.solutions]
    ended = all(curve.solve_seconds < ENDED * time_limit for curve in curves)
    found = dict.fromkeys([plain, *(schedule for schedule in schedules if schedule is not None)])
    steps: dict[Step, Step] = {}  # equal ones are one object: these schedules are kept
    shared = [Schedule(tuple(steps.setdefault(step, step) for step in one.steps), one.boundary) for one in found]
    return math.inf if ended else time_limit, shared
