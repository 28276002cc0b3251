"""The independent check of a schedule: it shares no code with the solvers, nor with the simulator.

The rules:

1. an op runs only when all of its inputs are present; tangents exist in the backward only;
2. a tensor is freed only while it is present, and never one that the caller holds (an input);
3. an op that is not recomputable runs at most once;
4. random ops draw in the captured order: each is first evaluated after all random ops before it (later evaluations replay);
5. an op that mutates a tensor runs exactly once, in the captured order among those that mutate;
6. once a storage has been mutated, no op that read it before the mutation in the captured order runs again;
7. when the forward ends, all of its outputs are present and every random or mutating op of the forward has run;
8. when the step ends, all gradients are present and every random or mutating op has run;
9. an op overwrites only what it declares, that the caller does not hold and that was made on this side of the boundary;
   every tensor there is gone afterwards;
10. at no moment is more memory held than the budget, nor more on the host than it has for the step;
11. what is copied to the host is present, not there already, and `ComputationGraph.copyable`; until the copy has ended it is
    neither freed nor overwritten;
12. what is fetched lies on the host and is not present; it is read when the fetch has ended, and not computed before;
13. a copy ends once, and on the side of the boundary on which it began.
"""

from __future__ import annotations

from lightning_remat.errors import ScheduleError
from lightning_remat.graph import ComputationGraph, Phase, TensorRole
from lightning_remat.schedule._copy_rules import CopyRules
from lightning_remat.schedule._schedule import Compute, Copy, Schedule


def verify(graph: ComputationGraph, schedule: Schedule, budget_bytes: int | None = None) -> int:
    """Check that ``schedule`` computes ``graph`` correctly and within ``budget_bytes``.

    Args:
        graph: the problem.
        schedule: the answer.
        budget_bytes: the most that may be held at any moment; ``None`` for no limit.

    Returns:
        The peak in bytes, as found here.

    Raises:
        ScheduleError: for the first rule that is broken; the message names the step and the op.
    """
    names = [tensor.name for tensor in graph.tensors]
    owned = {t for t in graph.inputs if graph.tensors[t].role is not TensorRole.TANGENT}
    tangents = set(graph.inputs) - owned
    # Which copy of which storage a present tensor lies on. Copies are told apart by the step that made them.
    where: dict[int, tuple[int, int]] = {t: (graph.tensors[t].storage, -1) for t in owned}
    lying_on: dict[tuple[int, int], set[int]] = {}  # the other way round
    for t, copy in where.items():
        lying_on.setdefault(copy, set()).add(t)
    kept_by_caller: set[tuple[int, int]] = set(lying_on)
    runs = [0] * len(graph.ops)
    draws = [i for i, op in enumerate(graph.ops) if op.random]
    mutators = [i for i, op in enumerate(graph.ops) if op.mutates]
    mutated: dict[int, int] = {}
    outside = graph.resident_bytes + graph.forward_resident_bytes
    copied = CopyRules(graph)
    peak = 0

    def held(extra: set[tuple[int, int]]) -> int:
        copies = set(where.values()) | set(copied.fetching.values()) | kept_by_caller | extra
        return outside + sum(graph.storages[storage] for storage, _ in copies)

    def put(t: int, copy: tuple[int, int]) -> None:
        where[t] = copy
        lying_on.setdefault(copy, set()).add(t)

    def take_away(t: int) -> None:
        copy = where.pop(t)
        lying_on[copy].discard(t)
        if not lying_on[copy]:
            del lying_on[copy]

    def account(number: int, label: str, amount: int) -> None:
        nonlocal peak
        peak = max(peak, amount)
        if budget_bytes is not None and amount > budget_bytes:
            raise ScheduleError(
                f"step {number} ({label}): {amount:,} bytes are held, {amount - budget_bytes:,} over the budget of "
                f"{budget_bytes:,}"
            )

    def end_forward(number: int) -> None:
        nonlocal outside
        copied.ended("the forward ends")
        outside -= graph.forward_resident_bytes
        for t in (*graph.forward_outputs, *graph.forward_transient):
            if t not in where:
                raise ScheduleError(f"step {number}: forward output {names[t]} is not present when the forward ends")
        for i in (*draws, *mutators):
            if graph.ops[i].phase is not Phase.BACKWARD and not runs[i]:
                raise ScheduleError(f"step {number}: {graph.ops[i].name} has not run when the forward ends")
        kept_by_caller.update(where[t] for t in graph.forward_outputs)
        for t in tangents:
            put(t, (graph.tensors[t].storage, -2))

    current = held(set())
    account(0, "start", current)
    for number, step in enumerate(schedule.steps):
        if number == schedule.boundary:
            end_forward(number)
            current = held(set())
        if isinstance(step, Copy):
            if not step.ended:
                copied.begin(number, step, where)
                if step.to_device:
                    current += copied.bytes_of([step.tensor])
                    account(number, f"the fetch of {names[step.tensor]}", current)
            elif (place := copied.end(number, step)) is not None:
                put(step.tensor, place)
            continue
        if not isinstance(step, Compute):
            if step.tensor in owned:
                raise ScheduleError(f"step {number} frees {names[step.tensor]}, which the caller holds")
            if step.tensor not in where:
                raise ScheduleError(f"step {number} frees {names[step.tensor]}, which is not present")
            copy = where[step.tensor]
            if copied.sending:
                copied.not_taken(number, step.tensor)
            take_away(step.tensor)
            if copy not in kept_by_caller and copy not in lying_on:
                current -= graph.storages[copy[0]]
            continue
        op = graph.ops[step.op]
        for t in (*op.inputs, *op.outputs) if copied.fetching else ():
            copied.not_read(number, op.name, t)
        for t in op.inputs:
            if t not in where:
                raise ScheduleError(f"step {number}: {op.name} reads {names[t]}, which is not present")
        if runs[step.op] and not op.recomputable:
            raise ScheduleError(f"step {number}: {op.name} may not run a second time")
        if op.random and not runs[step.op]:
            for earlier in draws:
                if earlier == step.op:
                    break
                if not runs[earlier]:
                    raise ScheduleError(f"step {number}: {op.name} draws before {graph.ops[earlier].name}")
        for t in op.inputs:
            changed_by = mutated.get(graph.tensors[t].storage)
            if changed_by is not None and step.op < changed_by:
                raise ScheduleError(
                    f"step {number}: {op.name} reads {names[t]} after {graph.ops[changed_by].name} overwrote it"
                )
        if op.mutates:
            if runs[step.op]:
                raise ScheduleError(f"step {number}: {op.name} mutates its input a second time")
            waiting = [i for i in mutators if i < step.op and not runs[i]]
            if waiting:
                raise ScheduleError(f"step {number}: {op.name} mutates before {graph.ops[waiting[0]].name}")
            mutated.update({graph.tensors[t].storage: step.op for t in op.mutates})
        runs[step.op] += 1
        copies = {graph.tensors[t].storage: where[t] for t in op.inputs}
        fresh: set[tuple[int, int]] = set()
        for t in op.outputs:
            storage = graph.tensors[t].storage
            if storage not in copies:
                copies[storage] = (storage, number)
                fresh.add(copies[storage])
        made = sum(graph.storages[storage] for storage, _ in fresh)
        if step.over >= 0:
            if step.over not in op.overwritable:
                raise ScheduleError(f"step {number}: {op.name} may not overwrite {names[step.over]}")
            copy = where[step.over]
            if copy in kept_by_caller or copy[1] < (schedule.boundary if number >= schedule.boundary else 0):
                raise ScheduleError(
                    f"step {number}: {op.name} overwrites {names[step.over]}, which the caller holds or the forward saved"
                )
            copied.not_taken(number, step.over, copy)
            for t in list(lying_on[copy]):
                take_away(t)
            current -= graph.storages[copy[0]]
        account(number, op.name, current + made + op.workspace_bytes)
        for t in op.outputs:
            if t not in where:
                put(t, copies[graph.tensors[t].storage])
        current += sum(graph.storages[copy[0]] for copy in fresh if copy in lying_on)
    if schedule.boundary == len(schedule.steps):
        end_forward(len(schedule.steps))
    copied.ended("the step ends")
    for t in graph.backward_outputs:
        if t not in where:
            raise ScheduleError(f"gradient {names[t]} is not present when the step ends")
    for i in (*draws, *mutators):
        if not runs[i]:
            raise ScheduleError(f"{graph.ops[i].name} never runs")
    if current != held(set()):
        raise AssertionError("the verifier's running total disagrees with what is present")  # a defect of its own
    return peak
