"""Copies to the host and back, put into a schedule by hand."""

from __future__ import annotations

import bisect

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step


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
