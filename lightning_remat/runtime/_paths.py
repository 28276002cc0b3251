"""Plans for all the graphs of a call together: what one of them saves is held while the next ones run.

A call's *path* is the sequence of captured graphs that it runs. It is not known in advance, so that calls that begin
with the same graphs run the same plans for these.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from lightning_remat._recent import Recent
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.errors import InfeasibleBudgetError, ScheduleError
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside
from lightning_remat.planner._together import Part, with_outside
from lightning_remat.runtime._call import Call, Shapes
from lightning_remat.runtime._graph import Graph, Path
from lightning_remat.runtime._plans import Plans
from lightning_remat.runtime._reasons import Reasons

log = logging.getLogger(__name__)

MOST_PATHS = 8
"""Paths that are planned for the same shapes, at most: where Python branches on data there may be very many."""


class Paths:
    """The paths that calls have taken, and the plans that were made for each path as a whole.

    Args:
        plans: the plans of all graphs.
        call: the present call.
        reasons: has the step's name.
        asked_bytes: the budget that the user has given, in bytes; ``None`` where it is no size.

    Attributes:
        beside: the memory that was measured beside the graphs of a call, by its shapes and its whole path.
        planned_beside: by a plan's number, the measured memory beside its graph that it was made with.
    """

    def __init__(self, plans: Plans, call: Call, reasons: Reasons, asked_bytes: int | None) -> None:
        self.beside: Recent[tuple[Shapes, Path], tuple[Beside, ...]] = Recent()
        self.planned_beside: dict[int, Beside] = {}
        self._plans, self._call, self._reasons, self._asked = plans, call, reasons, asked_bytes
        # By the shapes of a call and the first graphs of its path, the number of the plan of the last of these graphs.
        self._numbers: dict[tuple[Shapes, Path], int] = {}
        self._shapes: dict[Path, Shapes] = {}  # of a call for which these first graphs of its path were planned last
        self._settled: Recent[tuple[Shapes, Path], None] = Recent()  # whole paths that need no other plans
        self._planned: Recent[Shapes, int] = Recent()  # how many paths were planned

    def number(self, graph: Graph) -> int | None:
        """Number of the plan for ``graph`` as the present call's next graph; ``None`` where this path has none.

        Sizes that vary outside of the graphs (of a detector's targets) change nothing about their plans.
        """
        path = (*self._call.path, graph)
        found = self._numbers.get((self._call.shapes, path))
        return self._at_other_sizes(path) if found is None else found

    def _at_other_sizes(self, path: Path) -> int | None:
        """Number of the plan for the last graph of a path, as it was planned for a call of other shapes."""
        if path not in self._shapes or any(graph.sized is not None for graph in path):
            return None
        return self._numbers.get((self._shapes[path], path))

    def numbers(self, shapes: Shapes, path: Path) -> list[int] | None:
        """The numbers of the plans of a path; ``None`` where it was not planned as a whole."""
        found = [self._numbers.get((shapes, path[: i + 1])) for i in range(len(path))]
        return None if None in found else [number for number in found if number is not None]

    def plan(self, shapes: Shapes, path: Path) -> None:
        """After a call, plan its graphs together if that is needed; the next such call runs these plans.

        Of many sets of shapes, those that come once are not.

        Raises:
            InfeasibleBudgetError: when the graphs do not fit together; the next such call raises it again.
        """
        if not self._in_parts() or (shapes, path) in self._settled or shapes in self._plans.plain:
            return
        if self.may_come_once(shapes, path):
            return
        if not self._takes_plans_of_other_sizes(shapes, path) and self._needs_one_plan(shapes, path):
            paths = self._planned.get(shapes) or 0
            if paths < MOST_PATHS:
                self.plan_anew(shapes, path)
                self._plans.in_parts[shapes] = None
            elif paths == MOST_PATHS:
                log.warning(
                    "%s is captured as more than %d different sequences of graphs: the others are not planned as a whole, "
                    "and may run over the budget",
                    self._reasons.name or "the step",
                    MOST_PATHS,
                )
            self._planned[shapes] = paths + 1
        self._settled[shapes, path] = None

    def may_come_once(self, shapes: Shapes, path: Path) -> bool:
        """Whether a path that was captured in the present call is one of many, and was not planned: it may not come again.

        Where the budget is in bytes, the largest so far are planned: later ones run by their schedules, and are within it.
        """
        if not (self._call.captured and self._plans.many(shapes)) or self.numbers(shapes, path) is not None:
            return False
        return not (self._plans.planning.budget_is_fixed and self._plans.larger_than_all(shapes))

    def _takes_plans_of_other_sizes(self, shapes: Shapes, path: Path) -> bool:
        """Have a path of graphs that were all planned for a call of other shapes run by the same plans, if it can."""
        firsts = [path[: i + 1] for i in range(len(path))]
        if (shapes, path) in self.beside or any((shapes, first) in self._numbers for first in firsts):
            return False
        numbers = [self._at_other_sizes(first) for first in firsts]
        if None in numbers or numbers != [number for _, number in self._call.ran]:
            return False
        self._numbers |= {
            (shapes, first): number for first, number in zip(firsts, numbers, strict=True) if number is not None
        }
        return True

    def plan_anew(self, shapes: Shapes, path: Path) -> None:
        """Plan a path again; a budget that was lowered to less than the whole path needs is raised to that.

        Raises:
            InfeasibleBudgetError: when there is no plan within the budget that the user has given.
        """
        try:
            self.plan_path(shapes, path)
        except InfeasibleBudgetError as error:
            if self._plans.limit is None or (self._asked is not None and error.smallest_bytes > self._asked):
                raise
            self.come_down(error.smallest_bytes)
            self.plan_path(shapes, path)

    def settle(self, shapes: Shapes, path: Path) -> None:
        """Keep the plans of a path as they are."""
        self._settled[shapes, path] = None

    def another_begins_alike(self, shapes: Shapes, path: Path) -> bool:
        """Whether another path is known that begins with the same graph."""
        return any(key != (shapes, path) and _begin_alike(key, shapes, path) for key in self._settled)

    def come_down(self, budget_bytes: int) -> None:
        """Lower the budget, and forget all paths: they are planned again within it, when they come."""
        self._plans.come_down(budget_bytes)
        self.forget()

    def forget(self) -> None:
        """Forget all paths: they are planned again, when they come."""
        self._numbers.clear()
        self._shapes.clear()
        self._settled.clear()
        self._planned.clear()

    def count(self, nbytes: int) -> None:
        """Count so many more bytes beside all graphs, and forget all paths."""
        self._plans.count(nbytes)
        self.forget()

    def leave(self, graphs: set[Graph]) -> None:
        """These graphs run in eager mode from now on: forget all paths, and what was measured of those through them."""
        self.forget()
        self.beside.keep(lambda key, _: graphs.isdisjoint(key[1]))

    def forget_path(self, shapes: Shapes, path: Path) -> Callable[[], None]:
        """Forget the plans of one path; returns a function that puts them back."""
        before = dict(self._numbers)
        for i in range(len(path)):
            self._numbers.pop((shapes, path[: i + 1]), None)
        self._settled.keep(lambda key, _: key != (shapes, path))

        def put_back() -> None:
            self._numbers = before

        return put_back

    def forget_through(self, graphs: set[Graph]) -> None:
        """Forget the paths through these graphs: they are planned again, when they come."""
        self._numbers = {key: number for key, number in self._numbers.items() if graphs.isdisjoint(key[1])}
        self._settled.keep(lambda key, _: graphs.isdisjoint(key[1]))

    def _in_parts(self) -> bool:
        """Whether the present call has several graphs, one that is over the budget, or measured memory beside it."""
        alone = any(plan.for_once for plan in self._plans.ran)
        return len(self._call.ran) > 1 or alone or (self._call.shapes, self._call.path) in self.beside

    def _needs_one_plan(self, shapes: Shapes, path: Path) -> bool:
        """Whether planning the graphs of a call together may give other plans than each got when it was captured."""
        if all((shapes, path[: i + 1]) in self._numbers for i in range(len(path))):
            return False
        if (shapes, path) in self.beside:
            return True
        budget = parse_budget(self._plans.planning.config.budget)
        of_each = budget.kind is BudgetKind.MIN or (budget.kind is BudgetKind.SHARE and budget.value != 1)
        shared = sum(len(graph.weights) for graph in path) > len({key for graph in path for key in graph.weights})
        return of_each or shared or any(plan.rematerializes or plan.for_once for plan in self._plans.ran)

    def plan_path(self, shapes: Shapes, path: Path) -> None:
        """Plan the graphs of a path together; if possible, the first ones keep the plans that other paths share."""
        known = [self._numbers.get((shapes, path[: i + 1])) for i in range(len(path))]
        fixed = [number for number in known[: known.index(None)] if number is not None]
        if len(path) > 1:
            name = self._reasons.name or "the step"
            log.info("%s is captured as %d graphs, and planned again together", name, len(path))
        captured = {graph: with_outside(graph.captured) for graph in path}
        beside = self.beside.get((shapes, path)) or (NOTHING_BESIDE,) * len(path)
        parts = [
            Part(captured[graph], graph.weights, graph.around, one) for graph, one in zip(path, beside, strict=True)
        ]
        together = functools.partial(self._plans.together, parts, memory=path[0].memory, sizes=self._plans.many(shapes))
        try:
            plans = together(fixed=fixed)
        except InfeasibleBudgetError:
            if not fixed:
                raise
            plans, fixed = together(fixed=[]), []
            # Other paths that begin alike were planned for plans of the first graphs that do not run any more.
            self._numbers = {
                key: number for key, number in self._numbers.items() if not _begin_alike(key, shapes, path)
            }
            self._settled.keep(lambda key, _: not _begin_alike(key, shapes, path))
        except ScheduleError as error:
            self._plans.planning.refused(
                parts[0].graph, str(error), "its graphs keep the plans that were made for each"
            )
            return
        for i in range(len(fixed), len(path)):
            number = self._plans.add(plans[i], path[i], parts[i].captured)
            self._numbers[shapes, path[: i + 1]], self._shapes[path[: i + 1]] = number, shapes
            self.planned_beside[number] = beside[i]


def _begin_alike(key: tuple[Shapes, Path], shapes: Shapes, path: Path) -> bool:
    return key[0] == shapes and key[1][0] is path[0]
