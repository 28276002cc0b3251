"""Fetches that begin before they are wanted, where the budget has room, so that ops do not wait for them.

A fetch begins as late as it can without the ops waiting for it, or, where there is no room that early, as soon as there is.
Then all begin earlier where there still is room, until none would be late even if copies took twice as long. Fetches keep
the order of their uses.
"""

from __future__ import annotations

import dataclasses
import math

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step, simulate
from lightning_remat.schedule._clocks import Clocks
from lightning_remat.solvers.offload._rewriting import host_of

SLOWER = (1.0, 2.0)
"""Times as long as expected that copies may take before ops wait for them, where there is room; the first matters most."""


@dataclasses.dataclass
class _Fetch:
    """One fetch.

    Attributes:
        tensor: what is fetched.
        in_forward: whether it is fetched in the forward.
        since: the first of the other steps before which it may begin.
        begin: the one before which it begins.
        wanted: the one before which the schedule counts its memory.
        use: the one before which it must have ended.
    """

    tensor: int
    in_forward: bool
    since: int
    begin: int
    wanted: int
    use: int


def fetching_early(graph: ComputationGraph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """A schedule whose fetches end as soon as they begin, with each fetch beside the ops before its use.

    Args:
        graph: with host memory.
        schedule: within the budget.
        budget_bytes: the most that may be held at any moment.
    """
    steps = _Steps(graph, schedule)
    for slower in SLOWER if steps.fetches else ():
        steps.begin_earlier(budget_bytes, slower)
    return steps.schedule()


class _Steps:
    """The steps of a schedule, and its fetches apart from them.

    Attributes:
        others: the steps that are no fetches, the first ``boundary`` of which run in the forward.
        fetches: in the order of their uses.
        before: seconds passed before each of the others, and after all, without waiting for fetches.
        held: bytes held while each of the others runs, if it is an op, and when a fetch before it begins; otherwise 0.
    """

    def __init__(self, graph: ComputationGraph, schedule: Schedule) -> None:
        self.graph, self.host = graph, host_of(graph)
        self.others: list[Step] = []
        self.held = [0]
        self.fetches: list[_Fetch] = []
        self.boundary = 0
        clocks = Clocks(graph)
        self.before = [0.0]
        gone: dict[int, int] = {}
        during = simulate(graph, schedule).during
        for at, step in enumerate(schedule.steps):
            here = len(self.others)
            if at == schedule.boundary:
                self.boundary = here
            if isinstance(step, Copy) and step.to_device:
                if not step.ended:
                    self.held[here] = max(self.held[here], int(during[at]))
                    in_forward = at < schedule.boundary
                    since = max(gone[step.tensor] + 1, 0 if in_forward else self.boundary)
                    self.fetches.append(_Fetch(step.tensor, in_forward, since, here, here, -1))
                continue
            if isinstance(step, Free):
                gone[step.tensor] = here
            elif isinstance(step, Compute) and step.over >= 0:
                storage = graph.tensors[step.over].storage
                gone.update(dict.fromkeys(graph.tensors_on[storage], here))
            self.others.append(step)
            if isinstance(step, Compute):
                self.held[here] = max(self.held[here], int(during[at]))
            self.held.append(0)
            clocks.pass_step(step)
            self.before.append(clocks.seconds)
        if schedule.boundary == len(schedule.steps):
            self.boundary = len(self.others)
        self._find_uses()

    def _find_uses(self) -> None:
        touched: dict[int, list[int]] = {one.tensor: [] for one in self.fetches}
        for at, step in enumerate(self.others):
            if isinstance(step, Free) and step.tensor in touched:
                touched[step.tensor].append(at)
            elif isinstance(step, Compute):
                op = self.graph.ops[step.op]
                for t in (*op.inputs, *op.outputs):
                    if t in touched:
                        touched[t].append(at)
        for one in self.fetches:
            end = self.boundary if one.in_forward else len(self.others)
            one.use = min([at for at in touched[one.tensor] if at >= one.wanted] + [end])
            one.use = min(one.use, end)
        self.fetches.sort(key=lambda one: (one.use, one.wanted))

    def begin_earlier(self, budget_bytes: int, slower: float) -> None:
        """Begin each fetch before its use by as much as it may take, as far as there is room."""
        latest, by = [0.0] * len(self.fetches), math.inf
        seconds = [self.host.seconds(self._bytes_of(one), to_device=True) for one in self.fetches]
        for k in range(len(self.fetches) - 1, -1, -1):
            latest[k] = by = min(self.before[self.fetches[k].use], by) - slower * seconds[k]
        after = 0
        for one, by in zip(self.fetches, latest, strict=True):
            nbytes, found = self._bytes_of(one), one.begin
            at = one.begin
            while at > max(one.since, after) and self.before[found] > by:
                at -= 1
                if self.held[at] + nbytes > budget_bytes:
                    break
                if isinstance(self.others[at], Compute):
                    found = at
            for at in range(found, one.begin):
                self.held[at] += nbytes if self.held[at] else 0
            one.begin = after = max(found, after)

    def _bytes_of(self, one: _Fetch) -> int:
        return self.graph.storages[self.graph.tensors[one.tensor].storage]

    def schedule(self) -> Schedule:
        """All steps, the fetches where they begin and end."""
        begins: list[list[Step]] = [[] for _ in range(len(self.others) + 1)]
        ends: list[list[Step]] = [[] for _ in range(len(self.others) + 1)]
        crossing: list[Step] = []
        for one in self.fetches:
            late = one.in_forward and one.begin == self.boundary
            (crossing if late else begins[one.begin]).append(Copy(one.tensor, to_device=True, ended=False))
            late = one.in_forward and one.use == self.boundary
            (crossing if late else ends[one.use]).append(Copy(one.tensor, to_device=True, ended=True))
        steps: list[Step] = []
        boundary = 0
        for at in range(len(self.others) + 1):
            if at == self.boundary:
                steps += crossing
                boundary = len(steps)
            steps += (*begins[at], *ends[at], *self.others[at : at + 1])
        return Schedule(tuple(steps), boundary)
