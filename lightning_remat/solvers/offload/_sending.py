"""From a schedule of the rewritten problem to one of the plain graph: when copies to the host begin and end.

A copy begins right after the op that makes the tensor, if the tensor is fetched at all. Where the schedule gives the tensor
up before the copy has ended, it stays until then, or, where there is no room for it, the ops wait. Fetches are put where the
schedule "computes" the tensor again; `_fetching` has them begin earlier.
"""

from __future__ import annotations

from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step, simulate
from lightning_remat.solvers.offload._rewriting import Rewritten, host_of


def sending(rewritten: Rewritten, schedule: Schedule, budget_bytes: int) -> Schedule:
    """The schedule of the plain graph that one of the rewritten graph stands for.

    Args:
        rewritten: the problem.
        schedule: of ``rewritten.graph``, within the budget.
        budget_bytes: the most that may be held at any moment.
    """
    run = _Run(rewritten, schedule, budget_bytes)
    run.all()
    copied = [
        [step for step in steps if not isinstance(step, Copy) or step.tensor in run.fetched] for steps in run.sides
    ]
    return Schedule((*copied[0], *copied[1]), len(copied[0]))


class _Run:
    """One pass over a schedule.

    Attributes:
        sides: the steps so far, of the forward and of the backward.
        clock: seconds passed for the ops, what they wait for included, but for fetches.
        stream: when all copies to the host that have begun will have ended.
        ends: by tensor whose copy to the host has begun, when it will have ended.
        on_host: tensors whose copy was waited for.
        present: those of the tensors that may be fetched which lie on the device.
        saved: those of them that have been there since the forward, and that ops may overwrite.
        views: by tensor that may be fetched, views of it that are present.
        pending: those that are given up as soon as their copies have ended.
        fetched: tensors that were fetched.
    """

    def __init__(self, rewritten: Rewritten, schedule: Schedule, budget_bytes: int) -> None:
        self.model, self.graph, self.budget = schedule, rewritten.plain, budget_bytes
        self.host, self.op, self.fetches = host_of(rewritten.plain), rewritten.op, rewritten.fetches
        self.held = simulate(rewritten.graph, schedule).during
        self.on_storage = {self.graph.tensors[t].storage: t for t in rewritten.fetches if t >= 0}
        self.makes: dict[int, list[int]] = {}
        for t in self.on_storage.values():
            self.makes.setdefault(self.graph.producer[t], []).append(t)
        self.wanted: dict[int, int] = {}  # by tensor, where the schedule asks for it for the last time, but for those:
        self.kept: set[tuple[int, int]] = set()  # where an op runs, and what it makes that is asked for right after
        self._look_ahead()
        self.sides: tuple[list[Step], list[Step]] = ([], [])
        self.steps = self.sides[0]
        self.clock = self.stream = 0.0
        self.ends: dict[int, float] = {}
        self.on_host: set[int] = set()
        self.present: set[int] = set()
        self.saved: set[int] = set()
        self.views: dict[int, set[int]] = {}
        self.pending: list[int] = []
        self.fetched: set[int] = set()

    def _look_ahead(self) -> None:
        ran, fresh = -1, set[int]()
        for at, step in enumerate(self.model.steps):
            if at == self.model.boundary:
                fresh = set()
            if not isinstance(step, Compute):
                continue
            t = self.fetches[step.op]
            if t in fresh:
                self.kept.add((ran, t))
                fresh.discard(t)
            else:
                ran, fresh = at, set(self.makes.get(self.op[step.op], ()))
                if t >= 0:
                    self.wanted[t] = at

    def bytes_of(self, tensor: int) -> int:
        return self.graph.storages[self.graph.tensors[tensor].storage]

    def all(self) -> None:
        for at, step in enumerate(self.model.steps):
            if at == self.model.boundary:
                self._cross()
            if isinstance(step, Free):
                if step.tensor in self.present:
                    self._give_up(step.tensor, at)
                elif step.tensor < len(self.graph.tensors):
                    self.steps.append(step)
                    for views in self.views.values():
                        views.discard(step.tensor)
            elif isinstance(step, Compute) and self.fetches[step.op] >= 0:
                self._ask_for(self.fetches[step.op], at)
            elif isinstance(step, Compute):
                self._compute(Compute(self.op[step.op], step.over), at)
        if self.model.boundary == len(self.model.steps):
            self._cross()

    def _compute(self, step: Compute, at: int) -> None:
        self._make_room(at)
        gone: set[int] = set()  # views that would be overwritten too
        if step.over >= 0 and (t := self.on_storage.get(self.graph.tensors[step.over].storage, -1)) in self.present:
            if at < self.wanted.get(t, -1) and t not in self.on_host:
                self.pending.append(t)
                self._make_room(at, t)  # for a result with memory of its own
            if t in self.pending:
                step, gone = Compute(step.op), self.views.pop(t, set())
            else:
                self._leave(t)
        self.steps += (step, *map(Free, sorted(gone)))
        for one in self.graph.ops[step.op].outputs:
            t = self.on_storage.get(self.graph.tensors[one].storage, one)
            if t != one:
                self.views.setdefault(t, set()).add(one)
        self.clock += self.graph.ops[step.op].seconds
        for t in self.makes.get(step.op, ()):
            if t not in self.ends and at < self.wanted.get(t, -1):
                self._begin(t)
            if t not in self.present:
                self.present.add(t)
                if (at, t) not in self.kept:
                    self._give_up(t, at)

    def _make_room(self, at: int, overwritten: int = -1) -> None:
        """Give up what is pending and has been copied; wait for more where there is no room for it beside a step."""
        for t in [t for t in self.pending if self.ends[t] <= self.clock]:
            self._part(t, overwritten=t == overwritten)
        while self.pending and self.held[at] + sum(map(self.bytes_of, self.pending)) > self.budget:
            t = min(self.pending, key=self.ends.__getitem__)
            self._part(t, overwritten=t == overwritten)

    def _begin(self, t: int) -> None:
        self.steps.append(Copy(t, to_device=False, ended=False))
        self.stream = max(self.clock, self.stream) + self.host.seconds(self.bytes_of(t), to_device=False)
        self.ends[t] = self.stream

    def _wait(self, t: int) -> None:
        if t not in self.on_host:
            self.clock = max(self.clock, self.ends[t])
            self.steps.append(Copy(t, to_device=False, ended=True))
            self.on_host.add(t)

    def _part(self, t: int, *, overwritten: bool = False) -> None:
        """Give up one that is pending, at the end of its copy."""
        self.pending.remove(t)
        self._wait(t)
        if not overwritten:
            self.steps.append(Free(t))
            self._leave(t)

    def _leave(self, t: int) -> None:
        self.present.discard(t)
        self.views.pop(t, None)
        self.saved.discard(t)

    def _give_up(self, t: int, at: int) -> None:
        if at < self.wanted.get(t, -1):
            self.pending.append(t)
            if t in self.on_host or self.ends[t] <= self.clock:
                self._part(t)
        else:
            self.steps.append(Free(t))
            self._leave(t)

    def _ask_for(self, t: int, at: int) -> None:
        if (
            t in self.pending and t in self.saved
        ):  # an op of the backward may be to overwrite it, and it is the forward's
            self._part(t)
        if t in self.pending:
            self.pending.remove(t)
        elif t not in self.present:
            self._make_room(at)
            self.steps += (Copy(t, to_device=True, ended=False), Copy(t, to_device=True, ended=True))
            self.fetched.add(t)
            self.present.add(t)

    def _cross(self) -> None:
        """Copies that began in the forward end there; those of tensors that stay may begin in the backward instead."""
        for t in self.pending.copy():
            self._part(t)
        late = [t for t, end in self.ends.items() if t not in self.on_host and end > self.clock]
        for t in [t for t in self.ends if t not in self.on_host and t not in late]:
            self._wait(t)
        for t in late:
            self.steps.remove(Copy(t, to_device=False, ended=False))
        self.stream, self.steps = self.clock, self.sides[1]
        written = {self.graph.tensors[t].storage for op in self.graph.ops for t in op.overwritable}
        self.saved = {t for t in self.present if self.graph.tensors[t].storage in written}
        for t in late:
            self._begin(t)
