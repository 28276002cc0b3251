"""From a schedule of the rewritten problem to one of the plain graph, with copies beside the ops, and its time."""

from __future__ import annotations

import dataclasses

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Copy, Schedule
from lightning_remat.schedule._clocks import Clocks
from lightning_remat.solvers.offload._fetching import fetching_early
from lightning_remat.solvers.offload._rewriting import Rewritten
from lightning_remat.solvers.offload._sending import sending


@dataclasses.dataclass(frozen=True)
class Placed:
    """A schedule of the plain graph, with its seconds a step and the tensors that it fetches."""

    schedule: Schedule
    seconds: float
    fetched: frozenset[int]


def place(rewritten: Rewritten, schedule: Schedule, budget_bytes: int) -> Placed | None:
    """The faster of two ways to place the copies of a schedule of ``rewritten.graph``.

    Returns:
        ``None`` where the host has too little memory for what would lie there.
    """
    graph = rewritten.plain
    waiting = sending(rewritten, schedule, budget_bytes)
    fetched = frozenset(step.tensor for step in waiting.steps if isinstance(step, Copy))
    host = graph.host
    if host is None or sum(graph.storages[graph.tensors[t].storage] for t in fetched) > host.bytes:
        return None
    ways = [waiting, fetching_early(graph, waiting, budget_bytes)] if fetched else [waiting]
    return min([Placed(one, _seconds(graph, one), fetched) for one in ways], key=lambda one: one.seconds)


def _seconds(graph: ComputationGraph, schedule: Schedule) -> float:
    """As `simulate` has it, without the memory."""
    clocks = Clocks(graph)
    for step in schedule.steps:
        clocks.pass_step(step)
    return clocks.seconds
