"""The largest batch size under a budget and a cap on the cost, in few solves: schedules are moved between batch sizes.

Graphs of one step at different batch sizes have the same ops on the same tensors, so a schedule that was found at one
size is valid at another, and its peak and time there are known without a solve. The largest size at which a known
schedule fits is a lower bound on the answer; a size at which a single op takes more than the budget is above it. Sizes
between the two get quick searches first ("crossing", and the best known schedule lowered to the budget, `lower_peak`);
what these leave open gets a few solves. Like `max_batch_size` this assumes that what fits at one size fits at all
smaller ones.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_remat.errors import GraphError
from lightning_remat.graph import ComputationGraph, TensorRole
from lightning_remat.schedule import Compute, Schedule
from lightning_remat.solvers.common import _clock
from lightning_remat.solvers.common._eviction import lower_peak
from lightning_remat.solvers.common._problem import NodeSequence, Problem
from lightning_remat.solvers.common._prune import finish, once, required
from lightning_remat.solvers.common._registry import Answer, run_algorithm, solution_of, solve
from lightning_remat.solvers.common._solution import Solution, Status
from lightning_remat.solvers.common._working_set import least_bytes
from lightning_remat.solvers.portfolio._auto import INTERRUPTED
from lightning_remat.solvers.portfolio._batch_size import Cap, one_extra_forward

QUICK_PRECISION = 0.06
"""Quick searches end when the answer lies between two sizes no further apart than this, as a share."""

QUICK_SECONDS = 1.0
"""Time limit of one quick search."""

EXACT = 1e-9
"""Share of the cap that rounding may be over it."""


@dataclasses.dataclass(frozen=True)
class OpSequence:
    """Names of ops in the order of evaluation, the first ``boundary`` of them in the forward; views are left out."""

    ops: tuple[str, ...]
    boundary: int

    @classmethod
    def of(cls, problem: Problem, sequence: NodeSequence) -> OpSequence:
        """A sequence of one problem's nodes, by the names of their ops."""
        return cls(tuple(problem.name(node) for node in sequence.nodes), sequence.boundary)

    @classmethod
    def of_solution(cls, graph: ComputationGraph, solution: Solution) -> OpSequence | None:
        """The sequence of a solution of ``graph``; ``None`` without a schedule."""
        return cls.of_schedule(graph, solution.schedule) if solution.schedule is not None else None

    @classmethod
    def of_schedule(cls, graph: ComputationGraph, schedule: Schedule) -> OpSequence:
        """The sequence of a schedule of ``graph``."""
        runs = [
            (at, step.op)
            for at, step in enumerate(schedule.steps)
            if isinstance(step, Compute) and not graph.is_view[step.op]
        ]
        boundary = sum(at < schedule.boundary for at, _ in runs)
        return cls(tuple(graph.ops[op].name for _, op in runs), boundary)

    def on(self, problem: Problem) -> NodeSequence | None:
        """The same ops of another problem; ``None`` where it lacks one, or one would read what is not there."""
        nodes = {problem.name(node): node for node in range(len(problem))}
        if not nodes.keys() >= set(self.ops):
            return None
        sequence = NodeSequence(tuple(nodes[name] for name in self.ops), self.boundary)
        try:
            problem.last_uses(sequence)
        except GraphError:
            return None
        return sequence


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """What `largest_batch_size` found, with the schedules for it.

    Attributes:
        batch_size: the largest for which a schedule was found; 0 for none.
        sequences: all schedules that were found or given.
        solves: how often the method was run.
    """

    batch_size: int
    sequences: tuple[OpSequence, ...]
    solves: int


def largest_batch_size(
    graph_of: Callable[[int], ComputationGraph],
    budget_bytes: int,
    *,
    method: str = "auto",
    cap: Cap = one_extra_forward,
    at_most: int = 1 << 16,
    precision: float = 0.03,
    solves: int = 3,
    time_limit: float = 3.0,
    known: Iterable[OpSequence] = (),
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> LargestBatch:
    """The largest batch size whose step fits ``budget_bytes`` and costs no more than ``cap``.

    Args:
        graph_of: the step's graph at a batch size, from 1 (`linear_in_batch`): the same ops on the same tensors at all.
        budget_bytes: the most that may be held at any moment.
        method: one of `available()`. Quick searches precede ``"auto"`` only: what another method finds is its own.
        cap: the most seconds that a step may take, given its graph (eq. 10 unless set).
        at_most: larger batch sizes are not tried.
        precision: stop when the answer is known to within this share.
        solves: how often the method is run, at most.
        time_limit: seconds of one solve.
        known: schedules found before, also at other sizes; those of other ops are ignored.
        progress: called with words on what is being done.
        **options: the method's own options.

    Raises:
        SolverError, BudgetError: for what `solve` refuses.
    """
    say = progress or (lambda _text: None)
    search = _Search(graph_of, budget_bytes, cap, at_most, precision)
    for sequence in known:
        search.add(sequence.on(search.problem(1)))
    if method == "auto":
        search.quickly(min(QUICK_SECONDS, time_limit), say)
    asked = 0
    for size in search.open_sizes():
        if asked == solves:
            break
        asked += 1
        say(f"solving at a batch size of {size}, {asked} of at most {solves} solves")
        solution = solve(search.problem(size).graph, budget_bytes, method, time_limit, **options)
        search.tried(size, solution)
        if INTERRUPTED in solution.notes:
            break
    sequences = tuple(OpSequence.of(search.problem(1), sequence) for sequence in search.sequences)
    return LargestBatch(search.low, sequences, asked)


def moved(
    sequences: Iterable[OpSequence],
    graph: ComputationGraph,
    budget_bytes: int,
    time_limit: float = QUICK_SECONDS,
    *,
    changed: bool = True,
) -> Solution | None:
    """The cheapest solution that schedules of other batch sizes give for a graph.

    They are lowered to the budget (`lower_peak`), and what it has left is spent (`keep_longer`), unless they are to stay as
    they are.

    Args:
        sequences: the schedules; those of other ops are ignored.
        graph: the problem.
        budget_bytes: the most that may be held at any moment.
        time_limit: seconds in all.
        changed: whether they may be changed.

    Returns:
        The solution; ``None`` where none of them fits.
    """
    started = time.monotonic()
    problem = Problem(graph)
    here = [nodes for nodes in (sequence.on(problem) for sequence in sequences) if nodes is not None]

    ranked = sorted(here, key=lambda one: max(budget_bytes, problem.evaluate(one).peak_bytes))
    with _clock.limited(time_limit) as deadline:
        lowered = [lower_peak(problem, one, budget_bytes, deadline) for one in ranked] if changed else ranked
        fits = [one for one in lowered if problem.evaluate(one).peak_bytes <= budget_bytes]
        if changed:
            best = finish(problem, fits, budget_bytes, deadline)
        else:
            best = min(fits, key=lambda one: problem.evaluate(one).seconds, default=None)
    if best is None:
        return None
    answer = Answer(best, Status.FEASIBLE, notes=("from other batch sizes",))
    return solution_of(graph, problem, answer, budget_bytes, "moved", {}, started)


def plain_batch_size(graph: ComputationGraph, batch_size: int, budget_bytes: int) -> int:
    """An estimate of the largest batch size that fits without rematerialization, from one captured size; 1 at least.

    All is taken to grow with the batch but parameters, the step's gradients, and what is held beside the graph. Other
    values may not grow either, so a larger batch size may fit.

    Args:
        graph: the step at ``batch_size``.
        batch_size: of what was captured.
        budget_bytes: the most that may be held at any moment.
    """
    problem = Problem(graph)
    parameters = {t.storage for t in graph.tensors if t.role is TensorRole.PARAMETER}
    gradients = {graph.tensors[t].storage for t in graph.backward_outputs}
    fixed_inputs = sum(graph.storages[s] for s in parameters)
    grows = [problem.storage[v] not in gradients for v in range(len(problem.nbytes))]

    def fits(size: int) -> bool:
        def scaled(nbytes: int) -> int:
            return -(-nbytes * size // batch_size)

        other = copy.copy(problem)
        other.nbytes = [scaled(n) if grow else n for n, grow in zip(problem.nbytes, grows, strict=True)]
        other.workspace = [scaled(n) for n in problem.workspace]
        other.base_bytes = graph.resident_bytes + fixed_inputs + scaled(graph.input_bytes - fixed_inputs)
        return other.evaluate(other.captured).peak_bytes <= budget_bytes

    high = 2
    while fits(high) and high < 1 << 20:
        high *= 2
    return max(1, _last(fits, high // 2, high))


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number below ``high`` that fits, given that ``low`` does, and ``high`` does not."""
    while high - low > 1:
        middle = min((low + high) // 2, 2 * low) if low else (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class _Search:
    """Bounds on the largest batch size, and the schedules that prove the lower one.

    Attributes:
        low: the largest size for which a schedule is known; 0 for none.
        high: the smallest that is taken not to fit.
        sequences: all schedules that were found or given.
    """

    def __init__(
        self,
        graph_of: Callable[[int], ComputationGraph],
        budget_bytes: int,
        cap: Cap,
        at_most: int,
        precision: float,
    ) -> None:
        self._graph_of, self._budget, self._cap, self._precision = graph_of, budget_bytes, cap, precision
        self._problems: dict[int, tuple[Problem, float]] = {}
        self._missed: int | None = None
        one = self.problem(1)
        self._best, self._required = once(one), required(one)
        self.sequences: list[NodeSequence] = []
        self.low, self.high = 0, at_most + 1
        self.high = 1 + _last(self._fits_alone, 0, at_most + 1)
        self.low = _last(lambda size: self._fits(one.captured, size), 0, self.high)

    def problem(self, size: int) -> Problem:
        """The step's problem; its nodes are the same at all sizes."""
        return self._with_cap(size)[0]

    def _with_cap(self, size: int) -> tuple[Problem, float]:
        if size not in self._problems:
            graph = self._graph_of(size)
            self._problems[size] = Problem(graph), self._cap(graph) * (1 + EXACT)
        return self._problems[size]

    def _fits_alone(self, size: int) -> bool:
        """Whether every op that must run fits by itself."""
        problem = self.problem(size)
        return all(least_bytes(problem, node) <= self._budget for node in self._required)

    def _fits(self, sequence: NodeSequence, size: int) -> bool:
        problem, cap = self._with_cap(size)
        found = problem.evaluate(sequence)
        return found.peak_bytes <= self._budget and found.seconds <= cap

    def add(self, sequence: NodeSequence | None) -> None:
        """Take one more schedule: where it fits a size above ``low``, the largest that it fits becomes ``low``."""
        if sequence is None or sequence in self.sequences:
            return
        self.sequences.append(sequence)
        if self.low + 1 < self.high and self._fits(sequence, self.low + 1):
            self.low = _last(lambda size: self._fits(sequence, size), self.low + 1, self.high)
            self._best = sequence

    def quickly(self, seconds: float, say: Callable[[str], None]) -> None:
        """Bisect by quick searches of ``seconds`` at most; a size at which they find nothing may fit all the same."""
        missed = self.high
        while missed - self.low > 1 + QUICK_PRECISION * self.low:
            middle = (self.low + missed) // 2
            size = min(middle, 2 * self.low) if self.low else middle
            say(f"between a batch size of {self.low} and {missed - 1}")
            problem, cap = self._with_cap(size)
            with _clock.limited(seconds) as deadline:
                answer = run_algorithm("crossing", problem, self._budget, deadline)
                self.add(answer.sequence)
                if answer.lower_bound_seconds > cap:
                    self.high = size
                elif self.low < size:
                    lowered = lower_peak(problem, self._best, self._budget, deadline)
                    if problem.evaluate(lowered).peak_bytes <= self._budget:
                        self.add(finish(problem, [lowered], self._budget, deadline))
            if self.low < size:
                missed = size
        self._missed = missed if missed < self.high else None

    def open_sizes(self) -> Iterator[int]:
        """Sizes to solve at, each chosen by the outcomes before (`tried`), until the answer is precise enough."""
        size = self._missed or 2 * self.low
        stride = max(1, size - self.low)  # nothing may have been found to fit yet
        while self.high - self.low > 1 + self._precision * self.low:
            least = self.low + max(1, int(self._precision * self.low))
            size = min(max(size, least), self.high - 1)
            yield size
            stride *= 2
            size = self.low + stride if self.low >= size else (self.low + self.high) // 2

    def tried(self, size: int, solution: Solution) -> None:
        """Take note of the solution at a size."""
        found = OpSequence.of_solution(self.problem(size).graph, solution)
        self.add(found.on(self.problem(size)) if found is not None else None)
        if self.low < size:
            self.high = size
