"""Shorter sequences for the same work: unread evaluations are dropped, and repeated ones that the budget can avoid.

Solvers that plan on a coarser problem, or without looking at the budget, repeat more than they must. Both passes here
only take evaluations out, so the order of what remains is the solver's. Neither is optimal: `keep_longer` is greedy,
and drops the evaluation first that saves the most seconds for what it takes of the budget. That is priced in one of
several ways (`CHARGES`): the same bytes cost little where memory is free, and much at the few moments where the budget
is tight. Which way is best differs from graph to graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import Charge, Lives
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem


def drop_unused(problem: PlainProblem, sequence: NodeSequence) -> NodeSequence:
    """The sequence without the evaluations whose outputs nobody reads before they are computed again.

    First evaluations of random nodes, and those of nodes that may run only once, stay: they may have effects.
    """
    nodes, boundary, once_only = sequence.nodes, sequence.boundary, problem.once_only
    reads, writes = problem.reads, problem.writes
    first: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if once_only[node]:
            first.setdefault(node, position)
    needed = bytearray(len(problem.nbytes))
    for v in problem.finals:
        needed[v] = 1
    outputs = frozenset(problem.forward_outputs)
    kept: list[int] = []
    after = 0  # kept behind the boundary
    for position in range(len(nodes) - 1, -1, -1):
        if position == boundary - 1:
            after = len(kept)
            for v in (*problem.forward_outputs, *problem.forward_transient):
                needed[v] = 1
        node = nodes[position]
        keep = once_only[node] and first[node] == position
        if not keep:
            for v in writes[node]:
                if needed[v] and (position < boundary or v not in outputs):
                    keep = True
                    break
        if keep:
            kept.append(node)
            for v in writes[node]:
                needed[v] = 0
            for v in reads[node]:
                needed[v] = 1
    if boundary == 0:
        after = len(kept)
    return NodeSequence(tuple(reversed(kept)), len(kept) - after)


def once(problem: PlainProblem) -> NodeSequence:
    """No rematerialization: the captured order without the nodes that nothing depends on."""
    return drop_unused(problem, problem.captured)


def required(problem: PlainProblem) -> list[int]:
    """Nodes that every schedule evaluates, in captured order: a result of the step, or an effect, depends on each."""
    return list(once(problem).nodes)


def resting_bytes(problem: PlainProblem) -> int:
    """Bytes held whatever the schedule while no node runs: at the start, and as a backward of views alone begins."""
    if any(problem.is_backward):
        return problem.at_start_bytes
    kept = {*problem.forward_outputs, *problem.finals} if required(problem) else problem.tangents
    return max(problem.at_start_bytes, problem.base_bytes + sum([problem.nbytes[v] for v in kept]))


def _tight_moments(extra: int, held: npt.NDArray[np.int64], budget_bytes: int) -> float:
    return extra * float(((held / budget_bytes) ** 8).sum())


CHARGES: dict[str, Charge | None] = {
    "bytes": None,
    "slack": lambda extra, held, budget_bytes: extra / max(1, budget_bytes - int(held.max())),
    "root_slack": lambda extra, held, budget_bytes: extra / math.sqrt(max(1, budget_bytes - int(held.max()))),
    "tight_moments": _tight_moments,
}
"""Ways to price bytes held longer: the bytes; the bytes over those that are free at the tightest moment, or over their
root; the bytes times the sum, over the moments, of the eighth power of the share of the budget that is held."""


def keep_longer(
    problem: PlainProblem,
    sequence: NodeSequence,
    budget_bytes: int,
    deadline: float,
    charge: str = "bytes",
    bias: Callable[[float], float] | None = None,
) -> NodeSequence:
    """The sequence without the repeated evaluations that the budget has room to avoid, by holding values longer.

    Args:
        problem: the problem.
        sequence: a sequence within the budget.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop; the sequence is valid and within the budget at any moment.
        charge: which of `CHARGES` prices what holding an evaluation's results takes of the budget.
        bias: a factor for the price of an evaluation, by its key (`Lives`), such as a random one; the order is then by
            the prices at the start.
    """
    lives = Lives(problem, sequence)
    lives.fill(budget_bytes, deadline, CHARGES[charge], bias)
    return drop_unused(problem, lives.sequence())


def finish(
    problem: PlainProblem, sequences: Sequence[NodeSequence], budget_bytes: int, deadline: float, most: int = 6
) -> NodeSequence | None:
    """The cheapest of sequences within a budget after `keep_longer` on the ``most`` cheapest; ``None`` without any."""
    distinct = {sequence.nodes: sequence for sequence in sequences}
    ranked = sorted(distinct.values(), key=lambda sequence: problem.evaluate(sequence).seconds)
    filled = ranked[:1]
    for sequence in ranked[:most]:
        if clock() < deadline:
            filled.append(keep_longer(problem, sequence, budget_bytes, deadline))
    return min(filled, key=lambda sequence: problem.evaluate(sequence).seconds, default=None)
