"""Copies to the host and back: schedules with some that are put in by hand, and what is copied while they run."""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_remat import _host_memory
from lightning_remat.cost import _transfers
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import _make
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step, simulate, verify
from lightning_remat.solvers import Solution, solve


@dataclasses.dataclass
class Copies:
    """What was copied: bytes, by the direction."""

    to_host: list[int] = dataclasses.field(default_factory=list)
    to_device: list[int] = dataclasses.field(default_factory=list)

    def count(self, monkeypatch: pytest.MonkeyPatch) -> Copies:
        """Count what is copied from now on."""
        own = _host_memory.Transfer.wait

        def wait(transfer: _host_memory.Transfer) -> torch.Tensor:
            target = own(transfer)
            (self.to_host if _host_memory.on_host(target.untyped_storage()) else self.to_device).append(target.nbytes)
            return target

        class Measured(_host_memory.Transfer):
            """One by which the speed of copies is measured, once on each machine: it is not counted."""

        Measured.wait = own  # type: ignore[method-assign]
        monkeypatch.setattr(_transfers, "Transfer", Measured)
        monkeypatch.setattr(_host_memory.Transfer, "wait", wait)
        return self


def planned_with_copies(
    monkeypatch: pytest.MonkeyPatch, fetches: Callable[[ComputationGraph, Schedule], Schedule] | None = None
) -> Copies:
    """Have schedules with copies planned; returns what they copy.

    Args:
        monkeypatch: puts all back.
        fetches: puts copies into a schedule for the budget; by default they are put into that without rematerialization,
            whatever the budget.
    """

    def solved(graph: ComputationGraph, within: int, *_: Any, **__: Any) -> Solution:
        solution = solve(graph, 2**60, "no_remat") if fetches is None else solve(graph, within, "auto", 0.5)
        assert solution.schedule is not None
        if graph.host is None:
            return solution
        schedule = (fetches or with_copies)(graph, solution.schedule)
        seconds = simulate(graph, schedule).seconds
        return dataclasses.replace(solution, schedule=schedule, peak_bytes=verify(graph, schedule), seconds=seconds)

    monkeypatch.setattr(_make, "solve", solved)
    monkeypatch.setattr(_make.PlanCache, "load", lambda *_: None)
    return Copies().count(monkeypatch)


def with_copies(graph: ComputationGraph, schedule: Schedule, share: float = 0.5, *, ahead: int = 3) -> Schedule:
    """The schedule, in which at least so large a share of the bytes that wait for the backward waits on the host.

    A tensor is sent as soon as it is made, given up (with its views) once the forward has read it for the last time, fetched
    ``ahead`` steps before it is read, and its views are made again.

    Args:
        graph: the problem.
        schedule: one in which nothing is evaluated again.
        share: of the bytes that may be copied.
        ahead: steps.
    """
    found = sorted(_waiting(graph, schedule).items(), key=lambda one: -graph.storages[one[0]])
    most, taken, chosen = sum(graph.storages[s] for s, _ in found), 0, dict[int, list[int]]()
    for storage, present in found:
        if taken < share * most:
            taken += graph.storages[storage]
            chosen[storage] = present
    before: dict[int, list[Step]] = {}
    gone: set[int] = set()  # free steps that are left out: nothing is there to be freed
    for storage, present in chosen.items():
        _move(graph, schedule, storage, present, ahead, before, gone)
    steps: list[Step] = []
    boundary = 0
    for index in range(len(schedule.steps) + 1):
        here = before.get(index, [])
        if index == schedule.boundary:
            early = [
                one for one in here if not (isinstance(one, Copy) and one.to_device) and not isinstance(one, Compute)
            ]
            steps += early
            boundary = len(steps)
            here = [one for one in here if one not in early]
        steps += here
        if index < len(schedule.steps) and index not in gone:
            steps.append(schedule.steps[index])
    return Schedule(tuple(steps), boundary)


def _waiting(graph: ComputationGraph, schedule: Schedule) -> dict[int, list[int]]:
    """Storages that may be copied, are made in the forward and read in the backward: what is present there in between."""
    present: set[int] = set()
    for step in schedule.steps[: schedule.boundary]:
        if isinstance(step, Compute):
            if step.over >= 0:
                present.difference_update(graph.tensors_on[graph.tensors[step.over].storage])
            present.update(graph.ops[step.op].outputs)
        elif isinstance(step, Free):
            present.discard(step.tensor)
    kept = {
        graph.tensors[t].storage for t in (*graph.forward_outputs, *graph.forward_transient, *graph.backward_outputs)
    }
    found: dict[int, list[int]] = {}
    for t in sorted(present):
        found.setdefault(graph.tensors[t].storage, []).append(t)
    return {s: ts for s, ts in found.items() if s not in kept and _base(graph, s) is not None and _views(graph, s, ts)}


def _base(graph: ComputationGraph, storage: int) -> int | None:
    return next((t for t in graph.tensors_on[storage] if graph.copyable[t]), None)


def _views(graph: ComputationGraph, storage: int, present: list[int]) -> list[int] | None:
    """The ops that make these of the base; ``None`` where something else is needed for them."""
    needed: list[int] = []
    waiting = [t for t in present if t != _base(graph, storage)]
    while waiting:
        op = graph.producer[waiting.pop()]
        if op in needed:
            continue
        if not graph.is_view[op] or any(graph.tensors[t].storage != storage for t in graph.ops[op].inputs):
            return None
        needed.append(op)
        waiting += [t for t in graph.ops[op].inputs if t != _base(graph, storage)]
    return sorted(needed) or [-1]


def _move(
    graph: ComputationGraph,
    schedule: Schedule,
    storage: int,
    present: list[int],
    ahead: int,
    before: dict[int, list[Step]],
    gone: set[int],
) -> None:
    base = _base(graph, storage)
    assert base is not None
    tensors = set(graph.tensors_on[storage])
    made = next(i for i, s in enumerate(schedule.steps) if isinstance(s, Compute) and base in graph.ops[s.op].outputs)
    reads = [
        i
        for i, s in enumerate(schedule.steps)
        if isinstance(s, Compute) and tensors.intersection(graph.ops[s.op].inputs)
    ]
    middle = bisect.bisect_left(reads, schedule.boundary)
    last, first = max([made, *reads[:middle]]), reads[middle]
    early = [i for i, s in enumerate(schedule.steps[: last + 1]) if isinstance(s, Free) and s.tensor in tensors]
    gone.update(early)
    before.setdefault(made + 1, []).append(Copy(base, False, False))
    steps = schedule.steps[: last + 1]
    freed = sorted({t for s in steps if isinstance(s, Compute) for t in graph.ops[s.op].outputs} & tensors)
    before.setdefault(last + 1, []).extend([Copy(base, False, True), *map(Free, freed)])
    gone.update(
        i
        for i, s in enumerate(schedule.steps[last + 1 : schedule.boundary], last + 1)
        if isinstance(s, Free) and s.tensor in tensors
    )
    before.setdefault(max(schedule.boundary, first - ahead), []).append(Copy(base, True, False))
    again: list[Step] = [Copy(base, True, True)]
    again += [Compute(op) for op in (_views(graph, storage, present) or []) if op >= 0]
    made_again = {t for step in again[1:] if isinstance(step, Compute) for t in graph.ops[step.op].outputs}
    again += [Free(t) for t in sorted({base, *made_again} - set(present))]
    before.setdefault(first, []).extend(again)


def with_fetches(graph: ComputationGraph, schedule: Schedule, seed: int) -> Schedule:
    """The schedule, in which some of what it computes again in the backward, chosen at random, is fetched instead."""
    chance = random.Random(seed)
    steps, boundary = list(schedule.steps), schedule.boundary
    again: dict[int, list[int]] = {}
    for index, step in enumerate(steps[boundary:], boundary):
        if isinstance(step, Compute) and step.over < 0 and len(graph.ops[step.op].outputs) == 1:
            again.setdefault(graph.ops[step.op].outputs[0], []).append(index)
    inserted: dict[int, list[Step]] = {}
    for t, places in again.items():
        made = [i for i, s in enumerate(steps[:boundary]) if isinstance(s, Compute) and t in graph.ops[s.op].outputs]
        if not made or not graph.copyable[t] or chance.random() < 0.3:
            continue
        together = set(graph.tensors_on[graph.tensors[t].storage])
        ends = next((i for i in range(made[0] + 1, boundary) if _touches(steps[i], together)), boundary)
        inserted.setdefault(made[0] + 1, []).append(Copy(t, False, False))
        inserted.setdefault(ends, []).append(Copy(t, False, True))
        for place in places:
            begins = next(i for i in range(place, boundary - 1, -1) if i == boundary or chance.random() < 0.3)
            gone = next((i for i in range(place - 1, begins - 1, -1) if _touches(steps[i], together)), begins - 1)
            inserted.setdefault(max(begins, gone + 1), []).append(Copy(t, True, False))
            steps[place] = Copy(t, True, True)
    found: list[Step] = []
    at = boundary
    for index in range(len(steps) + 1):
        here = inserted.get(index, [])
        if index == boundary:
            early = [one for one in here if isinstance(one, Copy) and not one.to_device]
            found += early
            at = len(found)
            here = [one for one in here if one not in early]
        found += here + steps[index : index + 1]
    return Schedule(tuple(found), at)


def _touches(step: Step, tensors: set[int]) -> bool:
    return (isinstance(step, Free) and step.tensor in tensors) or (isinstance(step, Compute) and step.over in tensors)
