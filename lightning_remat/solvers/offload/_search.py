"""Which tensors wait on the host: what a linear program says, and trials around that, by simulated seconds.

`OffloadProgram` is solved for several budgets, and as if copies took longer than they do. Each answer is a set of tensors, and
what is held at the crossing. A trial makes schedules of the problem that is rewritten for that set: from what is held, and
from the schedule without copies, in which what may be fetched is fetched. Their copies are placed, and the simulated seconds
decide. From the best trials on, tensors that ops wait for longest are left out one by one, for as long as that is better;
then the schedules are improved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import Copy, Schedule
from lightning_remat.schedule._clocks import Clocks
from lightning_remat.solvers.bounds._minimum_cut import rollouts
from lightning_remat.solvers.common._clock import clock, count
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import keep_longer
from lightning_remat.solvers.common._registry import run_algorithm
from lightning_remat.solvers.heuristics._large_neighbourhood_search import improve
from lightning_remat.solvers.offload._beginnings import Numbers, fetched_instead, gains
from lightning_remat.solvers.offload._placing import Placed, place
from lightning_remat.solvers.offload._program import OffloadProgram, copyable_values
from lightning_remat.solvers.offload._rewriting import Rewritten, host_of, rewrite
from lightning_remat.solvers.portfolio._smallest_peak import find_smallest_sequence

PRICE = 0.05
"""Seconds that fetching counts in the rewritten problem, as a share of those of the copy."""

PACES = (1.0, 1.4, 2.0, 3.5)
"""Times as long as expected that copies are said to take, when the program chooses."""

BUDGETS = (1.0, 0.95, 0.9, 0.8)
"""Shares of the budget, less what is held all through the step, that the program is asked for."""

REFINED = 2
"""How many of the trials are refined, beside the one without copies."""

CHOOSING, REFINING = 0.25, 0.5
"""Shares of the time after which no more sets are chosen, and those that were are refined."""

ALL_SETS = 6
"""Tensors of which all sets are tried."""

LOWERING = 0.03
"""Share of the time that is left for lowering the peak of one schedule that a trial begins at."""

A_NODE = 1e-4
"""Seconds of counted work that one evaluation of a trial's schedule stands for."""

SMALL = 40
"""Nodes up to which "auto" is run on the rewritten problem of each trial."""

TURN = 0.1
"""Share of the time that is left for one such run."""

AT_ONCE = 8
"""How many tensors are added together, as long as that is better; half as many each time that it is not."""

ENOUGH = 1e-4
"""Share of the step's time by which a round of improving must shorten it for another."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What some tensors on the host lead to.

    Attributes:
        tensors: those that may be fetched.
        keep: values of the plain problem that are held at the crossing.
        rewritten: the problem for these.
        problem: of ``rewritten.graph``.
        sequence: of ``problem``, within the budget.
        placed: the plain graph's schedule that is made of it.
    """

    tensors: frozenset[int]
    keep: frozenset[int]
    rewritten: Rewritten
    problem: Problem
    sequence: NodeSequence
    placed: Placed


class Search:
    """Trials for one graph and budget.

    Args:
        graph: with host memory.
        problem: its problem.
        budget_bytes: the most that may be held at any moment.
        plain: a sequence within the budget without copies, if there is one.
        moments: nodes at which the budget binds (see `OffloadProgram`).
    """

    def __init__(
        self,
        graph: ComputationGraph,
        problem: Problem,
        budget_bytes: int,
        plain: NodeSequence | None,
        moments: Sequence[int] = (),
    ) -> None:
        self.moments = moments
        self.graph, self.problem, self.budget, self.plain = graph, problem, budget_bytes, plain
        self.tensor_of = copyable_values(graph, problem)
        self.early = [t for v, t in self.tensor_of.items() if problem.producer[v] < problem.boundary]
        self._tried: set[frozenset[int]] = set()

    def run(self, deadline: float) -> Trial | None:
        """The cheapest trial; ``None`` where none is within the budget."""
        begun = clock()
        span = deadline - begun
        found = [
            one for tensors, keep in self._sets(begun + CHOOSING * span) for one in self.trial(tensors, keep, deadline)
        ]
        distinct = {one.placed.fetched: one for one in sorted(found, key=_seconds, reverse=True)}
        ranked = sorted(distinct.values(), key=_seconds)
        ranked = [one for place, one in enumerate(ranked) if place < REFINED or not one.placed.fetched]
        refined: list[Trial] = []
        for index, one in enumerate(ranked):
            until = clock() + (begun + REFINING * span - clock()) / (len(ranked) - index)
            refined.append(self.with_more(self.without_waits(one, until), until))
        best = min(refined, key=_seconds, default=None)
        while best is not None and clock() < deadline:
            until = clock() + max(0.5 * (deadline - clock()), 0.05 * span)
            better = self.improved(self.with_more(self.without_waits(best, until), until), until)
            if better.placed.seconds >= best.placed.seconds * (1 - ENOUGH):
                return better
            best = better
        return best

    def _sets(self, deadline: float) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Sets of tensors to try, each with values to hold at the crossing."""
        if self.plain is not None:
            yield frozenset(), frozenset()
        else:  # most is in the way then
            yield frozenset(self.early), frozenset()
        if len(self.early) <= ALL_SETS:
            for size in range(1, len(self.early) + 1):
                for chosen in itertools.combinations(self.early, size):
                    if clock() > deadline:
                        break
                    yield frozenset(chosen), frozenset()
        yield from self._choices(deadline)

    def _choices(self, deadline: float) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Tensors to copy, and values to hold at the crossing."""
        base = self.problem.base_bytes
        for pace in PACES:
            with contextlib.closing(OffloadProgram(self.graph, self.problem, self.moments, slower=pace)) as program:
                program.expect_order()
                for share in BUDGETS:
                    left = deadline - clock()
                    if left < 0 or program.bound(base + share * (self.budget - base), left) is None:
                        break
                    tensors = frozenset(self.tensor_of[v] for v in program.chosen())
                    if tensors and tensors not in self._tried:
                        self._tried.add(tensors)
                        yield tensors, program.held_at(program.crossing)

    def trial(self, tensors: frozenset[int], keep: frozenset[int], deadline: float) -> Iterator[Trial]:
        """What some tensors on the host lead to, from each of some beginnings."""
        rewritten = rewrite(self.graph, tensors, PRICE)
        problem = Problem(rewritten.graph)
        numbers = Numbers(rewritten, self.problem, problem)
        starts = list(rollouts(problem, numbers.values(keep))) if tensors else []
        if self.plain is not None:
            parts = [(self.problem.ops[node], -1) for node in self.plain.nodes]
            starts.append(fetched_instead(numbers, problem, parts, self.plain.boundary))
        starts += self._more_starts(problem, deadline)
        seen: set[tuple[int, ...]] = set()
        for start in starts:
            lowered = lower_peak(problem, start, self.budget, clock() + LOWERING * (deadline - clock()))
            if problem.evaluate(lowered).peak_bytes > self.budget:
                continue
            filled = keep_longer(problem, lowered, self.budget, deadline)
            if filled.nodes not in seen:
                seen.add(filled.nodes)
                if (one := self._placed(tensors, keep, rewritten, problem, filled)) is not None:
                    yield one

    def lowest(self, tensors: frozenset[int], deadline: float) -> Trial | None:
        """The trial of the smallest peak that is found; the budget is that peak from then on."""
        rewritten = rewrite(self.graph, tensors, PRICE)
        problem = Problem(rewritten.graph)
        sequence = find_smallest_sequence(problem, deadline)
        peak = problem.evaluate(sequence).peak_bytes
        if peak > self.budget:
            return None
        self.budget = peak
        return self._placed(tensors, frozenset(), rewritten, problem, sequence)

    def _more_starts(self, problem: Problem, deadline: float) -> Iterator[NodeSequence]:
        """The schedule of the smallest peak where little else fits, and what "auto" finds for small problems."""
        turn = TURN * (deadline - clock())
        if self.plain is None or len(problem) <= SMALL:
            yield find_smallest_sequence(problem, clock() + turn)
        if len(problem) <= SMALL:
            answer = run_algorithm("auto", problem, self.budget, clock() + turn, exact_seconds=turn)
            if answer.sequence is not None:
                yield answer.sequence

    def _placed(
        self,
        tensors: frozenset[int],
        keep: frozenset[int],
        rewritten: Rewritten,
        problem: Problem,
        sequence: NodeSequence,
    ) -> Trial | None:
        count(A_NODE * len(sequence.nodes))
        placed = place(rewritten, problem.expand(sequence), self.budget)
        return None if placed is None else Trial(tensors, keep, rewritten, problem, sequence, placed)

    def without_waits(self, trial: Trial, deadline: float) -> Trial:
        """The trial without the tensors that ops wait for, as long as that is better."""
        best = trial
        while clock() < deadline and best.tensors:
            waits = waited_for(self.graph, best.placed.schedule)
            for t in sorted(waits, key=lambda t: -waits[t])[:3]:
                others = self.trial((best.placed.fetched & best.tensors) - {t}, best.keep, deadline)
                better = min(others, key=lambda one: one.placed.seconds, default=best)
                if better.placed.seconds < best.placed.seconds * (1 - 1e-9):
                    best = better
                    break
            else:
                break
        return best

    def with_more(self, trial: Trial, deadline: float) -> Trial:
        """The trial with more tensors that may be fetched, those first that save the most time for that of their copies."""
        best, early, most = trial, frozenset(self.early), AT_ONCE
        tried = later = seen = frozenset[int]()  # those that ops waited for are tried again in the end, once
        host = host_of(self.graph)
        while clock() < deadline:
            numbers = Numbers(best.rewritten, self.problem, best.problem)
            more = {numbers.value[v]: t for v, t in self.tensor_of.items() if t in early - best.tensors - tried}
            found = gains(best.problem, best.sequence, more)
            ranked = sorted(
                [(gain / host.seconds(best.problem.nbytes[w], to_device=True), more[w]) for w, gain in found.items()],
                reverse=True,
            )
            chosen = [t for gain, t in ranked[:most] if gain > 0]
            if not chosen and not later:
                break
            if not chosen:
                tried, later = tried - later, frozenset()
                continue
            other = self._extended(best, chosen, numbers, deadline)
            waits = {} if other is None else waited_for(self.graph, other.placed.schedule)
            rest = [t for t in chosen if t not in waits]
            if other is not None and rest and len(rest) < len(chosen):
                fewer = self._extended(best, rest, numbers, deadline)
                if fewer is not None and fewer.placed.seconds < other.placed.seconds:
                    other = fewer
                    again = frozenset(t for t in chosen if t in waits)
                    later, tried = later | (again - seen), tried | again
                    seen |= again
            if other is not None and other.placed.seconds < best.placed.seconds * (1 - 1e-9):
                best = other
            elif len(chosen) > 1:
                most = len(chosen) // 2
            else:
                tried |= set(chosen)
        return best

    def _extended(self, trial: Trial, more: Sequence[int], numbers: Numbers, deadline: float) -> Trial | None:
        tensors = trial.tensors.union(more)
        rewritten = rewrite(self.graph, tensors, PRICE)
        problem = Problem(rewritten.graph)
        parts = [numbers.parts[node] for node in trial.sequence.nodes]
        extended = fetched_instead(Numbers(rewritten, self.problem, problem), problem, parts, trial.sequence.boundary)
        if problem.evaluate(extended).peak_bytes > self.budget:
            return None
        filled = keep_longer(problem, extended, self.budget, deadline)
        return self._placed(tensors, trial.keep, rewritten, problem, filled)

    def improved(self, trial: Trial, deadline: float, slices: int = 3) -> Trial:
        """The trial with its sequence improved; simulated seconds decide after each of some slices of the time."""
        best = trial
        for number in range(slices):
            until = clock() + (deadline - clock()) / (slices - number)
            sequence, _ = improve(best.problem, best.sequence, self.budget, until, seed=number)
            other = self._placed(best.tensors, best.keep, best.rewritten, best.problem, sequence)
            if other is not None and other.placed.seconds < best.placed.seconds:
                best = other
        return best


def _seconds(trial: Trial) -> float:
    return trial.placed.seconds


def waited_for(graph: ComputationGraph, schedule: Schedule) -> dict[int, float]:
    """By tensor, the seconds that ops wait for its copies, where they do."""
    found: dict[int, float] = {}
    clocks = Clocks(graph)
    for step in schedule.steps:
        before = clocks.seconds
        clocks.pass_step(step)
        if isinstance(step, Copy) and clocks.seconds > before:
            found[step.tensor] = found.get(step.tensor, 0.0) + clocks.seconds - before
    return found
