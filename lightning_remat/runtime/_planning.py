"""Making plans for the graphs of a step: costs, the memory beside them, the budget, and the process that plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch

from lightning_remat.allocator import Footprint
from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.capture import CapturedGraph
from lightning_remat.capture._measured_layouts import learn
from lightning_remat.cost import CostCache, OpCost, cost_model
from lightning_remat.errors import CaptureError, InfeasibleBudgetError, ScheduleError
from lightning_remat.graph import ComputationGraph, Host
from lightning_remat.planner._alike import Alike
from lightning_remat.planner._beside import NOTHING_BESIDE, Beside
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._curves import MOST_ALIKE, Curves
from lightning_remat.planner._device_memory import DeviceAllocator, DeviceMemory, allocated_bytes, workspace_bytes
from lightning_remat.planner._host import found_host, why_not, with_host
from lightning_remat.planner._make import (
    UNPLANNED,
    AtHand,
    Progress,
    keeping_least,
    make_plan,
    resolve_budget,
    unplanned,
)
from lightning_remat.planner._plan import FOR_NOW, FOR_ONCE, Plan, with_beside
from lightning_remat.planner._plan_cache import PlanCache, fingerprint
from lightning_remat.planner._surroundings import Surroundings, Weights, replay_bytes
from lightning_remat.planner._tiling import beside_untiled
from lightning_remat.planner._together import Part, kept_bytes, plan_together
from lightning_remat.planner._whole import with_whole
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.schedule import Schedule
from lightning_remat.solvers import Problem, Solution, moved

log = logging.getLogger(__name__)

Earlier = Sequence[tuple[Plan, Weights]]
"""The graphs that a call has run before one of its graphs: their plans, and the parameters that they give gradients."""

_Answer = TypeVar("_Answer")


class OtherLayouts(BaseException):
    """Measuring has found results of a traced graph that lie otherwise in memory: it is to be traced once more."""


class Planning:
    """Makes plans for graphs; `Plans` keeps them.

    Args:
        config: how to plan.
        reasons: told when the verifier refuses schedules.
        surroundings: asked when a graph is planned: what the device holds beside it.
        progress: called with a text about the work in progress.
        agreement: has each graph measured and planned in one of the processes that train the same model; ``None`` for
            one.
        reserved: whether the budget is one of bytes that a CUDA device's allocator reserves, not of allocated ones.
        at_hand: schedules that are known before anything is captured.

    Attributes:
        config: as it was given, or with the budget that it was lowered to.
        cache: the plans of earlier runs, on disk.
        allocator: the CUDA device's allocator, as the plans have it arranged.
    """

    def __init__(
        self,
        config: RematConfig,
        reasons: Reasons,
        *,
        surroundings: Callable[[], Surroundings],
        progress: Progress,
        agreement: Agreement | None,
        reserved: bool,
        at_hand: AtHand | None,
    ) -> None:
        self.config = config
        self.cache = PlanCache()
        self.allocator = DeviceAllocator(config.allocator)
        self.agreement, self.progress, self.surroundings = agreement, progress, surroundings
        self._reasons, self._reserved, self._at_hand = reasons, reserved, at_hand
        self._costs = CostCache()
        self._curves = Curves()
        self._alike = alike = Alike(MOST_ALIKE)  # what the graphs of calls run by that were planned together
        self._of_other_sizes = AtHand(lambda graph, most: moved(alike.of(graph), graph, most), suffices=True)
        self._hosts: dict[torch.device, Host | None] = {}
        self._stays: set[str] = set()  # why tensors stay on the device, as it was told
        # by device, allocated bytes that nothing known accounts for, and those that were named and are not there yet
        self._beside: dict[torch.device, tuple[int, int]] = {}

    @property
    def budget_is_fixed(self) -> bool:
        """Whether the budget is a number of bytes that does not depend on the step (a size, or ``"auto"``)."""
        return parse_budget(self.config.budget).kind in (BudgetKind.AUTO, BudgetKind.SIZE)

    @contextlib.contextmanager
    def smallest(self) -> Iterator[None]:
        """While open, the smallest plans are made."""
        given = self.config
        self.config = dataclasses.replace(given, budget=BudgetKind.MIN.value)
        try:
            yield
        finally:
            self.config = given

    def _holds(self, plan: Plan) -> bool:
        """Whether a plan that was made within another budget is one for the present budget too."""
        budget = parse_budget(self.config.budget)
        if budget.kind is not BudgetKind.SIZE or FOR_ONCE in plan.notes or plan.solver == UNPLANNED:
            return True
        return plan.predicted_peak_bytes <= int(budget.value or 0)

    def fits(self, captured: CapturedGraph, graph: ComputationGraph, held_bytes: int) -> tuple[bool, int | None]:
        """Whether a graph is within the budget as it is, and the budget in bytes: ``None`` for ``"min"``.

        Args:
            captured: the graph.
            graph: the same with the memory that is held beside it.
            held_bytes: what the process holds on the device already.
        """
        if parse_budget(self.config.budget).kind is BudgetKind.MIN:
            return False, None
        graph = graph.replace(resident_bytes=graph.resident_bytes - replay_bytes(captured))

        def found() -> tuple[bool, int]:
            problem = Problem(graph)
            peak_bytes = problem.evaluate(problem.captured).peak_bytes
            held = held_bytes + captured.batch_bytes
            budget_bytes = resolve_budget(
                self.config, graph.floor_bytes, peak_bytes, lambda: peak_bytes, captured.device, held
            )
            return peak_bytes <= budget_bytes, budget_bytes

        return self._agreed(
            lambda: f"fits {fingerprint(graph, self.config.budget)}", found, list, lambda pair: (pair[0], pair[1])
        )

    def share(self, floor_bytes: int, baseline_bytes: int) -> int:
        """The budget of a step in bytes, if it is a share; 0 for other budgets."""
        budget = parse_budget(self.config.budget)
        if budget.kind is not BudgetKind.SHARE:
            return 0
        return budget.resolve(floor_bytes, baseline_bytes, int, int)

    def on_device(
        self, captured: CapturedGraph, *, alone: bool, begins: bool
    ) -> tuple[Surroundings, DeviceMemory | None]:
        """What is held beside a graph, and on a CUDA device the device's memory.

        On CUDA everything else that is allocated counts too (workspaces of libraries, the user's own tensors).

        Args:
            captured: the graph.
            alone: whether no other graph of the call has run.
            begins: whether nothing has run at all.
        """
        around = self.surroundings()
        device = captured.device
        if device not in self._beside:
            seen = device.type == "cuda" and alone
            self._beside[device] = _found_beside(captured, around) if seen else (0, around.named_bytes)
        unnamed, not_yet = self._beside[device]
        around = dataclasses.replace(around, resident_bytes=around.resident_bytes + unnamed)
        return around, self.allocator.memory(device, later_bytes=around.later_bytes + not_yet, begins=begins)

    def measured(
        self, captured: CapturedGraph, *, traced: bool = False, one_of_many: bool = False
    ) -> tuple[CapturedGraph, float]:
        """The graph with the costs of its ops, and the seconds that it took to measure them.

        Args:
            captured: the graph.
            traced: whether it was just traced, and can be once more.
            one_of_many: whether it comes with many sizes, of which each is measured quickly.

        Raises:
            OtherLayouts: where results lie otherwise than it was traced with, and that was not known.
            CaptureError: where they do, and sizes are symbols.
        """
        started = time.monotonic()
        device = captured.device
        self.progress("measuring every operation")
        model = cost_model(
            self.config.cost_model,
            cache=self._costs,
            progress=functools.partial(self._measuring, started),
            quick=one_of_many,
        )
        costs = self._agreed(
            lambda: f"costs {fingerprint(captured.graph, *_calls(captured.graph))}",
            lambda: model(captured.calls, device),
            lambda found: [one.to_list() for one in found],
            lambda data: [OpCost.from_list(one) for one in data],
        )
        if traced and any(c.real_strides for c in costs):
            if captured.symbols:
                raise CaptureError(
                    "results lie otherwise in memory than torch says, which is known of given sizes only"
                )
            if learn(captured.calls, [c.real_strides for c in costs]):
                raise OtherLayouts
        captured = captured.with_costs(
            [c.seconds for c in costs], [c.workspace_bytes for c in costs], [c.real_bytes for c in costs]
        )
        captured = dataclasses.replace(captured, graph=captured.graph.replace(device=str(device)))
        return captured, time.monotonic() - started

    def _nearest(self, graph: ComputationGraph, budget_bytes: int) -> Solution | None:
        """By what a graph of the nearest sizes ran in a call that was planned as a whole.

        A share of the whole call is none of a part, so that what is over it will do too.
        """
        most = budget_bytes if self.budget_is_fixed else sys.maxsize
        found = moved(self._alike.of_nearest(graph), graph, most, changed=False)
        if found is None or found.peak_bytes <= budget_bytes:
            return found
        return dataclasses.replace(found, notes=(*found.notes, FOR_NOW))

    def offloading(
        self, graph: ComputationGraph, captured: CapturedGraph, *, whole: bool, sharded: bool
    ) -> ComputationGraph:
        """A graph with the host's memory, where its tensors may be copied there.

        Args:
            graph: with what is held beside it.
            captured: as it was captured.
            whole: whether it is the only graph of a call.
            sharded: whether parameters are shards.
        """
        if self.config.offload == "off":
            return graph
        reason = why_not(symbolic=bool(captured.symbols), whole=whole, sharded=sharded)
        if not reason:
            return with_host(graph, self._host(captured.device))
        if reason not in self._stays:
            self._stays.add(reason)
            log.info("%s keeps its tensors on the device: %s", self._reasons.name or "captured graph", reason)
        return graph

    def _host(self, device: torch.device) -> Host | None:
        """The host's memory for steps on a device: the same in all processes."""
        if device not in self._hosts:
            processes = self.agreement.processes if self.agreement is not None else 1
            self._hosts[device] = self._agreed(
                lambda: f"host {device.type} {self.config.host_budget}",
                lambda: found_host(device, self.config, self._costs, processes),
                lambda host: host.to_dict() if host is not None else None,
                lambda data: Host.from_dict(data) if data is not None else None,
            )
        return self._hosts[device]

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
        known: Sequence[Plan],
        earlier: Earlier,
        cost_seconds: float = 0.0,
        most_seconds: float = math.inf,
        whole: bool = True,
        room_bytes: int = 0,
        budget_bytes: int | None = None,
        below_seconds: float = math.inf,
        least: bool = False,
        moved: Literal["", "any", "nearest"] = "",
        unimproved: bool = False,
        improving: Plan | None = None,
        beside: Beside = NOTHING_BESIDE,
    ) -> tuple[ComputationGraph, Plan]:
        """A graph with the memory that is held beside it, and its plan.

        Args:
            captured: the graph, with costs.
            weights: bytes of the parameters that it gives gradients, by their ids.
            around: what is held beside it.
            memory: the CUDA device's memory; ``None`` on the CPU.
            known: existing plans: one for the same graph and surroundings is taken.
            earlier: the graphs that have run before it in the call.
            cost_seconds: seconds that measuring took.
            most_seconds: seconds that solving may take, if that is less than the time limit.
            whole: whether the graph is the whole function.
            room_bytes: bytes for copies in its first runs (`MovingBuffers`), needed where something is evaluated again.
            budget_bytes: the budget, where it is another than the configured one.
            below_seconds: a plan is of no use unless its step takes less.
            least: whether the plan is to keep as little as can be (see `keeping_least`), whatever the budget.
            moved: whether a schedule of a graph with the same ops at other sizes will do, if one fits: the cheapest that can be
                made of ``"any"``, or that of the ``"nearest"`` as it is, which leaves room for other graphs of the call.
            unimproved: see `make_plan`.
            improving: the plan that was made so before.
            beside: what was measured beside the graph; its `Beside.elsewhere` is not looked at.

        Raises:
            InfeasibleBudgetError: when no schedule was found for a graph that is the whole function and the call's
                first.
            BudgetError: for a size over what the device has.
        """
        config = dataclasses.replace(self.config, time_limit=min(self.config.time_limit, most_seconds))
        if budget_bytes is not None:
            config = dataclasses.replace(config, budget=budget_bytes)
        kept = sum(kept_bytes(plan) for plan, _ in earlier)
        graph = around.put_around(captured, weights, [(plan.graph, own) for plan, own in earlier], kept_bytes=kept)
        graph = beside.put_beside(graph.replace(resident_bytes=graph.resident_bytes + room_bytes))
        graph = self.offloading(graph, captured, whole=whole and not earlier, sharded=around.sharded)
        # Made here: where this kept its own method, nothing would free it as soon as its step is gone.
        nearest = AtHand(self._nearest, suffices=True, first=True)
        of_others = nearest if moved == "nearest" else self._of_other_sizes
        replayed = replay_bytes(captured) + room_bytes
        alike = (graph, graph.replace(resident_bytes=graph.resident_bytes - replayed))
        same = [plan for plan in known if plan.graph in alike and self._holds(plan)]
        if same:  # captured again for another reason than new shapes
            return graph, min(same, key=lambda plan: plan.predicted_seconds)
        record: dict[str, Any] = {
            "replay_bytes": replayed,
            "held_bytes": around.held_bytes + captured.batch_bytes,
            "cost_seconds": cost_seconds,
            "progress": self.progress,
            "cache": self.cache,
            "memory": memory,
            "reserved": self._reserved,
            "at_hand": of_others if moved and self._at_hand is None else self._at_hand,
            "below_seconds": below_seconds,
            "unimproved": unimproved,
            "least": None if improving is None else improving.solution(),
        }

        def make() -> Plan:
            try:
                if least:
                    known = ("held_bytes", "cost_seconds", "progress", "memory")
                    return keeping_least(graph, config, **{name: record[name] for name in known})
                return make_plan(graph, config, part=bool(earlier) or not whole, **record)
            except ScheduleError as error:
                return unplanned(graph, config, str(error), held_bytes=record["held_bytes"])

        plan = self._agreed(
            lambda: (
                f"plan {fingerprint(graph, config.budget, config.time_limit, below_seconds, least, moved, unimproved)}"
            ),
            make,
            Plan.to_dict,
            lambda data: Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])),
        )
        plan = beside_untiled(plan, captured)
        log.info("%s: %s", self._reasons.name or "captured graph", plan.summary())
        if plan.solver == UNPLANNED:
            self.refused(plan.graph, plan.notes[0], "it runs without rematerialization")
        return graph, plan

    def together(
        self, parts: Sequence[Part], fixed: Sequence[Schedule], memory: DeviceMemory | None, *, sizes: int
    ) -> list[Plan]:
        """Plans for the graphs of a call together; the first graphs keep the schedules in ``fixed``.

        ``sizes``: how many other sets of shapes the step comes with, where these are many: each is planned quickly.
        """
        alone = len(parts) == 1 and not fixed
        around = self.offloading(parts[0].graph, parts[0].captured, whole=alone, sharded=parts[0].around.sharded)
        if around.host is not None:
            parts = [dataclasses.replace(parts[0], host=around.host)]

        def make() -> list[Plan]:
            made = functools.partial(
                plan_together,
                parts,
                self.config,
                fixed=fixed,
                held_bytes=parts[0].around.held_bytes + parts[0].captured.batch_bytes,
                progress=self.progress,
                cache=self.cache,
                curves=self._curves,
                memory=memory,
                reserved=self._reserved,
            )
            if sizes:
                with contextlib.suppress(InfeasibleBudgetError):
                    return made(sizes=sizes)
            return made()

        facts = [self.config.budget, [schedule.to_dict() for schedule in fixed], bool(sizes)]

        def question() -> str:
            beside = ((dataclasses.astuple(part.around), dataclasses.astuple(part.beside)) for part in parts)
            return " ".join(
                ["plans", *(fingerprint(part.graph, facts, one) for part, one in zip(parts, beside, strict=True))]
            )

        plans = self._agreed(
            question,
            make,
            lambda plans: [plan.to_dict() for plan in plans],
            lambda found: [Plan.from_dict(data, ComputationGraph.from_dict(data["graph"])) for data in found],
        )
        for plan in plans:
            self._alike.add(plan.graph, [plan.schedule])
        return with_whole(plans)

    def again(self, graph: ComputationGraph, captured: CapturedGraph, memory: DeviceMemory | None) -> Plan:
        """Another plan for a graph (with what is held beside it), within the present budget; made in this process."""
        plan = make_plan(
            graph,
            self.config,
            replay_bytes=replay_bytes(captured),
            progress=self.progress,
            cache=self.cache,
            memory=memory,
            reserved=self._reserved,
        )
        return beside_untiled(plan, captured)

    def as_allocated(
        self, memory: DeviceMemory | None, graph: ComputationGraph, schedule: Schedule, budget_bytes: int
    ) -> tuple[bool, Footprint | None]:
        """Whether a schedule fits by the device allocator's model, and its footprint (``None`` without a model)."""
        if memory is None:
            return True, None
        limits = (budget_bytes, None) if self._reserved else (None, budget_bytes)
        footprint = memory.footprint(graph, schedule, *limits)
        return footprint.fits and (self._reserved or footprint.allocated_bytes <= budget_bytes), footprint

    def with_beside(self, plan: Plan, memory: DeviceMemory | None, nbytes: int, budget_bytes: int = 0) -> Plan:
        """The plan with ``nbytes`` more held all through the step, and a budget that is larger by ``budget_bytes``."""
        plan = with_beside(plan, nbytes, budget_bytes)
        _, footprint = self.as_allocated(memory, plan.graph, plan.schedule, plan.budget_bytes)
        return dataclasses.replace(plan, footprint=footprint)

    def refused(self, graph: ComputationGraph, reason: str, instead: str) -> None:
        """Report that the verifier refuses the schedules that were found for a graph, and what runs instead."""
        self._reasons.refused(graph, reason, instead, self.config.budget, self.cache)

    def _agreed(
        self,
        question: Callable[[], str],
        answer: Callable[[], _Answer],
        encode: Callable[[_Answer], Any],
        decode: Callable[[Any], _Answer],
    ) -> _Answer:
        """``answer()``, computed in one of the processes that train together, and sent to the others as plain data."""
        if self.agreement is None:
            return answer()
        return decode(self.agreement.once(question(), lambda: encode(answer())))


def _found_beside(captured: CapturedGraph, around: Surroundings) -> tuple[int, int]:
    """Bytes on a CUDA device that nothing known accounts for, and those of the named ones that are not there yet.

    What is allocated for anything but the graph's arguments and the libraries' workspaces is taken to be what was named.
    """
    device = captured.device
    known = max(around.held_bytes, captured.static_bytes) + captured.batch_bytes
    workspaces = workspace_bytes(device) if around.named_bytes else 0
    beside = max(0, allocated_bytes(device) - known)
    there = min(around.named_bytes, max(0, beside - workspaces))
    return beside - there, around.named_bytes - there


def _calls(graph: ComputationGraph) -> tuple[list[str], list[tuple[tuple[int, ...], str]]]:
    """What costs go by, beside a graph's structure and bytes: its ops, and the shapes and dtypes of its tensors."""
    return [op.target for op in graph.ops], [(tensor.shape, tensor.dtype) for tensor in graph.tensors]
