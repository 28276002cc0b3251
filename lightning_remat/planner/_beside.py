"""The memory that a step holds beside its captured graphs: measured in one step, and planned for from then on.

Code that is not captured runs before, between and after the graphs of a step: a loss outside of the scheduled module,
indexing by the batch, functions that Dynamo skips. Its tensors and workspaces are on the device while the graphs run,
and cannot be planned for before they were measured once.
"""

from __future__ import annotations

import dataclasses
import math

from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._plan import Plan
from lightning_remat.schedule import OUTSIDE, Compute, simulate


@dataclasses.dataclass(frozen=True)
class Beside:
    """The memory beside one graph, as measured, beyond what its plan counted, in bytes.

    Attributes:
        forward_bytes: while its forward runs; negative where less was held than was planned for.
        backward_bytes: while its backward runs, likewise.
        outside_bytes: the most that uncaptured code allocates at once between its forward and its backward.
        elsewhere_bytes: the most that is held before the forward of a step's first graph and after its backward, beyond
            what is resident beside that all through the step; of other graphs, and where it is not known, 0.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    outside_bytes: int = 0
    elsewhere_bytes: int = 0

    def put_beside(self, graph: ComputationGraph) -> ComputationGraph:
        """The graph with this memory counted as resident; ``outside_bytes`` is the workspace of its op `OUTSIDE`."""
        resident = max(0, graph.resident_bytes + self.backward_bytes)
        forward = graph.resident_bytes + graph.forward_resident_bytes + self.forward_bytes
        return needing(graph, self.outside_bytes).replace(
            resident_bytes=resident, forward_resident_bytes=max(0, forward - resident)
        )

    def within(self, graph: ComputationGraph) -> Beside:
        """The same, limited to what a graph can have: 0 or more resident bytes, no fewer in the forward than later."""
        found = self.put_beside(graph)
        resident = found.resident_bytes - graph.resident_bytes
        forward_resident = found.forward_resident_bytes - graph.forward_resident_bytes
        return dataclasses.replace(self, forward_bytes=resident + forward_resident, backward_bytes=resident)

    def at_least(self, measured: Beside, by: float) -> Beside:
        """The same, and no less than ``by`` times what was ``measured``; where less was held than planned for, 0."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(measured), strict=True)
        return Beside(*(max(nbytes, math.ceil(by * other)) for nbytes, other in pairs))

    def elsewhere(self, graph: ComputationGraph) -> int:
        """The most that is held while none of a step's graphs runs, in bytes, given the first one without this memory."""
        return graph.resident_bytes + self.elsewhere_bytes


NOTHING_BESIDE = Beside()


@dataclasses.dataclass(frozen=True)
class Held:
    """The most that was held while a graph's forward and backward ran, and other code between them, in bytes.

    ``None`` where nothing of the kind ran. Of a step's first graph also what was held ``elsewhere``: before and after.
    """

    forward_bytes: int | None = None
    backward_bytes: int | None = None
    outside_bytes: int | None = None
    elsewhere_bytes: int | None = None


def needing(graph: ComputationGraph, nbytes: int) -> ComputationGraph:
    """A graph where others need ``nbytes`` between its forward and its backward, if it has an op `OUTSIDE`."""
    ops = [dataclasses.replace(op, workspace_bytes=nbytes) if op.name == OUTSIDE else op for op in graph.ops]
    return graph.replace(ops=tuple(ops))


def floor_bytes(graph: ComputationGraph) -> int:
    """Bytes that no schedule can do without, what others need between forward and backward included."""
    outside = max((op.workspace_bytes for op in graph.ops if op.name == OUTSIDE), default=0)
    storages = {graph.tensors[t].storage for t in graph.forward_outputs}
    storages -= {graph.tensors[t].storage for t in graph.inputs}
    waiting = graph.input_bytes + graph.resident_bytes + graph.forward_resident_bytes + outside
    return max(graph.floor_bytes, waiting + sum(graph.storages[s] for s in storages) if outside else 0)


def peak_beside(plan: Plan, known: Beside, found: Beside) -> int:
    """The peak of a plan that was made with ``known`` beside its graph, if ``found`` is there instead; in bytes.

    What other graphs of the step need between its forward and its backward is not counted: their plans have peaks of
    their own, and with what was found beside them these may be others than were planned for.
    """
    more = Beside(
        found.forward_bytes - known.forward_bytes,
        found.backward_bytes - known.backward_bytes,
        found.outside_bytes,
    )
    elsewhere = plan.graph.resident_bytes - known.backward_bytes + found.elsewhere_bytes
    timeline = simulate(more.put_beside(plan.graph), plan.schedule)
    at = timeline.after[plan.schedule.boundary - 1] if plan.schedule.boundary else plan.graph.input_bytes
    return max(timeline.peak_bytes, int(at) + found.outside_bytes, elsewhere)


def measured_beside(plan: Plan, known: Beside, held: Held) -> Beside:
    """What is beside a graph, from what was ``held`` while it ran by a plan that was made with ``known`` beside it."""
    graph, schedule, timeline = plan.graph, plan.schedule, plan.timeline()
    most: dict[bool, int] = {}  # by whether it is the forward, the planned peak; missing where no op runs
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
        max(0, (held.elsewhere_bytes or 0) - (graph.resident_bytes - known.backward_bytes)),
    )
