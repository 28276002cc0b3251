"""Partitions of the forward into a hierarchy of blocks, and the backward nodes that belong to each block.

H-Partition is Algorithm 1 of HiRemate (Gusak et al. 2025, section 3.1 and appendix A): from bottom to top, the
candidate group that causes the least memory pressure (eq. 1) is wrapped next. Partitioners are found by name, as
solvers are: a user's own takes a problem and two sizes, and returns the top blocks in a topological order. The
partitioner "chain" is this project's own.

What differs from the paper:

* the paper's closest common ancestor a(x) must lie on *every* path to x for its Property 1 to hold, so it is x's immediate
  dominator;
* "soft dependencies" (appendix C.1.2) are the captured order of random nodes and of those that may run only once: they
  count for convexity, and no memory flows along them;
* a graph of ops has many entries (nodes without predecessors: constants, masks, random draws), and an ancestor common
  to all would be the added one. Of the entries that a node depends on, it belongs to the one that most nodes depend on;
  ancestors are looked for among the nodes of one entry, and a group takes in the nodes of other entries that serve it
  alone. The paper ignores inputs without a gradient for the same end (C.1.3);
* a group that holds its own a(x) need not have Property 1, so Theorem A.4 does not cover it. Each group is therefore tested
  against the quotient graph, in which it must leave no cycle, before it is wrapped;
* forward and backward ops do not come in pairs here: `backward_blocks` assigns each backward node to the last block after which
  all the forward values that it reads are at hand.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import networkx as nx

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._coarsen import coarsen
from lightning_remat.solvers.common._plugins import Registry
from lightning_remat.solvers.common._problem import PlainProblem

_SOURCE = -1
"""The common ancestor that is added above all entries."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Forward nodes that are planned together.

    Attributes:
        nodes: forward nodes, in the captured order.
        parts: the blocks that it consists of, in a topological order; none for a block of the lowest level.
    """

    nodes: tuple[int, ...]
    parts: tuple[Block, ...] = ()

    @property
    def depth(self) -> int:
        """Number of levels of the hierarchy below and with this block."""
        return 1 + max([part.depth for part in self.parts], default=0)


class Partitioner(Protocol):
    """Takes a problem and the most nodes of the top level and of a block; returns top blocks in topological order."""

    def __call__(self, problem: PlainProblem, *, top_size: int, block_size: int) -> tuple[Block, ...]: ...


PARTITIONERS: Registry[Partitioner] = Registry("partitioner", "lightning_remat.partitioners")


def register_partitioner(name: str) -> Callable[[Partitioner], Partitioner]:
    """Decorator that adds a partitioner under ``name``.

    Raises:
        SolverError: when the name is taken.
    """

    def add(function: Partitioner) -> Partitioner:
        PARTITIONERS.add(name, function)
        return function

    return add


def partitioners() -> tuple[str, ...]:
    """Names of all registered partitioners, and of those that other packages offer through an entry point."""
    return PARTITIONERS.names()


def partition(name: str, problem: PlainProblem, *, top_size: int, block_size: int) -> tuple[Block, ...]:
    """The top blocks that a registered partitioner makes of the forward of ``problem``, checked.

    Raises:
        SolverError: for an unknown name, another package's that cannot be loaded, or blocks that do not cover the forward
            once in a topological order.
    """
    blocks = PARTITIONERS.get(name)(problem, top_size=top_size, block_size=block_size)
    _check(problem, blocks, range(problem.boundary), name)
    return blocks


def _check(problem: PlainProblem, blocks: Sequence[Block], nodes: Iterable[int], name: str) -> None:
    if sorted(node for block in blocks for node in block.nodes) != list(nodes):
        raise SolverError(f"partitioner {name!r}: every forward node must lie in one block of each level")
    place = {node: index for index, block in enumerate(blocks) for node in block.nodes}
    for before, after in dependencies(problem):
        if place.get(before, -1) > place.get(after, len(blocks)):
            raise SolverError(f"partitioner {name!r}: {problem.name(after)} comes before {problem.name(before)}")
    for block in blocks:
        if block.parts:
            _check(problem, block.parts, sorted(block.nodes), name)


def dependencies(problem: PlainProblem) -> list[tuple[int, int]]:
    """Edges between forward nodes, soft dependencies included."""
    soft = [pair for nodes in _fixed_orders(problem, range(problem.boundary)) for pair in itertools.pairwise(nodes)]
    return [*_data_edges(problem), *soft]


def _data_edges(problem: PlainProblem) -> list[tuple[int, int]]:
    return [(p, node) for node in range(problem.boundary) for p in problem.predecessors[node]]


def _fixed_orders(problem: PlainProblem, nodes: Iterable[int]) -> tuple[list[int], list[int]]:
    """Nodes whose first evaluations keep the captured order: those that draw random numbers, and those that run once."""
    listed = list(nodes)
    return [n for n in listed if problem.random[n]], [n for n in listed if not problem.recomputable[n]]


def backward_blocks(problem: PlainProblem, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The backward nodes of each group of forward nodes, so that running the groups' backwards in reverse order is legal.

    Each node goes to the last group (whose backward is first) that its predecessors and the forward values that it
    reads allow; a node that reads nothing goes to the group of its first reader.
    """
    count = len(groups)
    place = {node: index for index, nodes in enumerate(groups) for node in nodes}
    at_hand: list[int] = []  # last group in whose backward a forward value is at hand without being kept for it
    for v, producer in enumerate(problem.producer):
        readers = [place[r] for r in problem.consumers[v] if r < problem.boundary]
        at_hand.append(max([place[producer], *readers]) if 0 <= producer < problem.boundary else count - 1)
    level: dict[int, int] = {}
    before: dict[int, list[int]] = {node: [] for node in range(problem.boundary, len(problem))}
    for node, earlier in before.items():
        earlier += [p for p in problem.predecessors[node] if p >= problem.boundary]
    for nodes in _fixed_orders(problem, before):
        for first, second in itertools.pairwise(nodes):
            before[second].append(first)
    for node, earlier in before.items():
        level[node] = min([*(at_hand[v] for v in problem.reads[node]), *(level[p] for p in earlier), count - 1])
    for node in before:
        if not problem.reads[node] and not before[node] and problem.recomputable[node] and not problem.random[node]:
            level[node] = max([level[r] for v in problem.writes[node] for r in problem.consumers[v]], default=count - 1)
    found: list[list[int]] = [[] for _ in groups]
    for node in before:
        found[level[node]].append(node)
    return found


def sequences_of(problem: PlainProblem, blocks: Sequence[Block], count: int) -> list[tuple[Block, ...]]:
    """Blocks wrapped into about ``count`` runs, in two ways: cut where the fewest bytes cross, and near equal shares.

    "rotor" keeps all values that cross into a block while that block and those after it are planned together. So it
    needs ends that few bytes cross, which not all blocks of a partition have.
    """
    place = {node: index for index, block in enumerate(blocks) for node in block.nodes}
    crossing = [0] * (len(blocks) + 1)
    for v, producer in enumerate(problem.producer):
        readers = [place[r] for r in problem.consumers[v] if r in place]
        if producer in place and readers:
            for index in range(place[producer], max(readers)):
                crossing[index + 1] += problem.nbytes[v]
    inner = range(1, len(blocks))
    level = sorted([crossing[k] for k in inner])[: max(count - 1, 0)][-1:]
    thin = [k for k in inner if level and crossing[k] <= level[0]]  # all of equal width: identical blocks stay so
    done = [0, *itertools.accumulate(len(block.nodes) for block in blocks)]
    share = done[-1] / max(count, 1)
    spread = set()
    for i in range(1, count):
        window = [k for k in inner if (i - 0.5) * share <= done[k] < (i + 0.5) * share]
        if window:
            spread.add(min(window, key=lambda k: (crossing[k], abs(done[k] - i * share))))
    found: dict[tuple[Block, ...], None] = {}
    for cuts in (thin, sorted(spread)):
        pairs = itertools.pairwise([0, *cuts, len(blocks)])
        found[tuple(_wrapped(blocks[start:end]) for start, end in pairs)] = None
    return list(found)


def _wrapped(parts: Sequence[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    nodes = tuple(sorted(node for part in parts for node in part.nodes))
    return Block(nodes, tuple(parts) if len(nodes) > len(parts) else ())  # single nodes: the lowest level


@register_partitioner("chain")
def chain(problem: PlainProblem, *, top_size: int, block_size: int) -> tuple[Block, ...]:
    """At most ``top_size`` runs of the captured order, cut where few bytes are in flight (see `coarsen`).

    ``block_size`` is not used.
    """
    del block_size
    if not problem.boundary:
        return ()
    runs = coarsen(problem, 2 * top_size).runs
    starts = [run.start for run in runs if run.start < problem.boundary]
    ends = [*starts[1:], problem.boundary]
    return tuple(Block(tuple(range(start, end))) for start, end in zip(starts, ends, strict=True))


@register_partitioner("h_partition")
def h_partition(
    problem: PlainProblem, *, top_size: int = 30, block_size: int = 20, alpha: float = 0.5
) -> tuple[Block, ...]:
    """H-Partition, Algorithm 1 of section 3.1.

    Args:
        problem: the problem, of which the forward is partitioned.
        top_size: M^t, the most nodes of the top level.
        block_size: M^l, the most nodes of a block; ``top_size`` where that is less (M^t >= M^l).
        alpha: exponent of the score (eq. 1).

    Returns:
        The top blocks, in a topological order: more than ``top_size`` of them where no candidate group is left.
    """
    level = tuple(Block((node,)) for node in range(problem.boundary))
    while len(level) > top_size:  # line 4
        wrapped = _Level(problem, level, min(block_size, max(top_size, 2)), alpha).wrap(top_size)
        if len(wrapped) == len(level):
            break
        level = wrapped  # lines 11 and 12
    return level


class _Level:
    """One pass of lines 5 to 12 of Algorithm 1: the graph whose nodes are blocks, and the groups that form in it.

    A unit is a set of the graph's nodes that are kept together: one node, or a group. ``order`` is a topological order of the
    units, with ``None`` where units were before they were merged into another.
    """

    def __init__(self, problem: PlainProblem, blocks: tuple[Block, ...], block_size: int, alpha: float) -> None:
        self.problem, self.blocks, self.block_size, self.alpha = problem, blocks, block_size, alpha
        place = {node: index for index, block in enumerate(blocks) for node in block.nodes}
        count = len(blocks)
        self.before: list[set[int]] = [set() for _ in blocks]  # by data, and by soft dependencies
        self.predecessors: list[set[int]] = [set() for _ in blocks]  # by data alone
        self.successors: list[set[int]] = [set() for _ in blocks]
        for first, second in dependencies(problem):
            if place[first] != place[second]:
                self.before[place[second]].add(place[first])
        for first, second in _data_edges(problem):
            if place[first] != place[second]:
                self.predecessors[place[second]].add(place[first])
                self.successors[place[first]].add(place[second])
        self.values: list[set[int]] = [set() for _ in blocks]  # values that each block reads or writes
        self.readers: dict[int, set[int]] = {}
        self.writer: dict[int, int] = {}
        self.handed_out = {*problem.forward_outputs, *problem.forward_transient}
        for index, block in enumerate(blocks):
            for node in block.nodes:
                for v in problem.reads[node]:
                    self.readers.setdefault(v, set()).add(index)
                    self.values[index].add(v)
                for v in problem.writes[node]:
                    self.writer[v] = index
                    self.values[index].add(v)
        self.unit = list(range(count))
        self.members: dict[int, frozenset[int]] = {index: frozenset([index]) for index in range(count)}
        self.place: dict[int, int] = {index: index for index in range(count)}
        self.order: list[int | None] = list(range(count))

    def candidates(self) -> list[frozenset[int]]:
        """Line 5: the nodes between a(x) and x, with and without either, where they are at most ``block_size``."""
        entry = self._entries()
        graph: nx.DiGraph[int] = nx.DiGraph()
        for index, before in enumerate(self.predecessors):
            inside = [p for p in before if entry[p] == entry[index]]
            graph.add_edges_from((p, index) for p in inside or (_SOURCE,))
        dominators = nx.immediate_dominators(graph, _SOURCE)
        found: dict[frozenset[int], None] = {}
        for x in range(len(self.blocks)):
            head = dominators[x]
            between = {x}
            stack = [x]
            while stack and len(between) <= self.block_size + 1:
                fresh = {p for p in graph.predecessors(stack.pop()) if p not in (head, _SOURCE) and p not in between}
                between |= fresh
                stack.extend(fresh)
            if stack:
                continue
            with_head = between | {head} if head != _SOURCE else between
            for group in (between, with_head, between - {x}, with_head - {x}):
                whole = self._absorb(group, entry)
                if 1 < len(whole) <= self.block_size:
                    found[whole] = None
        return list(found)

    def _entries(self) -> list[int]:
        """For each node, the entry that it belongs to: of those it depends on, the one that most nodes depend on."""
        count = len(self.blocks)
        below = [0] * count  # bit sets of descendants
        for index in range(count - 1, -1, -1):
            for after in self.successors[index]:
                below[index] |= below[after] | 1 << after
        entries = [index for index in range(count) if not self.predecessors[index]]
        found = [_SOURCE] * count
        for entry in sorted(entries, key=lambda index: (-below[index].bit_count(), index)):
            stack = [entry]
            while stack:
                index = stack.pop()
                if found[index] == _SOURCE:
                    found[index] = entry
                    stack.extend(self.successors[index])
        return found

    def _absorb(self, group: set[int], entry: list[int]) -> frozenset[int]:
        """The group with those nodes of other entries that serve the group alone: constants, masks, random draws."""
        whole = set(group)
        stack = list(group)
        while stack and len(whole) <= self.block_size:
            index = stack.pop()
            for p in self.predecessors[index] - whole:
                if self.successors[p] <= whole and (index not in group or entry[p] != entry[index]):
                    whole.add(p)
                    stack.append(p)
        return frozenset(whole)

    def score(self, group: frozenset[int]) -> float:
        """Eq. 1: bytes of the group's inputs and outputs, times a power of the share of compute nodes among its nodes.

        Compute nodes are the group's blocks here, data nodes the values that these read or write.
        """
        touched = set().union(*[self.values[index] for index in group])
        surface = 0
        for v in touched:
            writer, readers = self.writer.get(v, _SOURCE), self.readers.get(v, set())
            if writer not in group or not readers <= group or v in self.handed_out:
                surface += self.problem.nbytes[v]
        return float(surface * (len(group) / (len(group) + len(touched))) ** self.alpha)

    def wrap(self, top_size: int) -> tuple[Block, ...]:
        """Lines 6 to 12: the blocks of the next level."""
        alive: dict[int, frozenset[int]] = dict(enumerate(self.candidates()))
        touching: list[set[int]] = [set() for _ in self.blocks]
        queue = []
        for number, group in alive.items():
            for index in group:
                touching[index].add(number)
            queue.append((self.score(group), min(group), len(group), number))
        heapq.heapify(queue)
        while queue and len(self.members) > top_size:  # line 6
            _, _, size, number = heapq.heappop(queue)
            group = alive.get(number, frozenset())
            if size != len(group):
                continue  # it has grown, or is gone
            del alive[number]
            if len({self.unit[index] for index in group}) < 2 or not self._merge(group):  # lines 7 and 8
                continue
            for other in sorted(set().union(*[touching[index] for index in group])):  # line 9
                if other not in alive or group <= alive[other]:
                    continue
                union = alive[other] | group
                if len(union) > self.block_size:
                    del alive[other]
                    continue
                alive[other] = union
                for index in group:
                    touching[index].add(other)
                heapq.heappush(queue, (self.score(union), min(union), len(union), other))
        return tuple(self._block(unit) for unit in self.order if unit is not None)

    def _merge(self, group: frozenset[int]) -> bool:
        """Make one unit of ``group`` unless a path leaves it and comes back; keep ``order`` topological."""
        units = {self.unit[index] for index in group}
        places = sorted(self.place[unit] for unit in units)
        span = range(places[0], places[-1] + 1)
        after: set[int] = set()  # units between that the group reaches
        for position in span:
            unit = self.order[position]
            if unit is None:
                continue
            sources = {self.unit[p] for index in self.members[unit] for p in self.before[index]} - {unit}
            if unit in units:
                if sources & after:
                    return False
            elif sources & (units | after):
                after.add(unit)
        between = [unit for position in span if (unit := self.order[position]) is not None and unit not in units]
        merged = min(units)
        self.members[merged] = frozenset().union(*[self.members.pop(unit) for unit in units])
        for index in self.members[merged]:
            self.unit[index] = merged
        new = [*(u for u in between if u not in after), merged, *(u for u in between if u in after)]
        for position, unit in zip(span, [*new, *[None] * (len(span) - len(new))], strict=True):
            self.order[position] = unit
            if unit is not None:
                self.place[unit] = position
        return True

    def _block(self, unit: int) -> Block:
        members = sorted(self.members[unit])
        return _wrapped([self.blocks[index] for index in members])
