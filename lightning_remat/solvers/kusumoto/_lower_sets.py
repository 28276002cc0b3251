"""Lower sets of the forward graph, and the recomputation strategies that they stand for.

Kusumoto et al. 2019, "A Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient Backpropagation",
sections 2, 3 and 4.3. A **lower set** is a set of forward nodes that no edge enters from outside. An increasing
sequence of them, ending with all nodes, cuts the forward into segments; its **canonical strategy** caches each lower
set's boundary (the nodes read from outside the set), gives up the rest, and computes the rest of a segment again before
the segment's backward.

Sets of nodes are Python integers here, one bit a node; nodes are numbered in a topological order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

from lightning_remat.errors import SolverError
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import drop_unused


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardGraph:
    """The paper's G = (V, E) (section 2), its nodes in a topological order.

    Attributes:
        predecessors: of each node.
        times: T_v, in whole units of time (see `forward_graph`).
        sizes: M_v, in bytes.
        pinned: the set of nodes that are cached once computed, whatever the strategy (empty in the paper): those that may
            not be computed twice, and those whose results the caller keeps.
    """

    predecessors: tuple[tuple[int, ...], ...]
    times: tuple[int, ...]
    sizes: tuple[int, ...]
    pinned: int = 0

    def __len__(self) -> int:
        return len(self.predecessors)

    @property
    def everything(self) -> int:
        """The set of all nodes."""
        return (1 << len(self)) - 1

    @cached_property
    def below(self) -> list[int]:
        """The nodes that each node is reachable from, itself among them: L^v of section 4.3."""
        found: list[int] = []
        for node, before in enumerate(self.predecessors):
            reach = 1 << node
            for p in before:
                reach |= found[p]
            found.append(reach)
        return found

    @cached_property
    def above(self) -> list[int]:
        """The nodes reachable from each node, itself among them."""
        found = [1 << node for node in range(len(self))]
        for node in range(len(self) - 1, -1, -1):
            for p in self.predecessors[node]:
                found[p] |= found[node]
        return found


def bits(nodes: int) -> Iterator[int]:
    """The nodes of a set, in order."""
    while nodes:
        low = nodes & -nodes
        yield low.bit_length() - 1
        nodes ^= low


def lower_sets(graph: ForwardGraph) -> list[int]:
    """All lower sets, the empty one and the whole among them (section 2). There can be 2^#V: count them first."""
    found = [0]
    for node, before in enumerate(graph.predecessors):
        needed = sum(1 << p for p in before)
        # A lower set of the nodes so far is one of the whole graph too: nothing is made in vain, nor twice.
        found += [nodes | 1 << node for nodes in found if nodes & needed == needed]
    return found


def count_lower_sets(graph: ForwardGraph, patience: int = 50_000) -> int | None:
    """#L_G without listing them, or ``None`` where that takes more than ``patience`` steps.

    Either a node is outside of a lower set, and with it all that is reachable from it, or it is inside, with all that
    it is reachable from. The nodes left in either case fall into components without an edge between them, whose counts
    multiply.
    """
    above, below = graph.above, graph.below
    known: dict[int, int] = {0: 1}

    def touching(nodes: int) -> Iterator[int]:
        while nodes:
            part = reach = nodes & -nodes
            while reach:
                node = reach.bit_length() - 1
                part |= 1 << node
                reach = (reach | (above[node] | below[node]) & nodes & ~part) & ~(1 << node)
            yield part
            nodes &= ~part

    stack = [graph.everything]
    while stack:
        nodes = stack[-1]
        if nodes in known:
            stack.pop()
            continue
        if len(known) > patience:
            return None
        # Branch on the node that decides the most others, and of those on the one that does so most evenly.
        decided = [((above[v] & nodes).bit_count(), (below[v] & nodes).bit_count(), v) for v in bits(nodes)]
        pivot = max(decided, key=lambda d: (d[0] + d[1], min(d[0], d[1])))[2]
        halves = [list(touching(nodes & ~above[pivot])), list(touching(nodes & ~below[pivot]))]
        missing = [part for half in halves for part in half if part not in known]
        if missing:
            stack += missing
            continue
        stack.pop()
        total = 0
        for half in halves:
            product = 1
            for part in half:
                product *= known[part]
            total += product
        known[nodes] = total
    return known[graph.everything]


def pruned_family(graph: ForwardGraph) -> list[int]:
    """L_G^Pruned: for each node, the lower set of all that it is reachable from (section 4.3). #V sets at most."""
    return list(dict.fromkeys(graph.below))


# -- to and from the problem ----------------------------------------------------------------------------------------------


def forward_graph(problem: PlainProblem, resolution: int = 2000) -> ForwardGraph:
    """The forward part of a joint graph, loss included, as the paper's graph.

    Args:
        problem: the problem.
        resolution: into how many units the time of the whole forward is divided. Times that are whole numbers of
            seconds and add up to no more than this are left as they are.

    Raises:
        SolverError: for a resolution below 1.
    """
    if resolution < 1:
        raise SolverError(f"resolution={resolution!r}: give the number of units of time in one forward, 1 or more")
    forward = range(problem.boundary)
    seconds = problem.seconds[: problem.boundary]
    total = sum(seconds)
    unit = 1.0 if total <= resolution and all(s == int(s) for s in seconds) else total / resolution
    kept = frozenset(problem.forward_outputs)
    pinned = [n for n in forward if not problem.recomputable[n] or kept.intersection(problem.writes[n])]
    return ForwardGraph(
        tuple(problem.predecessors[n] for n in forward),
        tuple(round(s / unit) for s in seconds),
        tuple(sum(problem.nbytes[v] for v in problem.writes[n]) for n in forward),
        sum(1 << n for n in pinned),
    )


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A canonical strategy on the joint graph.

    Attributes:
        sequence: its nodes in order.
        blocks: for each position, a number that is the same for all of one segment's forward, or of one segment's
            recomputation and backward.
    """

    sequence: NodeSequence
    blocks: tuple[int, ...]


def canonical(problem: PlainProblem, graph: ForwardGraph, strategy: Sequence[int]) -> Canonical:
    """The canonical strategy of an increasing sequence of lower sets (section 3), as a sequence of nodes.

    Args:
        problem: the joint graph.
        graph: its `forward_graph`.
        strategy: L_1 to L_k, the last of them all forward nodes.

    Forward: the segments one after the other. Backward: from the last segment to the first, what the segment's backward
    nodes read and is not there is computed again, and then they run. A backward node runs in the turn of the segment of
    the latest forward value that it reads, or in that of a backward node that it depends on where this runs later. Two
    things are left out that the paper's cost counts: the last segment is not given up only to be computed again, and of
    another one no more is computed again than its backward reads. Where the segments would change the order of random
    forward nodes, or of those that run once, the whole forward keeps the captured order.
    """
    boundary, producer = problem.boundary, problem.producer
    segment = [0] * boundary
    inside = 0
    cached = graph.pinned
    for index, nodes in enumerate(strategy):
        for node in bits(nodes & ~inside):
            segment[node] = index
        inside = nodes
        cached |= lower_boundary(graph, nodes)
    last = len(strategy) - 1
    order = sorted(range(boundary), key=lambda node: (segment[node], node))
    for fixed in (problem.random, [not flag for flag in problem.recomputable]):
        ranks = [node for node in order if fixed[node]]
        if ranks != sorted(ranks):
            order = list(range(boundary))
            break

    present = bytearray(len(problem.nbytes))
    for v, writer in enumerate(producer):
        if writer < 0 or (writer < boundary and (cached >> writer & 1 or segment[writer] == last)):
            present[v] = 1
    stage = _stages(problem, segment, last)
    turns: list[list[int]] = [[] for _ in strategy]
    for node in range(boundary, len(problem)):
        turns[stage[node]].append(node)
    nodes_in_order = list(order)
    for turn in reversed(turns):
        again: set[int] = set()
        stack = list(turn)
        while stack:
            missing = {producer[v] for v in problem.reads[stack.pop()] if not present[v]}
            missing = {n for n in missing if n < boundary and n not in again}
            again |= missing
            stack += missing
        nodes_in_order += [*sorted(again), *turn]
        for node in (*again, *turn):
            for v in problem.writes[node]:
                present[v] = 1
    sequence = drop_unused(problem, NodeSequence(tuple(nodes_in_order), boundary))
    # Backward turns are numbered after the forward's, from k on; what is computed again belongs to the turn that follows.
    blocks = [0] * len(sequence.nodes)
    turn_now = 2 * len(strategy) - 1
    for position in range(len(sequence.nodes) - 1, -1, -1):
        node = sequence.nodes[position]
        if position < sequence.boundary:
            blocks[position] = segment[node]
        else:
            turn_now = 2 * len(strategy) - 1 - stage[node] if node >= boundary else turn_now
            blocks[position] = turn_now
    return Canonical(sequence, tuple(blocks))


def lower_boundary(graph: ForwardGraph, nodes: int) -> int:
    """∂(L): the nodes of a lower set that are read from outside it (section 2)."""
    read = 0
    for node in bits(graph.everything & ~nodes):
        for p in graph.predecessors[node]:
            read |= 1 << p
    return read & nodes


def _stages(problem: PlainProblem, segment: Sequence[int], last: int) -> dict[int, int]:
    """The segment in whose turn each backward node runs, by `canonical`."""
    stage: dict[int, int] = {}
    fixed = [last, last]  # of the random nodes so far, and of those that may run only once
    for node in range(problem.boundary, len(problem)):
        forward = [segment[p] for p in problem.predecessors[node] if p < problem.boundary]
        backward = [stage[p] for p in problem.predecessors[node] if p >= problem.boundary]
        found = min([max(forward, default=last), *backward])
        for kind, flag in enumerate((problem.random[node], not problem.recomputable[node])):
            if flag:
                found = fixed[kind] = min(found, fixed[kind])
        stage[node] = found
    return stage


def peak_without_liveness(problem: PlainProblem, strategy: Canonical) -> int:
    """Peak in bytes where nothing is given up before the end of its block: the canonical strategy as section 3 states it."""
    sequence, blocks = strategy.sequence, strategy.blocks
    frees = problem.last_uses(sequence)
    held = peak = problem.base_bytes + problem.forward_extra_bytes
    waiting = [*frees[0]]
    for position, node in enumerate(sequence.nodes):
        if position == sequence.boundary:
            held += sum([problem.nbytes[v] for v in problem.tangents]) - problem.forward_extra_bytes
        held += sum([problem.nbytes[v] for v in problem.writes[node]])
        peak = max(peak, held + problem.workspace[node])
        waiting += frees[position + 1]
        if position + 1 == len(blocks) or blocks[position + 1] != blocks[position]:
            held -= sum([problem.nbytes[v] for v in waiting])
            waiting = []
    return peak
