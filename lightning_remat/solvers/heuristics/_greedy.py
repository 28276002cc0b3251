"""The method "greedy": values at block boundaries are kept, others chosen by time saved a byte, within the exact peak.

Keeping what crosses block boundaries is what makes low budgets feasible: without it, whatever is evicted is computed
again from the start of the network. Where the blocks are is read off the graph: at a good boundary few bytes of the
forward's own values are in flight. Several sets of boundaries are tried, coarse and fine. To some of those that fit,
more values are added: the value (or all values of one node) that saves the most time for its bytes is kept next, as
long as the exact peak stays within the budget. Nothing here is optimal, and no bound is proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import Evaluation, NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import keep_longer
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._rollout import Keep, candidates, rollout
from lightning_remat.solvers.common._segments import crossing_values
from lightning_remat.solvers.common._solution import Status


def boundary_sets(problem: PlainProblem, strides: Iterable[int] = (1, 2, 3, 4, 6, 8, 12)) -> Iterator[Keep]:
    """Sets of values that cross block boundaries, from fine to coarse, each once.

    The bytes that cross the positions have local minima, whose values are the levels. At each level, positions that no
    more bytes cross are boundaries, of which every stride-th is used.
    """
    crossing = crossing_values(problem)
    size = [sum([problem.nbytes[v] for v in values]) for values in crossing]
    inner = [p for p in range(len(size) - 1) if size[p] > 0]
    minima = [p for p in inner if size[p] <= size[p + 1] and (p == 0 or size[p] <= size[p - 1] or size[p - 1] == 0)]
    levels = sorted({size[p] for p in minima})
    if len(levels) > 10:
        levels = [levels[round(i * (len(levels) - 1) / 9)] for i in range(10)]
    seen: set[Keep] = set()
    for level in reversed(levels):
        positions = [p for p in inner if size[p] <= level]
        for stride in strides:
            chosen = positions[stride - 1 :: stride]
            keep = frozenset(v for p in chosen for v in crossing[p])
            if keep not in seen:
                seen.add(keep)
                yield keep
    if frozenset() not in seen:
        yield frozenset()


def fill(problem: PlainProblem, keep: Keep, budget_bytes: int, deadline: float) -> Keep:
    """Keep more values, those first that save the most time a byte, while the exact peak stays within the budget."""
    seconds = problem.seconds
    nbytes = problem.nbytes

    def cost(chosen: Keep) -> float:
        return sum([seconds[n] for n in rollout(problem, chosen).nodes])

    def density(option: Keep, base: float) -> float:
        extra = sum([nbytes[v] for v in option - keep])
        return (base - cost(keep | option)) / max(extra, 1)

    now = cost(keep)
    floor = sum(seconds)
    queue = []
    for order, option in enumerate(candidates(problem)):
        if clock() > deadline:
            break
        if not option <= keep and (gain := density(option, now)) > 0:
            queue.append((-gain, order, option))
    heapq.heapify(queue)
    while queue and now > floor and clock() < deadline:
        gain, order, option = heapq.heappop(queue)
        if option <= keep:
            continue
        fresh = -density(option, now)
        if fresh >= 0:
            continue
        if queue and fresh > queue[0][0] * (1 - 1e-9):
            heapq.heappush(queue, (fresh, order, option))
            continue
        if problem.evaluate(rollout(problem, keep | option)).peak_bytes <= budget_bytes:
            keep = keep | option
            now = cost(keep)
    return keep


def starts(problem: PlainProblem, deadline: float) -> list[tuple[Evaluation, Keep]]:
    """Sets of boundaries, each with the peak and time of its schedule, the fastest first."""
    found = []
    for keep in boundary_sets(problem):
        found.append((problem.evaluate(rollout(problem, keep)), keep))
        if clock() > deadline:
            break
    return sorted(found, key=lambda item: (item[0].seconds, item[0].peak_bytes))


def smallest(problem: PlainProblem, deadline: float) -> tuple[Evaluation, NodeSequence]:
    """The schedule of the smallest peak that this method finds; `find_smallest`, which begins here, finds smaller ones.

    From each of the best three sets of boundaries, single values that are idle at the peak are kept or not, or computed
    again for each reader, as long as the peak falls.
    """
    options = sorted(starts(problem, deadline), key=lambda item: (item[0].peak_bytes, item[0].seconds))
    captured = problem.evaluate(problem.captured)
    best: tuple[Evaluation, NodeSequence] = (captured, problem.captured)
    for evaluation, start in options[:3]:
        keep, forget = start, frozenset[int]()
        sequence = rollout(problem, keep)
        improved = True
        while improved and clock() < deadline:
            improved = False
            for v in alive_at(problem, sequence, evaluation.peak_position):
                attempts = [
                    (keep - {v}, forget),
                    (keep, forget | {v}),
                    (keep | {v}, forget),
                    (keep - {v}, forget | {v}),
                ]
                for new_keep, new_forget in attempts:
                    if (new_keep, new_forget) == (keep, forget):
                        continue
                    other = rollout(problem, new_keep, new_forget)
                    if len(other.nodes) > 20 * len(problem):
                        continue
                    result = problem.evaluate(other)
                    if result.peak_bytes < evaluation.peak_bytes:
                        keep, forget, sequence, evaluation = new_keep, new_forget, other, result
                        improved = True
                        break
                if improved or clock() > deadline:
                    break
        if (evaluation.peak_bytes, evaluation.seconds) < (best[0].peak_bytes, best[0].seconds):
            best = (evaluation, sequence)
    return best


def alive_at(problem: PlainProblem, sequence: NodeSequence, position: int) -> list[int]:
    """Forward values in memory at a position that the node there neither reads nor writes, the largest first."""
    if position < 0:
        return []
    frees = problem.last_uses(sequence)
    alive: set[int] = set()
    for index in range(position + 1):
        alive.update(problem.writes[sequence.nodes[index]])
        if index < position:
            alive.difference_update(frees[index + 1])
    node = sequence.nodes[position]
    busy = {*problem.reads[node], *problem.writes[node]}
    found = [v for v in alive - busy if 0 <= problem.producer[v] < problem.boundary]
    return sorted(found, key=lambda v: -problem.nbytes[v])


@register("greedy")
def greedy(problem: Problem, budget_bytes: int, *, deadline: float, attempts: int = 3) -> Answer:
    """Block-wise greedy.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        attempts: to how many sets of boundaries more values are added: of those that fit the fastest, the slowest, and
            others evenly between.
    """
    if problem.evaluate(problem.captured).peak_bytes <= budget_bytes:
        return Answer(problem.captured, Status.FEASIBLE)
    options = starts(problem, deadline)
    fitting = [keep for evaluation, keep in options if evaluation.peak_bytes <= budget_bytes]
    notes = (f"{len(fitting)} of {len(options)} sets of block boundaries fit",)
    found: list[NodeSequence] = []
    if fitting:
        chosen = [fitting[round(i * (len(fitting) - 1) / max(1, attempts - 1))] for i in range(attempts)]
        for keep in dict.fromkeys(chosen):
            found.append(rollout(problem, fill(problem, keep, budget_bytes, deadline)))
            if clock() > deadline:
                break
        found += [rollout(problem, keep) for keep in fitting]
    else:
        evaluation, sequence = smallest(problem, deadline)
        if evaluation.peak_bytes > budget_bytes:
            late = clock() > deadline
            return Answer(None, Status.TIMEOUT if late else Status.INFEASIBLE, notes=notes)
        found.append(sequence)
    best = cheapest(problem, found[:1])
    for sequence in found:
        best = cheapest(problem, [best, keep_longer(problem, sequence, budget_bytes, deadline)])
        if clock() > deadline:
            break
    return Answer(best, Status.FEASIBLE, notes=notes)


def cheapest(problem: PlainProblem, sequences: Iterable[NodeSequence]) -> NodeSequence:
    """The sequence that takes the least time."""
    return min(sequences, key=lambda sequence: sum([problem.seconds[n] for n in sequence.nodes]))
