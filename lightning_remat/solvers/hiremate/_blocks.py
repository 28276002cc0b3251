"""Blocks with options, and chains of them: what "rotor", "h_ilp" and "hiremate" recombine.

An option is one way to run the forward and the backward of a block (Gusak et al. 2025, section 3.2.2): a schedule of
the block on its own. What it keeps in memory between the two is the paper's phantom node. Most options here come from
`keep_options`: sets of the block's values to keep, this project's own.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused
from lightning_remat.solvers.common._rollout import candidates, rollout
from lightning_remat.solvers.hiremate._isomorphism import subproblem
from lightning_remat.solvers.hiremate._partition import backward_blocks


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run the forward and the backward of a block.

    Attributes:
        sequence: the block's own nodes; before the boundary its forward, after it its backward.
        forward_seconds, backward_seconds: time of either side.
        saved_bytes: bytes held between the two, beside the block's outputs (the paper's phantom node).
        forward_peak, backward_peak: peak in bytes of either side, of the block's own values and of gradients that come
            in.
    """

    sequence: NodeSequence
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    forward_peak: int
    backward_peak: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def measure(problem: PlainProblem, sequence: NodeSequence) -> Option:
    """What a sequence costs as an option of the block ``problem`` (see `subproblem`)."""
    seconds = [problem.seconds[node] for node in sequence.nodes]
    memory = problem.memory(sequence)
    at = sequence.boundary
    return Option(
        sequence,
        sum(seconds[:at]),
        sum(seconds[at:]),
        sum([problem.nbytes[v] for v in alive_after(problem, sequence, at) - set(problem.forward_outputs)]),
        max(memory[:at], default=0),
        max(memory[at:], default=0),
    )


def alive_after(problem: PlainProblem, sequence: NodeSequence, count: int) -> set[int]:
    """Values in memory when the first ``count`` evaluations have run, tangents left out."""
    frees = problem.last_uses(sequence)
    alive: set[int] = set()
    for position in range(count):
        alive.update(problem.writes[sequence.nodes[position]])
        alive.difference_update(frees[position + 1])
    return alive


def undominated(options: Iterable[Option]) -> list[Option]:
    """Options that no other one dominates in time, kept bytes and both peaks; sorted by kept bytes."""

    def price(o: Option) -> tuple[float, ...]:
        return (o.saved_bytes, o.seconds, o.backward_peak, o.forward_peak)

    found: list[Option] = []
    for option in sorted(options, key=price):
        if not any(all(a <= b for a, b in zip(price(other), price(option), strict=True)) for other in found):
            found.append(option)
    return found


def select(options: Sequence[Option], count: int) -> tuple[Option, ...]:
    """At most ``count`` options far apart: the largest, the smallest, the one closest to the middle, and so on (section 3.2.2).

    The paper compares peaks, this function kept bytes: blocks often peak in their backward, whatever they keep.
    """
    left = sorted(options, key=lambda o: o.saved_bytes)
    if len(left) <= count:
        return tuple(left)
    chosen = [left.pop(), left.pop(0)][: max(count, 1)]
    while len(chosen) < count:
        chosen.append(max(left, key=lambda o: min([abs(o.saved_bytes - c.saved_bytes) for c in chosen])))
        left.remove(chosen[-1])
    return tuple(sorted(chosen, key=lambda o: o.saved_bytes))


def keep_sets(problem: PlainProblem, deadline: float) -> Iterator[frozenset[int]]:
    """Sets of values to keep: none, grown by the most seconds saved a byte; then all, shrunk by the fewest lost."""
    choices = candidates(problem)

    def walk(keep: frozenset[int], sign: int) -> Iterator[frozenset[int]]:
        def cost(kept: frozenset[int]) -> float:
            return sum([problem.seconds[node] for node in rollout(problem, kept).nodes])

        def changed(choice: frozenset[int]) -> frozenset[int]:
            return keep | choice if sign > 0 else keep - choice

        def price(choice: frozenset[int]) -> float:
            """Seconds lost (or, negative, saved) a byte."""
            return (cost(changed(choice)) - now) / max(1, sum([problem.nbytes[v] for v in changed(choice) ^ keep]))

        now = cost(keep)
        queue = [(price(choice), order, choice) for order, choice in enumerate(choices)]
        heapq.heapify(queue)
        while queue and clock() < deadline:
            _, order, choice = heapq.heappop(queue)
            if changed(choice) == keep:
                continue
            fresh = price(choice)
            if queue and fresh > queue[0][0] + 1e-9 * abs(fresh):
                heapq.heappush(queue, (fresh, order, choice))
                continue
            keep = changed(choice)
            now = cost(keep)
            yield keep

    yield frozenset()
    yield from walk(frozenset(), 1)
    everything = frozenset(v for choice in choices for v in choice)
    yield everything
    yield from walk(everything, -1)


def keep_options(problem: PlainProblem, deadline: float) -> list[Option]:
    """Undominated options that keep a set of values and compute the others again, once or anew for each reader."""
    found: dict[tuple[int, ...], Option] = {}
    forward = frozenset(v for v, producer in enumerate(problem.producer) if 0 <= producer < problem.boundary)
    for keep in keep_sets(problem, deadline):
        for forget in (frozenset[int](), forward - keep):
            sequence = rollout(problem, keep, forget)
            if len(sequence.nodes) <= 4 * len(problem) and sequence.nodes not in found:
                found[sequence.nodes] = measure(problem, sequence)
    return undominated(found.values())


# -- chains ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Link:
    """A block of a chain: its nodes in the whole problem, its own problem, and its options."""

    nodes: tuple[int, ...]
    problem: PlainProblem
    options: tuple[Option, ...]

    @functools.cached_property
    def bare(self) -> Option:
        """The forward that keeps nothing but the block's outputs: the nodes that these depend on."""
        needed = set(self.problem.forward_outputs)
        nodes: list[int] = []
        for node in range(self.problem.boundary - 1, -1, -1):
            if needed.intersection(self.problem.writes[node]):
                nodes.append(node)
                needed.update(self.problem.reads[node])
        return measure(self.forward_problem, NodeSequence(tuple(reversed(nodes)), len(nodes)))

    @functools.cached_property
    def forward_problem(self) -> PlainProblem:
        """The block's problem without a backward: no tangents, and no values that must exist at the end."""
        return dataclasses.replace(self.problem, finals=(), tangents=[])


Run = tuple[int, bool, "Option | None"]
"""A step of a chain's schedule: the block, whether it is the block's backward, and the option (none: nothing is kept)."""


class Chain:
    """Blocks of a problem in a topological order, with the bytes that cross from each to the next.

    Attributes:
        links: the blocks.
        inputs: values that cross into each block from those before, and, as the last entry, out of the last block.
        incoming: bytes of gradients, and of what the caller was handed, held when the backward of each block begins.
        beside: the part of ``incoming`` that the block's own peaks leave out.
    """

    def __init__(self, problem: PlainProblem, links: Sequence[Link]) -> None:
        self.problem, self.links = problem, tuple(links)
        count = len(self.links)
        place = {node: index for index, link in enumerate(self.links) for node in link.nodes}
        outputs = {*problem.forward_outputs, *problem.forward_transient}
        self.inputs: list[set[int]] = [set() for _ in range(count + 1)]
        gradients = [0] * count
        finals = set(problem.finals)
        for v, producer in enumerate(problem.producer):
            readers = [(place[r], problem.is_backward[r]) for r in problem.consumers[v]]
            if 0 <= producer < problem.boundary:
                last = max([at for at, backward in readers if not backward], default=-1)
                for index in range(place[producer] + 1, count + 1 if v in outputs else last + 1):
                    self.inputs[index].add(v)
                continue
            first = place[producer] if producer >= 0 else count
            last = -1 if v in finals else min([at for at, _ in readers], default=first)
            for index in range(max(last, 0), min(first, count)):
                gradients[index] += problem.nbytes[v]
        held = sum([problem.nbytes[v] for v in problem.forward_outputs])
        self.incoming = [own + held for own in gradients]
        self.beside = []
        for index, link in enumerate(self.links):
            counted = sum([link.problem.nbytes[v] for v in link.problem.tangents])
            taken = [v for v in problem.forward_outputs if place[problem.producer[v]] == index]
            self.beside.append(self.incoming[index] - counted - sum([problem.nbytes[v] for v in taken]))

    @functools.cached_property
    def crossing(self) -> list[list[int]]:
        """``crossing[s][k]``: bytes of the inputs of block k that are not inputs of block s."""
        nbytes = self.problem.nbytes
        return [[sum([nbytes[v] for v in later - earlier]) for later in self.inputs] for earlier in self.inputs]

    def sequence(self, runs: Iterable[Run], forward_runs: int | None = None) -> NodeSequence:
        """The problem's nodes in the order of ``runs``, without unread ones and repetitions that are not allowed.

        The boundary lies after the first ``forward_runs`` of them, or before the first that is a backward.
        """
        nodes: list[int] = []
        boundary = -1
        ran: set[int] = set()
        met: set[int] = set()
        for number, (index, backward, option) in enumerate(runs):
            link = self.links[index]
            own: Iterable[int] = range(
                link.problem.boundary
            )  # the first time, for what runs once and for random numbers
            if index in met:
                own = link.bare.sequence.nodes
            if option is not None:
                at = option.sequence.boundary
                own = option.sequence.nodes[at:] if backward else option.sequence.nodes[:at]
            met.add(index)
            if boundary < 0 and (backward if forward_runs is None else number == forward_runs):
                boundary = len(nodes)
            fresh = [link.nodes[n] for n in own if link.problem.recomputable[n] or link.nodes[n] not in ran]
            ran.update(fresh)
            nodes.extend(fresh)
        return drop_unused(self.problem, NodeSequence(tuple(nodes), boundary if boundary >= 0 else len(nodes)))


def link_up(
    problem: PlainProblem,
    groups: Sequence[Sequence[int]],
    options_of: Callable[[int, PlainProblem], Sequence[Option]],
) -> Chain:
    """The chain of the groups of forward nodes; ``options_of`` gives the options of a block (its index, its own problem)."""
    links = []
    for index, (forward, backward) in enumerate(zip(groups, backward_blocks(problem, groups), strict=True)):
        part = subproblem(problem, forward, backward)
        links.append(Link(part.nodes, part.problem, tuple(options_of(index, part.problem))))
    return Chain(problem, links)
