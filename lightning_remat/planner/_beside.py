"""What a step really holds beside its captured graphs: measured in one step, and planned for from then on.

Between the graphs of a step, and before, after and around one that is all there is, runs what was not captured: a loss outside
of the module that is scheduled, indexing by the batch, what Dynamo has left alone. Its tensors and workspaces are on the device
while the graphs run, and no plan knows of them before they have been there once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_remat.graph import ComputationGraph
from lightning_remat.measure import PeakMemory, track_peak
from lightning_remat.planner._plan import Plan
from lightning_remat.schedule import Compute, simulate

OUTSIDE = "outside"
"""Name of the op that stands for what is needed while a graph waits for its backward."""

MOST_UPDATES = 8
"""Of other networks, while the backward of a measured step is waited for: it is measured no longer."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """What was measured of a graph, beyond what is known of it, in bytes.

    Attributes:
        forward_bytes: while its forward runs; negative where less is held than was thought.
        backward_bytes: likewise.
        outside_bytes: allocated at once by all that is no captured graph, between its forward and its backward.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    outside_bytes: int = 0

    def put_beside(self, graph: ComputationGraph) -> ComputationGraph:
        """The graph with this beside it; what is needed while it waits is that of its op `OUTSIDE`, where it has one."""
        resident = max(0, graph.resident_bytes + self.backward_bytes)
        forward = graph.resident_bytes + graph.forward_resident_bytes + self.forward_bytes
        return needing(graph, self.outside_bytes).replace(
            resident_bytes=resident, forward_resident_bytes=max(0, forward - resident)
        )

    def within(self, graph: ComputationGraph) -> Beside:
        """As much of it as a graph can have: no less than nothing is resident, and in the forward no less than later."""
        found = self.put_beside(graph)
        resident = found.resident_bytes - graph.resident_bytes
        forward_resident = found.forward_resident_bytes - graph.forward_resident_bytes
        return Beside(resident + forward_resident, resident, self.outside_bytes)


NOTHING_BESIDE = Beside()


@dataclasses.dataclass(frozen=True)
class Held:
    """The most that was held while a graph ran, and while something else did meanwhile, in bytes; ``None``: nothing did."""

    forward_bytes: int | None = None
    backward_bytes: int | None = None
    outside_bytes: int | None = None


class MeasuredStep:
    """One step that is measured: begins when this is made, and ends with `end`, or when an optimizer begins to update.

    On the CPU it must not end within the backward: autograd would switch the profiler on again. What measures next ends it too.

    Args:
        device: where it runs; one that `possible` allows.
    """

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether a step of this thread can be measured there.

        On the CPU only those of the main thread: a thread that ends while its profiler runs takes the process down with it,
        and a step that has no backward is nowhere known to be over.
        """
        return device.type == "cuda" or threading.current_thread() is threading.main_thread()

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._updates = 0
        self._open = contextlib.ExitStack()
        self._peak: PeakMemory = self._open.enter_context(track_peak(device, give_way=self.give_way))
        self._labels: list[tuple[int, str]] = [(-1, "")]
        self._over = self._cut_short = False
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def begins(self, position: int, phase: str) -> None:
        """The forward or backward of the graph at this position of the step begins."""
        if not self._over:
            self._peak.mark()
            self._labels.append((position, phase))

    def ends(self, position: int, phase: str) -> None:
        """It is done; with the backward of the first graph, nothing comes that counts."""
        if self._over:
            return
        self._peak.mark()
        self._labels.append((position if phase == "forward" else position - 1, OUTSIDE))
        self._over = phase == "backward" and position == 0

    def end(self) -> None:
        """The step is over, or will not come to its end."""
        self._stop()
        self._hook.remove()

    def _stop(self) -> None:
        self._open.close()
        self._over = True

    def give_way(self) -> None:
        """Something else is to be measured: the step counts as unmeasured, unless it was over."""
        self._cut_short = self._cut_short or not self._over
        self._stop()

    def _before_update(self, *_: object) -> None:
        if self._thread != threading.get_ident():
            return
        self._updates += 1
        if self._over:  # if not, what updates meanwhile is another network
            self._stop()  # the hook itself cannot be taken out while hooks are called
        elif self._updates == MOST_UPDATES:  # or no backward comes
            self.give_way()

    def held(self, graphs: int, at_start_bytes: int, kept_free_bytes: int = 0) -> list[Held] | None:
        """What was found, for each of so many graphs; ``None`` where it could not be measured, or not to its end.

        Args:
            graphs: how many there are.
            at_start_bytes: what is held when the step begins. The device's own number is taken where it has one.
            kept_free_bytes: counted as held.
        """
        if self._cut_short or not self._peak.stretches:
            return None
        if self._peak.allocated_bytes is not None and self._peak.peak_bytes is not None:
            at_start_bytes = self._peak.allocated_bytes - self._peak.peak_bytes
        found: dict[tuple[int, str], int] = {}
        for label, stretch in zip(self._labels, self._peak.stretches, strict=True):
            found[label] = max(found.get(label, 0), at_start_bytes + kept_free_bytes + stretch.peak_bytes)
        return [Held(*(found.get((i, phase)) for phase in ("forward", "backward", OUTSIDE))) for i in range(graphs)]


def needing(graph: ComputationGraph, nbytes: int) -> ComputationGraph:
    """A graph with so many bytes needed by others while it waits for its backward, if it has an op `OUTSIDE`."""
    ops = [dataclasses.replace(op, workspace_bytes=nbytes) if op.name == OUTSIDE else op for op in graph.ops]
    return graph.replace(ops=tuple(ops))


def floor_bytes(graph: ComputationGraph) -> int:
    """What no schedule can do without, for what is needed while the graph waits too."""
    outside = max((op.workspace_bytes for op in graph.ops if op.name == OUTSIDE), default=0)
    storages = {graph.tensors[t].storage for t in graph.forward_outputs}
    storages -= {graph.tensors[t].storage for t in graph.inputs}
    waiting = graph.input_bytes + graph.resident_bytes + graph.forward_resident_bytes + outside
    return max(graph.floor_bytes, waiting + sum(graph.storages[s] for s in storages) if outside else 0)


def peak_beside(plan: Plan, known: Beside, found: Beside) -> int:
    """The peak of a plan for which ``known`` was put beside its graph, with what was found in its place."""
    needed = max((op.workspace_bytes for op in plan.graph.ops if op.name == OUTSIDE), default=0)
    more = Beside(
        found.forward_bytes - known.forward_bytes,
        found.backward_bytes - known.backward_bytes,
        max(found.outside_bytes, needed),
    )
    timeline = simulate(more.put_beside(plan.graph), plan.schedule)
    at = timeline.after[plan.schedule.boundary - 1] if plan.schedule.boundary else plan.graph.input_bytes
    return max(timeline.peak_bytes, int(at) + found.outside_bytes)


def measured_beside(plan: Plan, known: Beside, held: Held) -> Beside:
    """What is beside a graph, by what was held while it ran by a plan for which ``known`` was put beside it."""
    graph, schedule, timeline = plan.graph, plan.schedule, plan.timeline()
    most: dict[bool, int] = {}  # in the forward, and in the backward: where nothing of it runs, nothing is beside it
    waiting = int(timeline.after[schedule.boundary - 1]) if schedule.boundary else graph.input_bytes
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and graph.ops[step.op].name == OUTSIDE:
            waiting = int(timeline.during[index]) - graph.ops[step.op].workspace_bytes
        elif isinstance(step, Compute):
            forward = index < schedule.boundary
            most[forward] = max(most.get(forward, 0), int(timeline.during[index]))
    more = Beside(
        held.forward_bytes - most[True] if held.forward_bytes is not None and True in most else 0,
        held.backward_bytes - most[False] if held.backward_bytes is not None and False in most else 0,
    )
    more = more.within(graph)
    return Beside(
        known.forward_bytes + more.forward_bytes,
        known.backward_bytes + more.backward_bytes,
        max(0, (held.outside_bytes or 0) - waiting - more.forward_bytes),
    )
