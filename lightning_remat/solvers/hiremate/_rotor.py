"""The method "rotor": dynamic programming over a chain of blocks, each with several options of what it keeps.

Beaumont et al. (2019, 2024) solve chains of single ops; Rockmate (Zhao et al. 2023) chains of blocks with options, as HiRemate
recalls it (Gusak et al. 2025, sections 2 and 3.2.1). C(s, t, m) is the least time of the forwards and backwards of the blocks
s to t when the inputs of s are in memory, the gradients that come into t are too, and m bytes are free beside them. Either

* F_s runs with an option o, whose kept values stay in memory through C(s + 1, t, m - kept) and serve B_s; or
* the forwards of s to s' - 1 run without keeping anything but the inputs of s', C(s', t, m - inputs) follows, those
  inputs are freed, and C(s, s' - 1, m) runs the blocks s to s' - 1 again, with their backwards.

The table takes time of the order of the cube of the number of blocks, times the number of slots of memory.

What differs from the papers:

* any forward is a chain of the blocks of a partition in a topological order: the inputs of a block are then *all* values that
  cross into it, skip connections included. A value that crosses into s and into s'' crosses into every s' between, so a
  checkpoint at s' costs the bytes of its values that are not inputs of s, and no more of the state is needed than s and t;
* forward and backward ops are not paired: see `backward_blocks`. Which gradients are held follows from the order, which
  is fixed;
* bytes are counted in ``slots``, those kept rounded to the nearest number, those of peaks up, and inputs of a block
  count through its whole backward, though they may die earlier. So the table is read at several m around the budget,
  and the exact peak decides which schedule is taken;
* values of ops that may run only once stay in memory up to their last use, which the recurrence does not know.

The recurrence is optimal among its own schedules (one order of the blocks, those options); nothing is claimed beyond.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._eviction import lower_all
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import finish, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.hiremate._blocks import Chain, Option, Run, keep_options, link_up, select
from lightning_remat.solvers.hiremate._isomorphism import canonical_form
from lightning_remat.solvers.hiremate._partition import Block, partition

Costs = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

AT_ONCE = 2**20
"""Costs that are compared at once, about: they are computed for many pairs of blocks together."""


class Table:
    """The least times C(s, t, m) for every pair of blocks and every number of slots.

    Args:
        chain: the blocks.
        limit_bytes: bytes of the last slot.
        slots: number of slots, unless the sizes have a common divisor that needs fewer.
        gap_bytes: bytes held by the rest of the step between the chain's forward and its backward.

    Attributes:
        unit: bytes of a slot.
        slots: number of slots.
        cost: ``cost[s, t, m]`` are seconds, infinite where nothing fits.
        choice: ``choice[s, t, m]`` is the option of s, or where to begin without keeping anything; -1 where nothing fits.
    """

    def __init__(self, chain: Chain, limit_bytes: int, slots: int, gap_bytes: int = 0) -> None:
        self.chain, self.gap_bytes = chain, gap_bytes
        sizes = [*chain.problem.nbytes, *chain.problem.workspace, chain.problem.forward_extra_bytes, gap_bytes]
        divisor = functools.reduce(math.gcd, sizes, 0) or 1
        self.unit: float = divisor if limit_bytes // divisor <= slots else limit_bytes / slots
        self.slots = int(limit_bytes // self.unit)
        count = len(chain.links)
        width = self.slots + 1
        padded: Costs = np.empty((count, count, 2 * width))  # with what less than nothing costs before each row
        self.cost: Costs = padded[:, :, width:]
        self._below_nothing: Costs = padded[:, :, :width]
        self._shifted = np.lib.stride_tricks.sliding_window_view(padded, width, axis=2)
        self.choice: Choices = np.empty((count, count, width), dtype=np.int32)
        if not count:
            return
        links, most = chain.links, max(len(link.options) for link in chain.links)
        self._option_counts = np.array([len(link.options) for link in links])
        self._crossing: Numbers = np.array(chain.crossing, dtype=np.int64)
        # By block and option; a block with fewer options than another has some that never end.
        self._seconds: Costs = np.full((count, most), np.inf)
        self._saved, self._forward, self._backward = (np.zeros((count, most), dtype=np.int64) for _ in range(3))
        for s, link in enumerate(links):
            for number, option in enumerate(link.options):
                self._seconds[s, number], self._saved[s, number] = option.seconds, option.saved_bytes
                self._forward[s, number], self._backward[s, number] = option.forward_peak, option.backward_peak
        # By block s and number of blocks from it on: the forwards that keep nothing.
        self._bare_seconds: Costs = np.full((count, count + 1), np.inf)
        self._bare_peaks: Numbers = np.zeros((count, count + 1), dtype=np.int64)
        for s in range(count):
            bare = [link.bare for link in links[s:]]
            peaks = [one.forward_peak + chain.crossing[s][k] for k, one in enumerate(bare, s)]
            self._bare_seconds[s, : len(bare) + 1] = [0.0, *itertools.accumulate(one.forward_seconds for one in bare)]
            self._bare_peaks[s, 1 : len(bare) + 1] = list(itertools.accumulate(peaks, max))
        for length in range(count):
            step = max(1, AT_ONCE // ((most + length) * width))
            for first in range(0, count - length, step):
                self._fill(np.arange(first, min(first + step, count - length)), length)

    def _fill(self, s: Numbers, length: int) -> None:
        """The costs from each of the blocks ``s`` to the one that is ``length`` further, which need those of fewer blocks."""
        chain, t = self.chain, s + length
        options, last = self._seconds.shape[1], len(chain.links) - 1
        beside = np.array(chain.incoming)[t]
        beside[t == last] = chain.problem.forward_extra_bytes
        price: Costs = np.empty((len(s), options + length, self.slots + 1))
        needed: Numbers = np.empty((len(s), options + length), dtype=np.int64)
        own = (beside[:, None] + self._forward[s], np.array(chain.beside)[s, None] + self._backward[s])
        needed[:, :options] = np.maximum(*own)
        price[:, :options] = self._seconds[s][:, :, None]
        if length:
            kept = self._saved[s] + self._crossing[s, s + 1][:, None]
            price[:, :options] += self._with_less(s[:, None] + 1, t[:, None], kept)
            further = np.arange(1, length + 1)
            middle = s[:, None] + further
            price[:, options:] = self._with_less(middle, t[:, None], self._crossing[s[:, None], middle])
            price[:, options:] += self._bare_seconds[s[:, None], further][:, :, None]
            price[:, options:] += self.cost[s[:, None], middle - 1]
            needed[:, options:] = beside[:, None] + self._bare_peaks[s[:, None], further]
        elif t[-1] == last:
            needed[-1] = np.maximum(needed[-1], self.gap_bytes + self._saved[last])
        start = np.ceil(needed / self.unit - 1e-9)
        price[np.arange(self.slots + 1) < start[:, :, None]] = np.inf
        choice = price.argmin(axis=1)
        cost = np.take_along_axis(price, choice[:, None], axis=1)[:, 0]
        unused = (options - self._option_counts[s])[:, None]
        self._below_nothing[s, t], self.cost[s, t] = np.inf, cost
        self.choice[s, t] = np.where(np.isinf(cost), -1, np.where(choice < options, choice, choice - unused))

    def _with_less(self, s: Numbers, t: Numbers, nbytes: Numbers) -> Costs:
        """Rows C(s, t, ·) shifted: at every m what each costs with its ``nbytes`` less."""
        fewer = np.minimum(np.rint(nbytes / self.unit), self.slots + 1).astype(np.int64)
        found: Costs = self._shifted[s, t, self.slots + 1 - fewer]
        return found

    def _kept(self, s: int, option: Option) -> int:
        return option.saved_bytes + self.chain.crossing[s][s + 1]

    def _slots_of(self, nbytes: int) -> int:
        return round(nbytes / self.unit)

    def levels(self) -> list[int]:
        """Numbers of slots at which the cost of the whole chain falls, the cheapest schedule first."""
        if not self.chain.links:
            return []
        cost = self.cost[0, -1]
        falls = np.flatnonzero(cost < np.concatenate(([np.inf], cost[:-1])))
        return [int(m) for m in reversed(falls)]

    def runs(self, m: int) -> list[Run]:
        """The schedule that the cost at ``m`` slots stands for."""
        found: list[Run] = []
        chain = self.chain

        def follow(s: int, t: int, m: int) -> None:
            number, options = int(self.choice[s, t][m]), chain.links[s].options
            if number < len(options):
                found.append((s, False, options[number]))
                if s < t:
                    follow(s + 1, t, m - self._slots_of(self._kept(s, options[number])))
                found.append((s, True, options[number]))
                return
            middle = s + 1 + number - len(options)
            found.extend((k, False, None) for k in range(s, middle))
            follow(middle, t, m - self._slots_of(chain.crossing[s][middle]))
            follow(s, middle - 1, m)

        follow(0, len(chain.links) - 1, m)
        return found


def fitting(chain: Chain, budget_bytes: int, slots: int, deadline: float, tries: int = 6) -> list[NodeSequence]:
    """Schedules of a chain within the budget by their exact peaks: the cheapest in the table, and a few around it."""
    return [sequence for peak, sequence in around(chain, budget_bytes, slots, deadline, tries) if peak <= budget_bytes]


def around(
    chain: Chain, budget_bytes: int, slots: int, deadline: float, tries: int = 6
) -> list[tuple[int, NodeSequence]]:
    """Exact peaks and schedules of a chain near a budget, by what the table says they cost, the cheapest first."""
    problem = chain.problem
    headroom = budget_bytes - problem.base_bytes
    if headroom <= 0 or not chain.links:
        return []
    table = Table(chain, headroom + headroom // 2, slots)
    levels = table.levels()
    met: dict[int, tuple[int, NodeSequence]] = {}

    def fits(index: int) -> bool:
        if index not in met:
            sequence = chain.sequence(table.runs(levels[index]))
            met[index] = (problem.evaluate(sequence).peak_bytes, sequence)
        return met[index][0] <= budget_bytes

    low, high = 0, len(levels) - 1  # peaks fall along the levels, nearly
    found = False
    while low < high and clock() < deadline:
        middle = (low + high) // 2
        fit = fits(middle)
        found |= fit
        low, high = (low, middle) if fit else (middle + 1, high)
    for index in range(max(0, low - tries), min(len(levels), low + tries)):
        if not found or clock() < deadline:
            found |= fits(index)
    return [met[index] for index in sorted(met)]


def usual_counts(problem: PlainProblem, most_nodes: int = 60) -> tuple[int, ...]:
    """One or three numbers of blocks, for blocks of about ``most_nodes`` forward nodes at most.

    The time for the options of a block grows with the square of its nodes.
    """
    count = 12
    while problem.boundary > most_nodes * count:
        count *= 2
    return (count, 2 * count, 4 * count)[: 3 if count < 48 else 1]


@register("rotor")
def rotor(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    blocks: int | Sequence[int] | None = None,
    options: int = 12,
    slots: int = 400,
    partitioner: str = "chain",
    lower: bool = True,
) -> Answer:
    """The recurrence C(s, t, m) on the forward as a chain of blocks.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        blocks: about how many blocks, or several such numbers, each of which is tried; ``None`` for `usual_counts`.
        options: the most options of a block.
        slots: steps in which memory is counted.
        partitioner: name of the partitioner that makes the blocks (see `partitioners`); its lower levels are not used.
        lower: whether, where no schedule fits, those near the budget are lowered to it (`lower_all`).
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if not problem.boundary:
        return Answer(None, Status.INFEASIBLE, notes=("no forward node that could be computed again",))
    notes: list[str] = []
    found: list[NodeSequence] = []
    over: list[NodeSequence] = []
    for chain in chains(problem, deadline, blocks, options, partitioner, notes):
        near = around(chain, budget_bytes, slots, deadline)
        fit = [sequence for peak, sequence in near if peak <= budget_bytes]
        found += fit[:3]
        over += [sequence for peak, sequence in near if peak > budget_bytes]
        notes[-1] += ": fits" if fit else ": does not fit"
    if not found and lower:
        lowered = lower_all(problem, over, budget_bytes, deadline)
        notes.append(f"{len(lowered)} of {len(over)} schedules that held too much were lowered")
        found += lowered
    best = finish(problem, found, budget_bytes, deadline)
    if best is None:
        status = Status.TIMEOUT if clock() > deadline else Status.INFEASIBLE
        return Answer(None, status, notes=tuple(notes))
    return Answer(best, Status.FEASIBLE, notes=tuple(notes))


def chains(
    problem: PlainProblem,
    deadline: float,
    blocks: int | Sequence[int] | None = None,
    options: int = 12,
    partitioner: str = "chain",
    notes: list[str] | None = None,
) -> Iterator[Chain]:
    """The forward as chains of blocks with their options, one for each number of blocks; `rotor` says what the options mean."""
    known: dict[Hashable, tuple[Option, ...]] = {}

    def options_of(_: int, part: PlainProblem) -> tuple[Option, ...]:
        form = canonical_form(part)
        if form not in known:
            known[form] = select(keep_options(part, deadline), options)
        return known[form]

    for count in dict.fromkeys([blocks] if isinstance(blocks, int) else blocks or usual_counts(problem)):
        if clock() > deadline:
            break
        tops: tuple[Block, ...] = partition(
            partitioner, problem, top_size=count, block_size=max(2, len(problem) // count)
        )
        known_before = len(known)
        chain = link_up(problem, [block.nodes for block in tops], options_of)
        if notes is not None:
            notes.append(f"{len(tops)} blocks, {len(known) - known_before} of them new")
        yield chain
