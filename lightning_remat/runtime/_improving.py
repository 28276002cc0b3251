"""Swapping in cheaper plans between two steps, found by one search at a time in another process while training runs."""

from __future__ import annotations

import dataclasses
import logging

from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._plan_cache import fingerprint
from lightning_remat.planner._tiling import of_this_form
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._plans import Plans
from lightning_remat.runtime._search import Search
from lightning_remat.runtime._shared_search import TellingSearch, ToldSearch
from lightning_remat.solvers import Status

log = logging.getLogger(__name__)


class Improving:
    """The graphs whose plans a search may improve, and the search that runs.

    Args:
        plans: the plans of all graphs.
        name: name of the step, for the log.

    Attributes:
        search: the search that runs, and its graph; ``None`` where none runs.
        waiting: graphs that are searched for after it.
    """

    def __init__(self, plans: Plans, name: str) -> None:
        self._plans, self._name = plans, name
        self.search: tuple[Search | ToldSearch, Graph] | None = None
        self.waiting: list[Graph] = []

    def take(self) -> None:
        """Call between two steps: takes what the search has found for the next forward, or begins the next search."""
        if self.search is None:
            self._begin()
            return
        search, graph = self.search
        solution = search.better()
        plan = self._plans.all[graph.plan]
        fits, footprint = False, None
        if solution is not None and solution.schedule is not None and solution.seconds < plan.predicted_seconds:
            fits, footprint = self._plans.planning.as_allocated(
                graph.memory, plan.graph, solution.schedule, plan.budget_bytes
            )
        if fits and solution is not None and solution.schedule is not None:
            bound, scope = max((one.lower_bound_seconds, one.bound_scope) for one in (solution, plan))
            plan = dataclasses.replace(
                plan,
                schedule=solution.schedule,
                predicted_peak_bytes=solution.peak_bytes,
                predicted_seconds=solution.seconds,
                solver=solution.method,
                status=solution.status,
                lower_bound_seconds=bound,
                bound_scope=scope if plan.untiled is None else of_this_form(scope),
                solve_seconds=solution.solve_seconds,
                notes=(*solution.notes, "found while training ran on an earlier plan"),
                footprint=footprint,
            )
            graph.plan = self._plans.add(plan, graph)
            log.info("%s: a cheaper plan from now on: %s", self._name or "captured graph", plan.summary())
        if search.running:
            return
        self.search = None
        if search.completed:  # the next training run begins with the best plan, and does not search again
            file = self._plans.planning.cache.path(plan.graph, plan.budget_bytes, self._plans.planning.config)
            self._plans.planning.cache.store(file, plan.solution(), plan.budget_bytes)

    def _begin(self) -> None:
        """Begin a search for the next waiting graph, unless an earlier training run has done that."""
        config = self._plans.planning.config
        while self.waiting and self.search is None:
            graph = self.waiting.pop(0)
            plan = self._plans.all[graph.plan]
            known = self._plans.planning.cache.path(plan.graph, plan.budget_bytes, config).exists()
            smallest = parse_budget(config.budget).kind is BudgetKind.MIN
            if (
                plan.graph.host is None
                and plan.rematerializes
                and plan.status is not Status.OPTIMAL
                and not known
                and not smallest
            ):
                self.search = self._search(plan), graph

    def _search(self, plan: Plan) -> Search | ToldSearch:
        """A search for a plan's graph: in this process, or in that which trains with it and was the first to begin one."""
        planning = self._plans.planning
        agreement, config = planning.agreement, planning.config
        if agreement is None:
            return Search(plan, config)
        topic = f"better {fingerprint(plan.graph, plan.budget_bytes)}"
        if agreement.first(topic):
            return TellingSearch(plan, config, agreement, topic)
        return ToldSearch(plan, agreement, topic)

    def close(self) -> None:
        """End the search that runs, and forget the waiting graphs; the plans stay."""
        if self.search is not None:
            self.search[0].close()
        self.search = None
        self.waiting.clear()
