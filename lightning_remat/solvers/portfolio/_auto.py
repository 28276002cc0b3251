"""The method "auto": methods that are quick and good on networks, the cheapest schedules improved, and a lower bound.

"crossing" gives a bound, and schedules that are near it where the budget binds at the moment between forward and
backward. Where they are above it, "moments" has a better bound, and other schedules unless they are near that one: then
nothing more is tried on larger graphs. "rotor" decides by blocks, which is better where the budget is low, and
"descent" gives up what is held at the peak, which is best where the budget is very low. "descent" and "hiremate" run
only while the gap to the bound is open. So do "rotor" and "descent" on the problem with its backward in another order
(`reorder`), if one takes less memory. The cheapest schedules are where `improve` begins. Graphs of up to a few hundred
nodes get the other quick methods as well, those of a few dozen Checkmate's program; larger ones get some others only
where nothing was found so far. What was tried, and how it went, is in the answer's notes.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from lightning_remat.errors import GraphError, ScheduleError, SolverError
from lightning_remat.schedule import verify
from lightning_remat.solvers.bounds._binding_moments import CLOSED_GAP, LARGE, LEAST_GAP, OPEN_GAP, effort
from lightning_remat.solvers.bounds._minimum_cut import BACKWARD_AFTER_FORWARD
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import once
from lightning_remat.solvers.common._registry import Answer, register, run_algorithm
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._working_set import needs_more
from lightning_remat.solvers.heuristics._large_neighbourhood_search import improve
from lightning_remat.solvers.heuristics._reorder import Reordered, reorder

log = logging.getLogger(__name__)

EXACT_UP_TO = 40
"""Nodes up to which Checkmate's program is tried whole."""

QUICK = (
    "greedy", "chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy", "griewank_logn",
    "greedy_xla", "treewidth", "pathwidth", "approx_dp",
)  # fmt: skip
"""Methods that take milliseconds on a few dozen nodes."""

QUICK_UP_TO = 200
"""Nodes up to which the methods of `QUICK` are tried."""

INTERRUPTED = "interrupted: this is the best so far"
"""The note of an answer whose search was interrupted."""

WIDE_GAP = 0.005
"""Gap from which "hiremate", and another order of the backward, are tried too."""

IMPROVING_GAP = 0.01
"""Gap at which improving gets as much time as the first methods (``seconds``); at others less or more in proportion."""

IMPROVING_SHARES = (0.6, 3.5)
"""The least and the most time for improving at `OPEN_GAP` and more, as shares of ``seconds``.

The least is less at smaller gaps (`effort`); of more than `LARGE` nodes there is none.
"""

IMPROVING_KNOWN = 0.6
"""Where a schedule is known from the beginning: the share of the time that is for improving, if the gap is wide."""

LAST_SECONDS = 1.0
"""Seconds for improving larger graphs' schedules at `CLOSED_GAP`; at smaller gaps in proportion, down to `LEAST_GAP`."""

OF_NO_USE = "ended early: no schedule is cheaper than what is known of another form of the step"
"""The note of an answer whose search was ended by ``below_seconds``."""

REFUSED = "what it found breaks a rule, and another schedule is taken; please report it"
"""Words of the note and warning on a method that has a defect."""

EXACT = 1e-9
"""Gap up to which a schedule counts as optimal: that of rounding errors."""

HOPELESS = 1.25
"""Schedules that cost more than so many times the cheapest are not improved."""

BY_ORDER = ("rotor", "descent")
"""Methods that run on another order of the backward as well."""

MOMENTS_UP_TO = 1500
"""Nodes up to which "moments" is tried over `CLOSED_GAP` where it was not yet; on larger graphs, over `OPEN_GAP`."""

HIREMATE_UP_TO = 1500
"""Nodes up to which "hiremate" is tried where something was found before."""

OTHERWISE = ("greedy", "hiremate", "treewidth", "linearized_greedy", "griewank_logn")
"""Methods for larger graphs on which the first ones found nothing."""


def usual_seconds(problem: Problem) -> float:
    """Seconds that the first methods get on a graph of this size: four, and one more for each 400 nodes."""
    return 4.0 + len(problem) / 400


@register("auto")
def auto(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    seconds: float | None = None,
    exact_up_to: int = EXACT_UP_TO,
    exact_seconds: float = 5.0,
    improvements: int = 4,
    known: NodeSequence | None = None,
    below_seconds: float = math.inf,
) -> Answer:
    """Try what suits the size of the problem, improve what is cheapest, and keep the best.

    An interrupt (Ctrl-C) ends the search with the best so far, if there is one.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        seconds: time for the first methods; ``None`` for `usual_seconds`. Some of those that run while the gap is open
            get half as much on top, and improving gets its share of it (`IMPROVING_SHARES`); the deadline holds for
            all.
        exact_up_to: nodes up to which Checkmate's program is solved whole.
        exact_seconds: the most that Checkmate's program may take here; method ``"milp"`` takes the whole time limit.
        improvements: how many of the cheapest schedules are improved in the first round; each further round has half as
            many.
        known: a sequence within the budget, if there is one already. Other methods get less time then
            (`IMPROVING_KNOWN`): where it comes from `find_smallest`, few of them find any schedule.
        below_seconds: the search ends once it is proven that no schedule takes less, if one was found.

    Raises:
        ScheduleError: where the verifier takes none of the schedules that were found: a defect of each method.
    """
    begun, started = clock(), time.monotonic()
    span = usual_seconds(problem) if seconds is None else seconds
    searching = deadline if known is None else deadline - IMPROVING_KNOWN * (deadline - begun)
    portfolio = _Portfolio(problem, budget_bytes, searching, below_seconds)
    if too_large := needs_more(problem, budget_bytes):
        return Answer(None, Status.INFEASIBLE, notes=(too_large,))
    if known is not None:
        portfolio.add("known", known)
    try:
        if portfolio.attempt("no_remat", deadline):
            portfolio.add("no_remat", once(problem))  # without what nothing depends on
        else:
            until = min(searching, begun + span)
            portfolio.search(until, span, exact_up_to, exact_seconds)
            if portfolio.is_of_no_use():
                portfolio.notes.append(OF_NO_USE)
                return portfolio.answer(started)
            if portfolio.gap() > CLOSED_GAP:
                usual = min(portfolio.gap() / IMPROVING_GAP, IMPROVING_SHARES[1]) * span
                if len(problem) <= LARGE:
                    least = max(until - clock(), IMPROVING_SHARES[0] * span)
                    usual = max(usual, effort(portfolio.gap()) * least, LAST_SECONDS)
                portfolio.improve(min(deadline, clock() + usual), improvements, CLOSED_GAP)
            elif len(problem) > QUICK_UP_TO:
                last = LAST_SECONDS * portfolio.gap() / CLOSED_GAP
                portfolio.improve(min(deadline, clock() + last), improvements // 2, LEAST_GAP)
            enough = EXACT if len(problem) <= QUICK_UP_TO else LEAST_GAP
            if portfolio.gap() > enough and "moments" not in portfolio.asked and clock() < until:
                portfolio.attempt("moments", until)  # with what is left of the usual time
    except KeyboardInterrupt:
        if not portfolio.found:
            raise
        portfolio.notes.append(INTERRUPTED)
    return portfolio.answer(started)


class _Portfolio:
    """Schedules that were found so far, with what is proven, and how it went.

    Attributes:
        found: seconds a step, sequence, and method of each.
        asked: the methods that were run.
        notes: for people.
    """

    def __init__(self, problem: Problem, budget_bytes: int, deadline: float, below_seconds: float) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.below_seconds = below_seconds
        self.found: list[tuple[float, NodeSequence, str]] = []
        self.asked: set[str] = set()
        self.notes: list[str] = []
        self._bounds: list[tuple[float, str]] = []

    def attempt(self, method: str, limit: float, other: Reordered | None = None, **options: Any) -> bool:
        """Run one method until ``limit``, on the problem or another order of it; return whether it found a schedule."""
        begun = time.monotonic()
        self.asked.add(method)
        label = f"{method}, reordered" if other else method
        try:
            answer = run_algorithm(method, other or self.problem, self.budget_bytes, limit, **options)
        except (SolverError, GraphError) as error:  # a defect of that method: there are others
            self.notes.append(f"{label}: {REFUSED}: {error}")
            log.warning("%s: %s (%s)", label, REFUSED, error)
            return False
        taken = time.monotonic() - begun
        if answer.sequence is None:
            self.notes.append(f"{label}: {answer.status.value} after {taken:.1f} s")
        else:
            cost = self.add(method, other.original(answer.sequence) if other else answer.sequence)
            self.notes.append(f"{label}: {cost:.6g} s a step, {answer.status.value} after {taken:.1f} s")
        self.notes.extend(f"{label}: {note}" for note in answer.notes)
        self._bounds.append((answer.lower_bound_seconds, answer.bound_scope))
        return answer.sequence is not None

    def add(self, method: str, sequence: NodeSequence) -> float:
        """Take one more schedule within the budget; return its seconds a step."""
        cost = self.problem.evaluate(sequence).seconds
        self.found.append((cost, sequence, method))
        return cost

    def least(self) -> float:
        """Seconds a step of the cheapest schedule; infinity without one."""
        return min([cost for cost, _, _ in self.found], default=math.inf)

    def cheapest(self) -> NodeSequence:
        """The cheapest schedule, where something was found."""
        return min(self.found, key=lambda one: one[0])[1]

    def proven(self, cost: float) -> tuple[float, str]:
        """The largest bound, in seconds, that holds for a schedule of this cost, and its scope.

        A schedule that is cheaper than a bound of a narrower scope is outside of that scope.
        """
        holds = [one for one in self._bounds if one[1] == BACKWARD_AFTER_FORWARD or one[0] <= cost * (1 + EXACT)]
        return max(holds, default=(0.0, ""))

    def is_of_no_use(self) -> bool:
        """Whether something was found, and no schedule can take less than ``below_seconds``."""
        bounds = [bound for bound, scope in self._bounds if scope == BACKWARD_AFTER_FORWARD]
        return bool(self.found) and max(bounds, default=0.0) >= self.below_seconds

    def gap(self) -> float:
        """The gap of the cheapest schedule to the bound, as a share of the bound."""
        bound = self.proven(self.least())[0]
        return self.least() / bound - 1 if bound > 0 else math.inf

    def search(self, until: float, span: float, exact_up_to: int, exact_seconds: float) -> None:
        """Run what suits the size of the problem."""
        size, known = len(self.problem), bool(self.found)
        self.attempt("crossing", until)
        if self.is_of_no_use():
            return
        if size > QUICK_UP_TO and self.found and self.gap() > LEAST_GAP:
            limit = min(0.5 * (clock() + self.deadline), clock() + span)
            self.attempt("moments", limit, known=self.cheapest(), below_seconds=self.below_seconds)
        if self.is_of_no_use() or (size > QUICK_UP_TO and self.gap() <= CLOSED_GAP):
            return
        enough = clock() + 0.5 * span
        self.attempt("rotor", min(self.deadline, enough if known else max(until, enough)))
        if "moments" not in self.asked and self.gap() > (CLOSED_GAP if size <= MOMENTS_UP_TO else OPEN_GAP):
            self.attempt("moments", min(self.deadline, clock() + span))
        for method in QUICK if size <= QUICK_UP_TO else ():
            self.attempt(method, until)
        if size <= exact_up_to:
            self.attempt("exact_dp", until)
            self.attempt("lp_rounding", min(until, clock() + exact_seconds))
            self.attempt("milp", min(self.deadline, clock() + exact_seconds))
        else:
            self.notes.append(f"milp: not tried, {size} operations are more than {exact_up_to}")
        if self.gap() > WIDE_GAP and (other := reorder(self.problem, min(self.deadline, clock() + 0.2 * span))):
            for method in BY_ORDER:
                self.attempt(method, min(self.deadline, clock() + 0.5 * span), other)
        if self.gap() > OPEN_GAP:
            self.attempt("descent", min(self.deadline, max(until, clock() + 0.5 * span)))
        if exact_up_to < size <= HIREMATE_UP_TO and self.found and self.gap() > WIDE_GAP:
            share = min(max(0.5, self.gap() / IMPROVING_GAP), 1.0)
            self.attempt("hiremate", min(self.deadline, clock() + share * span))
        for method in OTHERWISE:
            if not self.found and clock() < self.deadline:
                self.attempt(method, 0.5 * (self.deadline + clock()))

    def improve(self, until: float, improvements: int, enough: float) -> None:
        """Improve the cheapest schedules by successive halving: equal time a round, and in it for each schedule.

        Args:
            until: `clock` at which to stop.
            improvements: how many schedules are improved in the first round.
            enough: the gap at which to stop.
        """
        distinct = {one[1].nodes: one for one in reversed(self.found)}
        best = sorted(distinct.values(), key=lambda one: one[0])[:improvements]
        best = [one for one in best if one[0] <= HOPELESS * best[0][0]]
        rounds = len(best).bit_length()
        for number in range(rounds):
            for index, (cost, sequence, method) in enumerate(best):
                left = until - clock()
                if left <= 0 or self.gap() <= enough:
                    return
                stop = clock() + left / ((rounds - number) * len(best) - index)
                better, attempts = improve(self.problem, sequence, self.budget_bytes, stop, seed=number)
                cheaper = self.add(method, better)
                self.notes.append(f"improved {method} from {cost:.6g} to {cheaper:.6g} s a step in {attempts} attempts")
                best[index] = (cheaper, better, method)
            best = sorted(best, key=lambda one: one[0])[: max(1, len(best) // 2)]

    def verified(self) -> tuple[float, NodeSequence, str]:
        """The cheapest schedule that the verifier accepts: seconds a step, sequence, and method.

        Raises:
            ScheduleError: where it accepts none of them, which takes a defect of each method.
        """
        refused: ScheduleError | None = None
        for one in sorted(self.found, key=lambda one: one[0]):
            try:
                verify(self.problem.graph, self.problem.expand(one[1]), self.budget_bytes)
            except ScheduleError as error:
                refused = refused or error
                self.notes.append(f"{one[2]}: {REFUSED}: {error}")
                log.warning("%s: %s (%s)", one[2], REFUSED, error)
            else:
                return one
        assert refused is not None, "asked where something was found"
        raise refused

    def answer(self, started: float) -> Answer:
        """The cheapest schedule, with the bound that holds for it; ``started`` is a reading of `time.monotonic`."""
        if not self.found:
            late = clock() >= self.deadline
            bound, scope = self.proven(math.inf)
            status = Status.TIMEOUT if late else Status.INFEASIBLE
            return Answer(None, status, bound, scope, notes=tuple(self.notes))
        cost, sequence, method = self.verified()
        bound, scope = self.proven(cost)
        status = Status.OPTIMAL if cost <= bound * (1 + EXACT) else Status.FEASIBLE
        self.notes.append(f"chose {method} after {time.monotonic() - started:.1f} s")
        return Answer(sequence, status, bound, scope, method=method, notes=tuple(self.notes))
