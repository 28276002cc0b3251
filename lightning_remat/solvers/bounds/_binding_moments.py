"""The method "moments", and the strongest bound for any order: what is held at the moments that bind.

The crossing between forward and backward (`_minimum_cut`) is one of the moments at which the budget binds. With long
skip connections it binds at others as well: where an op early in the backward has a large working set beside what is
kept for later. They differ from graph to graph, so likely ones are tried alone in the program of `_linear_program`, and
taken together where that raises the bound (`choose`). A few large values add up to a budget in few ways only. A linear
program does not see that, as it may hold shares of them: `branch` closes this part of the gap where the program is
small enough.

What such a program holds at the crossing leaves room for the moments that follow. Schedules are made from it for
several budgets, as "crossing" makes them for several amounts of bytes; those that still hold too much are lowered
(`lower_peak`).

Where a schedule is known already, and the bound is within `CLOSED_GAP` of it, no further moment is tried and no other
schedule made. From there to `OPEN_GAP` the time for it grows with the gap (`effort`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from lightning_remat.solvers.bounds._linear_program import MomentsProgram, is_chain, needed_at_the_boundary
from lightning_remat.solvers.bounds._minimum_cut import BACKWARD_AFTER_FORWARD, rollouts
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import finish, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._working_set import alone_bytes

GAIN = 5e-4
"""Share by which a moment must raise the bound to be taken."""

LEAST_GAP = 1e-4
"""Gap of a schedule that is known up to which not even the likeliest moment is tried."""

CLOSED_GAP = 1e-3
"""Gap to a known schedule at which the search ends: costs are not known more precisely than that."""

OPEN_GAP = 3e-3
"""Gap to a known schedule from which the search takes all of its time."""

MOST = 4
"""The most moments taken together, beside the crossing: with each, the program grows by another copy of the step."""

ATTEMPTS = 24
"""The most moments that are tried alone."""

BEFORE = 3
"""Of so many of the likeliest moments, the node before is tried too."""

LOWEST = 0.7
"""The smallest budget that the program is asked for, as a share of the budget, both less `base_bytes`."""


LARGE = 2500
"""Operations beyond which fewer schedules are made, since each takes longer: a third of them with three times as many."""

FEWEST = 3
"""Schedules that are made all the same."""


def likely(problem: PlainProblem, budget_bytes: int) -> list[int]:
    """Nodes at whose evaluation the budget may bind, the likeliest first.

    What the step without rematerialization holds there and the node's own working set, which no schedule avoids, are
    large: their sum is over the budget, and larger than at the nodes before and after. Where one of the likeliest
    (`BEFORE`) writes over what it reads, the node before it may bind instead, and follows it.
    """
    sequence = once(problem)
    early = needed_at_the_boundary(problem)
    sums = [
        held + alone_bytes(problem, node) - problem.base_bytes
        for held, node in zip(problem.memory(sequence), sequence.nodes, strict=True)
    ]
    found = [
        (-size, node)
        for before, size, after, node in zip([0, *sums], sums, [*sums[1:], 0], sequence.nodes, strict=False)
        if before < size >= after and size > budget_bytes and (node >= problem.boundary or node in early)
    ]
    nodes = [node for _, node in sorted(found)]
    earlier = dict(zip(sequence.nodes[1:], sequence.nodes, strict=False))
    for node in nodes[:BEFORE] if problem.overwrites else ():
        other = earlier.get(node, node)
        if problem.overwrites[node] and other not in nodes and (other >= problem.boundary or other in early):
            nodes.insert(nodes.index(node) + 1, other)
    return nodes


def solve_program(
    problem: PlainProblem,
    nodes: Sequence[int],
    budget_bytes: int,
    deadline: float,
    whole: bool = False,
    solver: str = "CBC",
) -> float:
    """`MomentsProgram.bound` in seconds for the moments of some nodes; 0 where nothing was proven."""
    with contextlib.closing(MomentsProgram(problem, nodes, solver)) as program:
        return program.bound(budget_bytes, deadline - clock(), whole) or 0.0


def is_near(seconds: float, least: float, gap: float = CLOSED_GAP) -> bool:
    """Whether a schedule that takes ``seconds`` a step is so near a lower bound that none can be cheaper by ``gap``."""
    return seconds <= (1 + gap) * least


def effort(gap: float) -> float:
    """Which share of the usual time a search is worth at a gap: none up to `CLOSED_GAP`, all from `OPEN_GAP` on."""
    return min(1.0, max(0.0, gap - CLOSED_GAP) / (OPEN_GAP - CLOSED_GAP))


def _gap(seconds: float, least: float) -> float:
    """The gap of a schedule that takes ``seconds`` a step to a lower bound, as a share of the bound."""
    return seconds / least - 1 if least > 0 else math.inf


def choose(
    problem: PlainProblem,
    budget_bytes: int,
    deadline: float,
    solver: str = "CBC",
    *,
    likeliest_deadline: float | None = None,
    known_seconds: float = math.inf,
    below_seconds: float = math.inf,
) -> tuple[list[list[int]], float]:
    """Choices of moments to take together, with one more each, and the best bound that they give.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop; two thirds of the time are for moments tried alone.
        solver: python-mip's name of the solver.
        likeliest_deadline: the same for the crossing, and for the likeliest moment alone; ``None`` for ``deadline``.
        known_seconds: seconds a step of a schedule within the budget that is known already.
        below_seconds: a bound of so many seconds is enough.

    Returns:
        Lists of nodes, the first one empty (the crossing alone), and a lower bound in seconds.
    """
    patient = deadline if likeliest_deadline is None else likeliest_deadline
    begun, usual = clock(), deadline
    best = crossing = solve_program(problem, (), budget_bytes, patient, solver=solver)
    chosen: list[list[int]] = [[]]
    alone: list[tuple[float, int]] = []
    for node in likely(problem, budget_bytes)[:ATTEMPTS]:
        proven = max([best, *(value for value, _ in alone)])
        if alone:
            deadline = begun + effort(_gap(known_seconds, proven)) * (usual - begun)
        if clock() > (deadline - (deadline - begun) / 3 if alone else patient):
            break
        if proven >= below_seconds or is_near(known_seconds, proven, CLOSED_GAP if alone else LEAST_GAP):
            break
        end = deadline if alone else patient
        alone.append((solve_program(problem, [node], budget_bytes, end, solver=solver), node))
    for value, node in sorted(alone, reverse=True):
        if value < (1 + GAIN) * crossing or len(chosen) > MOST or (chosen[-1] and clock() > deadline):
            break
        if best >= below_seconds or is_near(known_seconds, best):
            break
        together = sorted([*chosen[-1], node])
        if is_chain(problem, together):
            if chosen[-1]:
                value = solve_program(problem, together, budget_bytes, deadline, solver=solver)
            if value > (1 + GAIN) * best:
                best = value
                chosen.append(together)
    return chosen, max([best, *(value for value, _ in alone)])


def branch(
    problem: PlainProblem, chosen: Sequence[Sequence[int]], budget_bytes: int, deadline: float, solver: str = "CBC"
) -> float:
    """The largest bound, by branch and bound, of some choices of moments: fewer moments prove less, but sooner."""
    best = 0.0
    for index, nodes in enumerate(chosen):
        now = clock()
        if now < deadline:
            until = now + (deadline - now) / (len(chosen) - index)
            best = max(best, solve_program(problem, nodes, budget_bytes, until, True, solver))
    return best


def bound(problem: PlainProblem, budget_bytes: int, deadline: float, solver: str = "CBC") -> float:
    """A lower bound, in seconds, on schedules within a budget that run the backward after the forward; 0: none known.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop; up to half of the time is for the choice of moments.
        solver: python-mip's name of the solver.
    """
    chosen, best = choose(problem, budget_bytes, 0.5 * (clock() + deadline), solver)
    return max(best, branch(problem, chosen, budget_bytes, deadline, solver))


def schedules(
    problem: PlainProblem,
    nodes: Sequence[int],
    budget_bytes: int,
    amounts: int,
    most: int,
    deadline: float,
    solver: str = "CBC",
) -> list[NodeSequence]:
    """Schedules within a budget that keep what the program holds at the crossing for this budget and tighter ones.

    Args:
        problem: the problem.
        nodes: the program's moments.
        budget_bytes: the most that may be held at any moment.
        amounts: number of budgets, down to the share `LOWEST`.
        most: how many schedules are enough.
        deadline: `clock` at which to stop.
        solver: python-mip's name of the solver.
    """
    found: list[NodeSequence] = []
    seen: set[frozenset[int]] = set()
    with contextlib.closing(MomentsProgram(problem, nodes, solver)) as program:
        for step in range(amounts):
            share = 1 - (1 - LOWEST) * step / amounts
            budget = problem.base_bytes + share * (budget_bytes - problem.base_bytes)
            left = deadline - clock()
            if len(found) >= most or left < 0 or program.bound(budget, left) is None:
                break
            keep = program.held_at(program.crossing)
            for sequence in rollouts(problem, keep) if keep not in seen else ():
                lowered = lower_peak(problem, sequence, budget_bytes, deadline)
                if problem.evaluate(lowered).peak_bytes <= budget_bytes:
                    found.append(lowered)
            seen.add(keep)
    return found


@register("moments")
def moments(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    seconds: float = 2.0,
    branching_seconds: float = 3.0,
    making_seconds: float = 4.0,
    amounts: int = 12,
    attempts: int = 6,
    solver: str = "CBC",
    known: NodeSequence | None = None,
    below_seconds: float = math.inf,
) -> Answer:
    """Keep what a linear program holds at the crossing, given what is held at other moments that bind.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        seconds: how long moments are chosen; the likeliest may take longer alone. This, ``branching_seconds`` and
            ``making_seconds`` are for gaps from `OPEN_GAP` on; nearer to the bound they are less (`effort`).
        branching_seconds: how long a branch and bound may raise the bound at the end.
        making_seconds: how long schedules are made, where one is known already.
        amounts: for how many budgets, from the given one down, the program is asked.
        attempts: how many schedules `keep_longer` is run on, the cheapest of twice as many; of large problems, fewer (`LARGE`).
        solver: python-mip's name of the solver.
        known: a sequence within the budget, if there is one already: the answer is never dearer, and where the bound is near
            it, it is the answer.
        below_seconds: where the bound is no less, ``known`` is the answer too.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    known_seconds = math.inf if known is None else problem.evaluate(known).seconds
    chosen, least = choose(
        problem,
        budget_bytes,
        min(deadline, clock() + seconds),
        solver,
        likeliest_deadline=deadline,
        known_seconds=known_seconds,
        below_seconds=math.inf if known is None else below_seconds,
    )
    if known is not None and least >= below_seconds:
        return Answer(known, Status.FEASIBLE, least, BACKWARD_AFTER_FORWARD, notes=("nothing is cheap enough",))
    if is_near(known_seconds, least):
        return Answer(known, Status.FEASIBLE, least, BACKWARD_AFTER_FORWARD, notes=("what is known is near the bound",))
    attempts = max(min(attempts, FEWEST), min(attempts, attempts * LARGE // len(problem)))
    share = effort(_gap(known_seconds, least))
    until = deadline if known is None else min(deadline, clock() + share * making_seconds)
    found = schedules(problem, chosen[-1], budget_bytes, amounts, 2 * attempts, until, solver)
    best = finish(problem, found, budget_bytes, deadline, max(1, round(share * attempts)))
    best_seconds = math.inf if best is None else problem.evaluate(best).seconds
    if known_seconds <= best_seconds:
        best, best_seconds = known, known_seconds
    if not is_near(best_seconds, least):
        until = min(deadline, clock() + effort(_gap(best_seconds, least)) * branching_seconds)
        least = max(least, branch(problem, chosen, budget_bytes, until, solver))
    names = ", ".join(problem.name(node) for node in chosen[-1]) or "none"
    notes = (f"{len(found)} schedules fit; moments beside the crossing: {names}",)
    return Answer.of_search(best, deadline, least, BACKWARD_AFTER_FORWARD, notes=notes)
