"""The plans of one step, and how each is made: costs, what lies around the graph, the device's memory, the budget."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lightning_remat.allocator import Footprint
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture import _torch as internals
from lightning_remat.cost import CostCache, OpCost, cost_model
from lightning_remat.errors import InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._device_memory import DeviceAllocator, DeviceMemory, allocated_bytes
from lightning_remat.planner._late import with_late_gradients
from lightning_remat.planner._make import UNPLANNED, AtHand, Progress, make_plan, unplanned
from lightning_remat.planner._plan import Plan, with_beside
from lightning_remat.planner._plan_cache import PlanCache, fingerprint
from lightning_remat.planner._surroundings import Surroundings, Weights, replay_bytes
from lightning_remat.planner._together import Part, kept_bytes, plan_together
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._call import Call, Shapes
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._moving import WATCHED_RUNS
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.runtime._recent import Recent
from lightning_remat.runtime._sized_plans import SizedPlan, SizedPlans
from lightning_remat.schedule import Schedule

log = logging.getLogger(__name__)

EAGER_EXTRA = 1.25
"""Eager may hold more than the captured step without rematerialization (float dropout masks, say): at most this much."""

SECONDS_A_SIZE = 3.0
"""Time limit of a plan for one of many sizes, where that is enough to find one."""

_Answer = TypeVar("_Answer")


class Plans:
    """All graphs of a step, their plans, and what makes these.

    Args:
        config: how to plan.
        reasons: told what is refused.
        call: the present one.
        surroundings: asked when a graph is planned: what the device holds beside it.
        on_plan: called with every new plan.
        progress: told in words what is being done.
        agreement: with the other processes that train the same model; measures and plans each graph in one of them.
        reserved: the budget is one of what a CUDA device's allocator reserves, not of what it has allocated.
        at_hand: schedules that are known before anything is captured.

    Attributes:
        all: the plans, in the order in which they were made.
        runs: how often each plan's forward has run.
        graphs: the captured ones.
        limit: a budget that was come down to, in bytes.
        plain: the sets of shapes at which the function itself runs, since it fits, with the largest plan of their call.
        seconds: spent on choosing among plans for many sizes; see `ScheduledStep.planning_seconds`.
    """

    def __init__(
        self,
        config: RematConfig,
        reasons: Reasons,
        call: Call,
        *,
        surroundings: Callable[[], Surroundings],
        on_plan: Callable[[Plan], None] | None,
        progress: Progress,
        agreement: Agreement | None,
        reserved: bool,
        at_hand: AtHand | None,
    ) -> None:
        self.config = config
        self.all: list[Plan] = []
        self.runs: list[int] = []
        self.graphs: list[Graph] = []
        self.limit: int | None = None
        self.plain: Recent[Shapes, int] = Recent()
        self.seconds = 0.0
        self.cache = PlanCache()
        self.agreement = agreement
        self.progress = progress
        self.surroundings = surroundings
        self.reserved = reserved
        self.allocator = DeviceAllocator(config.allocator)
        self._reasons, self._call = reasons, call
        self._on_plan, self._at_hand = on_plan, at_hand
        self._costs = CostCache()
        self._unnamed: dict[torch.device, int] = {}  # bytes that are allocated beside what is known, by device
        self._last: Plan | tuple[SizedPlans, SizedPlan] | None = None

    @property
    def last(self) -> Plan | None:
        """The plan that ran last, of several in one call the one with the largest peak; ``None`` before the first."""
        if isinstance(self._last, tuple):
            plans, sized = self._last
            return plans.plan(sized)
        return self._last

    @property
    def fixed(self) -> bool:
        """Whether the budget is so many bytes, not a share of something that depends on the step."""
        return parse_budget(self.config.budget).kind in (BudgetKind.AUTO, BudgetKind.SIZE)

    @property
    def ran(self) -> list[Plan]:
        """The plans that the present call has run so far."""
        return [self.all[number] for _, number in self._call.ran]

    @property
    def fits_as_it_is(self) -> bool:
        """Whether the last plan is one for symbolic sizes, and the plain step fits at these with room to spare."""
        return isinstance(self._last, tuple) and fits_as_it_is(self._last[1])

    # -- what has run -------------------------------------------------------------------------------------------------

    def runs_now(self, graph: Graph, number: int, plan: Plan | SizedPlan) -> None:
        """A graph's forward begins, as this plan has it."""
        self.runs[number] += 1
        last = self._last[1] if isinstance(self._last, tuple) else self._last
        if not self._call.ran or last is None or plan.predicted_peak_bytes >= last.predicted_peak_bytes:
            if not isinstance(plan, SizedPlan):
                self._last = plan
            elif graph.sized is not None:
                self._last = graph.sized, plan

    def let_go_of_copies(self) -> None:
        """Before a call: a plan whose first runs are over needs no room any more for what was copied to be watched."""
        for graph, number in self._call.ran:
            if self.runs[number] != WATCHED_RUNS or not (spare := graph.buffers.watched()):
                continue
            plan, before = self.all[number], graph.problem.resident_bytes
            graph.problem = graph.problem.replace(resident_bytes=before - spare)
            if plan.graph.resident_bytes == before:  # not where the plan evaluates nothing again, and copies nothing
                self.all[number] = self._with_beside(graph, plan, -spare)

    # -- making plans -------------------------------------------------------------------------------------------------

    def first(
        self, captured: CapturedGraph, weights: Weights, whole: bool, room_bytes: int
    ) -> tuple[CapturedGraph, ComputationGraph, Plan, Surroundings, DeviceMemory | None]:
        """The graph with costs, the same with what lies around it, its plan, what lies around it, and the device's memory."""
        captured, cost_seconds = self.measured(captured)
        captured = with_late_gradients(captured)
        around, memory = self._on_device(captured, self.surroundings())
        problem, plan = self.made(
            captured, weights, around, memory, cost_seconds=cost_seconds, whole=whole, room_bytes=room_bytes
        )
        self.allocator.arrange(plan.footprint, captured.device)
        return captured, problem, plan, around, memory

    def _on_device(self, captured: CapturedGraph, around: Surroundings) -> tuple[Surroundings, DeviceMemory | None]:
        """On a CUDA device: what else is allocated there counts too (workspaces of libraries, the user's own tensors)."""
        device = captured.device
        if device not in self._unnamed:
            known = max(around.held_bytes, captured.static_bytes) + captured.batch_bytes
            unnamed = allocated_bytes(device) - known if device.type == "cuda" and not self._call.ran else 0
            self._unnamed[device] = max(0, unnamed)
        around = dataclasses.replace(around, resident_bytes=around.resident_bytes + self._unnamed[device])
        begins = not (any(self.runs) or self.plain or self._call.ran)
        return around, self.allocator.memory(device, state_bytes=around.state_bytes, begins=begins)

    def measured(self, captured: CapturedGraph) -> tuple[CapturedGraph, float]:
        """The graph with costs, and the seconds that it took to find them."""
        started = time.monotonic()
        device = captured.device
        self.progress("measuring every operation")
        model = cost_model(
            self.config.cost_model,
            cache=self._costs,
            progress=functools.partial(self._measuring, started),
        )
        costs = self._agreed(
            lambda: f"costs {fingerprint(captured.graph)}",
            lambda: model(captured.calls, device),
            lambda found: [one.to_list() for one in found],
            lambda data: [OpCost.from_list(one) for one in data],
        )
        captured = captured.with_costs(
            [c.seconds for c in costs], [c.workspace_bytes for c in costs], [c.real_bytes for c in costs]
        )
        captured = dataclasses.replace(captured, graph=captured.graph.replace(device=str(device)))
        return captured, time.monotonic() - started

    def _measuring(self, started: float, done: int, total: int) -> None:
        left = (time.monotonic() - started) / done * (total - done)
        about = f", about {left:.0f} s left" if left >= 1 else ""
        self.progress(f"measuring operation {done} of {total}{about}")

    def made(
        self,
        captured: CapturedGraph,
        weights: Weights,
        around: Surroundings,
        memory: DeviceMemory | None,
        *,
        cost_seconds: float = 0.0,
        most_seconds: float = math.inf,
        whole: bool = True,
        room_bytes: int = 0,
    ) -> tuple[ComputationGraph, Plan]:
        """A graph with what lies around it, and its plan.

        ``room_bytes`` are for copies in its first runs (`MovingBuffers`), where something is evaluated again.
        """
        config = dataclasses.replace(self.config, time_limit=min(self.config.time_limit, most_seconds))
        earlier = [(self.all[number].graph, graph.weights) for graph, number in self._call.ran]
        kept = sum(kept_bytes(self.all[number]) for _, number in self._call.ran)
        graph = around.put_around(captured, weights, earlier, kept_bytes=kept)
        graph = graph.replace(resident_bytes=graph.resident_bytes + room_bytes)
        replayed = replay_bytes(captured) + room_bytes
        alike = (graph, graph.replace(resident_bytes=graph.resident_bytes - replayed))
        same = [known for known in self.all if known.graph in alike]
        if same:  # captured again for another reason than its shapes
            return graph, min(same, key=lambda known: known.predicted_seconds)
        record: dict[str, Any] = {
            "replay_bytes": replayed,
            "held_bytes": around.held_bytes + captured.batch_bytes,
            "cost_seconds": cost_seconds,
            "progress": self.progress,
            "cache": self.cache,
            "memory": memory,
            "reserved": self.reserved,
            "at_hand": self._at_hand,
        }

        def make() -> Plan:
            try:
                return make_plan(graph, config, part=bool(earlier) or not whole, **record)
            except ScheduleError as error:
                return unplanned(graph, config, str(error), held_bytes=record["held_bytes"])

        plan = self._agreed(
            lambda: f"plan {fingerprint(graph)}",
            make,
            Plan.to_dict,
            lambda data: Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])),
        )
        log.info("%s: %s", self._reasons.name or "captured graph", plan.summary())
        if plan.solver == UNPLANNED:
            self.refused(plan.graph, plan.notes[0], "it runs without rematerialization")
        return graph, plan

    def together(self, parts: Sequence[Part], fixed: Sequence[int], memory: DeviceMemory | None) -> list[Plan]:
        """Plans for the graphs of a call as one; the first of them keep their plans, of these numbers."""
        schedules = [self.all[number].schedule for number in fixed]

        def make() -> list[Plan]:
            return plan_together(
                parts,
                self.config,
                fixed=schedules,
                held_bytes=parts[0].around.held_bytes + parts[0].captured.batch_bytes,
                progress=self.progress,
                cache=self.cache,
                memory=memory,
                reserved=self.reserved,
            )

        facts = [schedule.to_dict() for schedule in schedules]
        return self._agreed(
            lambda: " ".join(["plans", *(fingerprint(part.graph, facts) for part in parts)]),
            make,
            lambda plans: [plan.to_dict() for plan in plans],
            lambda found: [Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])) for data in found],
        )

    def again(self, graph: Graph, *, part: bool = False) -> None:
        """A plan for a graph within the budget that was come down to, or with room for what is copied, if its own has not.

        A part of a call for which there is none keeps the one that it has.
        """
        plan = self.all[graph.plan]
        copies = 0 if self.agreement is not None else graph.buffers.unplanned_bytes
        limit = plan.budget_bytes if self.limit is None and (copies or graph.crowded) else self.limit
        if graph.sized is not None or graph.stays or limit is None or plan.predicted_peak_bytes + copies <= limit:
            return  # plans for symbolic sizes are chosen for each call
        graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + copies)
        graph.buffers.planned_bytes += copies
        try:
            made = make_plan(
                graph.problem,
                self.config,
                replay_bytes=replay_bytes(graph.captured),
                progress=self.progress,
                cache=self.cache,
                memory=graph.memory,
                reserved=self.reserved,
            )
        except InfeasibleBudgetError:
            if not part:
                raise
            graph.stays = True  # the whole may fit
            return
        except ScheduleError as error:
            graph.stays = True
            self.refused(graph.problem, str(error), "the plan at hand stays")
            return
        graph.plan = self.add(made, graph)
        log.info(
            "%s, %s: %s",
            self._reasons.name or "captured graph",
            "with copies" if copies or graph.crowded else "within less",
            made.summary(),
        )

    def refused(self, graph: ComputationGraph, reason: str, instead: str) -> None:
        """The verifier refuses what is found for a graph."""
        self._reasons.refused(graph, reason, instead, self.config.budget, self.cache)

    def number_of(self, plan: Plan) -> int:
        """A plan's number; one that is new is added, not yet ready to run."""
        index = next((i for i, known in enumerate(self.all) if known is plan), len(self.all))
        if index == len(self.all):
            self.all.append(plan)
            self.runs.append(0)
        return index

    def add(self, plan: Plan, graph: Graph, captured: CapturedGraph | None = None) -> int:
        """One more plan of a graph (as captured, by default), ready to run; returns its number."""
        captured = captured or graph.captured
        self.all.append(plan)
        self.runs.append(0)
        number = len(self.all) - 1
        graph.add(number, captured, plan.schedule)
        self.allocator.arrange(plan.footprint, captured.device)
        self.tell(plan)
        return number

    def tell(self, plan: Plan) -> None:
        """Hand a new plan on."""
        if self._on_plan is not None:
            self._on_plan(plan)

    def as_allocated(
        self, memory: DeviceMemory | None, graph: ComputationGraph, schedule: Schedule, budget_bytes: int
    ) -> tuple[bool, Footprint | None]:
        """Whether a schedule fits as the device's allocator sees it, and what that makes of it."""
        if memory is None:
            return True, None
        footprint = memory.footprint(graph, schedule, budget_bytes if self.reserved else None)
        return footprint.fits and (self.reserved or footprint.allocated_bytes <= budget_bytes), footprint

    def _with_beside(self, graph: Graph, plan: Plan, nbytes: int, budget_bytes: int = 0) -> Plan:
        plan = with_beside(plan, nbytes, budget_bytes)
        _, footprint = self.as_allocated(graph.memory, plan.graph, plan.schedule, plan.budget_bytes)
        return dataclasses.replace(plan, footprint=footprint)

    def _agreed(
        self,
        question: Callable[[], str],
        answer: Callable[[], _Answer],
        encode: Callable[[_Answer], Any],
        decode: Callable[[Any], _Answer],
    ) -> _Answer:
        """``answer()``, found in one of the processes that train together and handed to the others as plain data."""
        if self.agreement is None:
            return answer()
        return decode(self.agreement.once(question(), lambda: encode(answer())))

    # -- sizes that vary ----------------------------------------------------------------------------------------------

    def of_sizes(self, graph: Graph, captured: CapturedGraph, number: int) -> SizedPlans:
        """Plans for a graph with symbolic sizes; that of this number is the first."""
        replayed = replay_bytes(captured)

        def surround(captured: CapturedGraph, replays: bool) -> ComputationGraph:
            around = graph.around.put_around(captured, graph.weights)
            return around if replays else around.replace(resident_bytes=around.resident_bytes - replayed)

        def make(captured: CapturedGraph) -> tuple[int, Plan]:
            with internals.real_tensors():
                try:
                    plan = self.made(captured, graph.weights, graph.around, graph.memory, most_seconds=SECONDS_A_SIZE)[
                        1
                    ]
                except InfeasibleBudgetError:
                    plan = self.made(captured, graph.weights, graph.around, graph.memory)[1]
            return self.add(plan, graph), plan

        def measure(captured: CapturedGraph) -> CapturedGraph:
            with internals.real_tensors():
                return self.measured(captured)[0]

        return SizedPlans(
            captured,
            number,
            self.all[number],
            shared=self.fixed,
            share=self._share,
            measure=measure,
            surround=surround,
            make=make,
            allocated=functools.partial(self.as_allocated, graph.memory),
        )

    def of_these_sizes(self, graph: Graph, args: Sequence[Any]) -> tuple[int, SizedPlan]:
        """What of a graph with symbolic sizes runs now: a plan's number, and the plan at these sizes."""
        assert graph.sized is not None
        started = time.monotonic()
        sized = graph.sized.at(tuple(int(args[i]) for i in graph.arguments))
        self.seconds += time.monotonic() - started
        return sized.number, sized

    def _share(self, floor_bytes: int, baseline_bytes: int) -> int:
        """The budget of a step, where it is a share; 0 where it is not known before something is solved."""
        budget = parse_budget(self.config.budget)
        if budget.kind is not BudgetKind.SHARE:
            return 0
        return budget.resolve(floor_bytes, baseline_bytes, int, int)

    # -- another budget -----------------------------------------------------------------------------------------------

    def come_down(self, budget_bytes: int) -> None:
        """What is planned from now on is planned within so much."""
        self.limit = budget_bytes
        for graph in self.graphs:
            if graph.sized is not None:
                graph.sized.come_down(budget_bytes)
        self.config = dataclasses.replace(self.config, budget=budget_bytes)
        self.plain.keep(
            lambda shapes, number: (
                shapes != self._call.shapes and self.all[number].baseline_peak_bytes * EAGER_EXTRA <= budget_bytes
            )
        )

    def count(self, nbytes: int) -> None:
        """So much more is held beside all graphs; a budget that is a share, or ``"min"``, is the larger for it."""
        larger = nbytes if self.limit is None and not self.fixed else 0
        for graph in self.graphs:
            graph.around = dataclasses.replace(graph.around, resident_bytes=graph.around.resident_bytes + nbytes)
            graph.problem = graph.problem.replace(resident_bytes=graph.problem.resident_bytes + nbytes)
            graph.crowded = True
        owners = {number: graph for graph in self.graphs for number in graph.versions}
        for number, graph in owners.items():
            plan = self._with_beside(graph, self.all[number], nbytes, larger)
            if self._last is self.all[number]:
                self._last = plan
            self.all[number] = plan
        for graph in self.graphs:
            if graph.sized is not None:
                graph.sized.take({number: self.all[number] for number in graph.versions})


def fits_as_it_is(plan: Plan | SizedPlan) -> bool:
    """Whether the plain step fits the plan's budget with room to spare."""
    return plan.baseline_peak_bytes * EAGER_EXTRA <= plan.budget_bytes
