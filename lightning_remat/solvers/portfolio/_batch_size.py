"""The largest batch size under a budget and a cap on the cost (Jain et al. 2020, section 6.4), with any method.

Checkmate makes the batch size B a variable of its program, which makes memory constraints quadratic. Here the program
stays as it is: for one batch size after another the method is asked for its cheapest schedule in the budget, and the
largest batch size whose schedule costs no more than the cap is found by bisection (`max_batch_size`), which begins at
an estimate from the trade-off at one batch size (`guessed_batch_size`). Bisection assumes that what fits at one batch
size fits at all smaller ones, which holds for an exact method and bytes that grow with the batch. A heuristic may break
it, or miss a schedule that exists, so the answer is a lower bound, as the paper's own is.

`extrapolated_batch_size` is what the paper does for baselines (eq. 11): the smallest memory under the cap at one batch size,
scaled. `linear_in_batch` makes graphs of any batch size from two captured ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_remat.errors import BudgetError, GraphError
from lightning_remat.graph import ComputationGraph
from lightning_remat.solvers.common._problem import Problem
from lightning_remat.solvers.common._prune import required
from lightning_remat.solvers.common._registry import solve
from lightning_remat.solvers.common._solution import Solution
from lightning_remat.solvers.portfolio._auto import INTERRUPTED
from lightning_remat.solvers.portfolio._curve import plan_curve

Cap = Callable[[ComputationGraph], float]
"""The most seconds that a step of a graph may take."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One solve: the batch size and budget asked for, the cap in seconds, what was found, and whether it is under both."""

    batch_size: int
    budget_bytes: int
    cap_seconds: float
    solution: Solution

    @property
    def fits(self) -> bool:
        return self.solution.schedule is not None and self.solution.seconds <= self.cap_seconds * (1 + 1e-9)


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """The largest batch size found (0: none), the solution that shows it, and all solves, in order."""

    batch_size: int
    solution: Solution | None
    tried: tuple[Trial, ...]


def one_extra_forward(graph: ComputationGraph) -> float:
    """Eq. 10: seconds of two forwards, loss included, and one backward. Ops that nothing depends on do not count."""
    problem = Problem(graph)
    return sum([problem.seconds[node] * (1 if problem.is_backward[node] else 2) for node in required(problem)])


def max_batch_size(
    graph_of: Callable[[int], ComputationGraph],
    budget_bytes: int,
    *,
    method: str = "auto",
    cap: Cap = one_extra_forward,
    at_most: int = 1 << 16,
    precision: float = 0.0,
    start: int | None = None,
    time_limit: float = 30.0,
    **options: Any,
) -> BatchSize:
    """The largest batch size whose step fits ``budget_bytes`` and costs no more than ``cap``, by bisection.

    Args:
        graph_of: the step's graph at a batch size, from 1 (`linear_in_batch`, or a capture each).
        budget_bytes: the most that may be held at any moment.
        method: one of `available()`.
        cap: the most seconds that a step may take, given its graph (eq. 10 unless set).
        at_most: larger batch sizes are not tried.
        precision: stop when the answer is known to within this share.
        start: the batch size to begin at; ``None`` for `guessed_batch_size` where the method is ``"auto"``, else 1.
        time_limit: seconds of one solve.
        **options: the method's own options.

    Raises:
        BudgetError: for an ``at_most`` under 1, and for what `solve` refuses.
    """
    if at_most < 1:
        raise BudgetError(f"at_most={at_most}: the smallest batch size is 1")
    tried: list[Trial] = []

    def fits(batch_size: int) -> bool:
        graph = graph_of(batch_size)
        solution = solve(graph, budget_bytes, method, time_limit, **options)
        tried.append(Trial(batch_size, budget_bytes, cap(graph), solution))
        return tried[-1].fits

    if start is None:
        start = guessed_batch_size(graph_of, budget_bytes, cap, at_most, time_limit) if method == "auto" else 1
    low, high, stride = 0, at_most + 1, max(1, start // 16)
    middle = max(1, min(start, at_most))
    while True:
        if fits(middle):
            low = middle
        else:
            high = middle
        if high - low <= 1 + precision * low or INTERRUPTED in tried[-1].solution.notes:
            break
        if low == 0 or high > at_most:  # one side is open still
            middle = min(low + stride, at_most) if low else max(1, high - stride)
            stride *= 2
        else:
            middle = (low + high) // 2
    best = next((trial.solution for trial in tried if trial.batch_size == low), None)
    return BatchSize(low, best, tuple(tried))


def guessed_batch_size(
    graph_of: Callable[[int], ComputationGraph],
    budget_bytes: int,
    cap: Cap = one_extra_forward,
    at_most: int = 1 << 16,
    time_limit: float = 30.0,
) -> int:
    """An estimate of the largest batch size: eq. 11 on the whole trade-off (`plan_curve`) at one batch size.

    That batch size is the largest power of two that fits without rematerialization. The bytes that do not grow with the
    batch are extrapolated from the peaks of two batch sizes without rematerialization.

    Args:
        graph_of: the step's graph at a batch size, from 1.
        budget_bytes: the most that may be held at any moment.
        cap: the most seconds that a step may take, given its graph.
        at_most: the largest answer.
        time_limit: seconds for the trade-off.
    """

    def plain_bytes(graph: ComputationGraph) -> int:
        problem = Problem(graph)
        return problem.evaluate(problem.captured).peak_bytes

    size, graph = 1, graph_of(1)
    peak = smaller = plain_bytes(graph)
    while 2 * size <= at_most:
        larger = graph_of(2 * size)
        if (needed := plain_bytes(larger)) > budget_bytes:
            break
        size, graph, smaller, peak = 2 * size, larger, peak, needed
    if at_most == 1:
        return 1
    each = (peak - smaller) / (size // 2) if size > 1 else float(plain_bytes(graph_of(2)) - peak)
    fixed = peak - each * size
    limit = cap(graph) * (1 + 1e-9)
    reached = [one.peak_bytes for one in plan_curve(graph, time_limit=time_limit).solutions if one.seconds <= limit]
    growing = (min(reached, default=peak) - fixed) / size
    if growing <= 0:
        return size
    return max(1, min(at_most, int((budget_bytes - fixed) / growing)))


def extrapolated_batch_size(
    graph: ComputationGraph,
    budget_bytes: int,
    fixed_bytes: int,
    *,
    batch_size: int = 1,
    method: str = "auto",
    cap: Cap = one_extra_forward,
    solves: int = 12,
    time_limit: float = 30.0,
    **options: Any,
) -> BatchSize:
    """Eq. 11: the budget beside the fixed bytes, over the smallest memory beside them under the cap at one batch size.

    Args:
        graph: the step at ``batch_size``. Everything but ``fixed_bytes`` is taken to grow with the batch.
        budget_bytes: the most that may be held at any moment.
        fixed_bytes: held whatever the batch size: parameters and their gradients (M_fixed).
        batch_size: that of ``graph``.
        method: one of `available()`. The minimum of eq. 11 over its hyperparameters is found by lowering the budget.
        cap: the most seconds that a step may take, given its graph (eq. 10 unless set).
        solves: how many budgets are tried, by bisection, at most.
        time_limit: seconds of one solve.
        **options: the method's own options.

    Returns:
        The batch size; its solution is one at ``batch_size``, not at the size found.

    Raises:
        BudgetError: where nothing but ``fixed_bytes`` would be held, and for what `solve` refuses.
    """
    limit = cap(graph)
    problem = Problem(graph)
    high = problem.evaluate(problem.captured).peak_bytes
    low = min(fixed_bytes, high - 1)
    tried: list[Trial] = []
    best: Solution | None = None
    budget = high
    while len(tried) < solves and budget > low:
        trial = Trial(batch_size, budget, limit, solve(graph, budget, method, time_limit, **options))
        tried.append(trial)
        if INTERRUPTED in trial.solution.notes:
            break
        if trial.fits:
            high = trial.solution.peak_bytes
            best = trial.solution
        elif budget == high:
            break  # not even the captured peak will do for this method
        else:
            low = budget
        budget = (low + high) // 2
    if best is None:
        return BatchSize(0, None, tuple(tried))
    if best.peak_bytes <= fixed_bytes:
        raise BudgetError(f"a step holds {best.peak_bytes:,} bytes, not more than the {fixed_bytes:,} called fixed")
    found = max(0, (budget_bytes - fixed_bytes) * batch_size // (best.peak_bytes - fixed_bytes))
    return BatchSize(found, best, tuple(tried))


def linear_in_batch(
    small: ComputationGraph, small_size: int, large: ComputationGraph, large_size: int
) -> Callable[[int], ComputationGraph]:
    """Graphs of any batch size, with the bytes and seconds of everything on the line through two captured batch sizes.

    What does not depend on the batch (parameters, their gradients) is on a constant line. Fractions of bytes are
    rounded up, and nothing goes below zero. Shapes and the order of ops are those of ``large``: a gradient that is
    larger than what it is made of comes late in the order, and at another batch size it may not be larger. An op that
    may run only once in either graph (as one that draws few random numbers) may run only once in all.

    Args:
        small: the step captured at one batch size.
        small_size: that batch size.
        large: the step captured at another one.
        large_size: that batch size.

    Raises:
        GraphError: where the two are not the same ops on the same tensors, or the sizes are equal.
    """
    ops_of_small = {op.name: op for op in small.ops}

    def skeleton(graph: ComputationGraph) -> list[object]:
        plain = {
            op.name: dataclasses.replace(op, seconds=0.0, workspace_bytes=0, recomputable=op.recomputable or op.random)
            for op in graph.ops
        }
        tensors = [(tensor.storage, tensor.role) for tensor in graph.tensors]
        return [plain, tensors, graph.inputs, graph.forward_outputs, graph.forward_transient, graph.backward_outputs]

    if small_size == large_size or skeleton(small) != skeleton(large):
        raise GraphError(f"batch sizes {small_size} and {large_size}: two different ones with the same ops are needed")

    def at(batch_size: int) -> ComputationGraph:
        def between(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * (batch_size - small_size) / (large_size - small_size))

        def whole(a: int, b: int) -> int:
            return max(0, a - (a - b) * (batch_size - small_size) // (large_size - small_size))

        ops = tuple(
            dataclasses.replace(
                op,
                seconds=between(other.seconds, op.seconds),
                workspace_bytes=whole(other.workspace_bytes, op.workspace_bytes),
                recomputable=op.recomputable and other.recomputable,
            )
            for op, other in ((op, ops_of_small[op.name]) for op in large.ops)
        )
        return large.replace(
            ops=ops,
            storages=tuple(whole(a, b) for a, b in zip(small.storages, large.storages, strict=True)),
            resident_bytes=whole(small.resident_bytes, large.resident_bytes),
            forward_resident_bytes=whole(small.forward_resident_bytes, large.forward_resident_bytes),
        )

    return at
