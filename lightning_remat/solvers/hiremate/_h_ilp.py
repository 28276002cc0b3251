"""H-ILP: the integer program on blocks with options and phantom nodes (Gusak et al. 2025, section 3.2.2 and appendix B).

A computation node is the forward F_j or the backward B_j of a block j, which the paper calls a layer; an option is one
schedule of the block. What an option saves between the two is the layer's phantom node, whose size depends on the
option. The program is `_integer_program`'s, with eqs. 5 to 9 for options and phantom nodes; this file makes its data
flow from a chain of blocks.

How it is applied, and what differs from the paper:

* the number of options of all blocks together, N_o, is shared out by the number of ops of each block, and each block's share
  is chosen as in section 3.2.2 (`select`);
* by eqs. 7 and 8 a phantom node lives until its B_j has run. A forward that saves nothing (blocks are computed again from
  their inputs) is therefore one more option of F_j, which B_j does not have;
* a backward runs once: gradients are not computed again. So does a forward with ops that may run only once, if their
  results are read; where these are only handed out, like counters, the ops are left out of all runs but the first;
* the correction terms of appendix B.3: at a sub-step of an option, inputs (and incoming gradients) that no later
  sub-step reads are freed already if they are deleted after the node. Each set of them has one row, with the largest m
  of its sub-steps;
* a block's outputs and incoming gradients are data nodes, so m counts neither.

The bound holds for this partition and these options only, so none is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import finish, once
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.hiremate._blocks import Chain, Link, Option, Run, keep_options, link_up, select
from lightning_remat.solvers.hiremate._integer_program import DataFlow, Layer, Way, solve_phases
from lightning_remat.solvers.hiremate._isomorphism import canonical_form
from lightning_remat.solvers.hiremate._partition import partition


@dataclasses.dataclass(frozen=True)
class Recombination:
    """What H-ILP found: the sequence (``None``: nothing within the budget), and the program's own account of its time.

    Attributes:
        sequence: nodes of the chain's problem.
        status: how the solve ended.
        seconds: of the sequence, by the program's account.
        bound_seconds: no schedule of the program is faster.
    """

    sequence: NodeSequence | None
    status: Status
    seconds: float
    bound_seconds: float


def recombine(
    chain: Chain,
    budget_bytes: int,
    deadline: float,
    *,
    total_options: int = 24,
    corrections: bool = True,
    gap: float = 5e-3,
    solver: str = "CBC",
) -> Recombination:
    """Solve H-ILP for a chain of blocks with options.

    Args:
        chain: the blocks.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        total_options: N_o, the most options of all blocks together (each has one at least).
        corrections: whether to use the correction terms of appendix B.3; without them the program is smaller, but
            overstates memory.
        gap: stop when the schedule is proven to be within this share of the bound.
        solver: python-mip's name of the solver.
    """
    ops = sum([len(link.nodes) for link in chain.links]) or 1
    links = [
        dataclasses.replace(link, options=select(link.options, max(1, total_options * len(link.nodes) // ops)))
        for link in chain.links
    ]
    flow = data_flow(chain.problem, links, corrections)
    result = solve_phases(flow, budget_bytes, gap=gap, deadline=deadline, solver=solver)
    if result.runs is None:
        return Recombination(None, result.status, result.seconds, result.bound_seconds)
    runs: list[Run] = []
    for phase in result.runs:
        for node, option in phase:
            backward = node >= len(links)
            index = 2 * len(links) - 1 - node if backward else node
            options = links[index].options
            runs.append((index, backward, options[option] if option < len(options) else None))
    forward_runs = sum([len(phase) for phase in result.runs[: flow.boundary]])
    return Recombination(chain.sequence(runs, forward_runs), result.status, result.seconds, result.bound_seconds)


def data_flow(problem: PlainProblem, links: list[Link], corrections: bool = True) -> DataFlow:
    """The program's data flow: forwards in order, backwards in reverse order, and the values that cross between blocks.

    Values with the same producer, readers and roles are merged into one data node.
    """
    count = len(links)
    sides = [[_Side(problem, link, option, False) for option in (*link.options, link.bare)] for link in links]
    sides += [[_Side(problem, link, option, True) for option in link.options] for link in reversed(links)]
    place = {node: index for index, link in enumerate(links) for node in link.nodes}
    readers: list[set[tuple[int, int]]] = [set() for _ in problem.nbytes]
    for node, ways in enumerate(sides):
        for option, side in enumerate(ways):
            for v in side.last_read:
                readers[v].add((node, option))
    wanted = (set(problem.forward_outputs), set(problem.forward_transient), set(problem.finals))
    merged: dict[tuple[int, frozenset[tuple[int, int]], tuple[bool, ...]], list[int]] = {}
    for v, writer in enumerate(problem.producer):
        own = -1
        if writer >= 0:
            own = 2 * count - 1 - place[writer] if problem.is_backward[writer] else place[writer]
        flags = tuple(v in values for values in wanted)
        leaves = writer < 0 or any(place[reader] != place[writer] for reader in problem.consumers[v])
        reading = frozenset(reader for reader in readers[v] if reader[0] != own)
        if any(flags) or (leaves and reading):
            merged.setdefault((own, reading, flags), []).append(v)
    data = {v: index for index, values in enumerate(merged.values()) for v in values}
    nbytes = tuple(sum([problem.nbytes[v] for v in values]) for values in merged.values())
    producer = tuple(own for own, _, _ in merged)
    writes = tuple(tuple(d for d, own in enumerate(producer) if own == node) for node in range(2 * count))
    kinds = [frozenset(d for d, (_, _, flags) in enumerate(merged) if flags[kind]) for kind in range(3)]
    return DataFlow(
        ways=tuple(
            tuple(side.way(data, sum([nbytes[d] for d in writes[node]]), corrections) for side in ways)
            for node, ways in enumerate(sides)
        ),
        writes=writes,
        once=(*(_runs_once(problem, link) for link in links), *(True for _ in links)),
        wanted=(True,) * (2 * count),
        nbytes=nbytes,
        producer=producer,
        boundary=count,
        outputs=kinds[0],
        transient=kinds[1],
        finals=kinds[2],
        base_bytes=problem.base_bytes,
        forward_extra_bytes=problem.forward_extra_bytes,
        layers=tuple(
            Layer(index, 2 * count - 1 - index, tuple(option.saved_bytes for option in link.options))
            for index, link in enumerate(links)
        ),
    )


def _runs_once(problem: PlainProblem, link: Link) -> bool:
    """Whether the block's forward makes values that are read and cannot be computed again."""
    own = link.nodes[: link.problem.boundary]
    return any(problem.consumers[v] for node in own if not problem.recomputable[node] for v in problem.writes[node])


class _Side:
    """The forward or the backward of an option, and where it last reads each value that it does not make itself.

    A backward reads the gradients that come in, what other blocks computed, and its own block's outputs, which are data nodes.
    """

    def __init__(self, problem: PlainProblem, link: Link, option: Option, backward: bool) -> None:
        self.problem, self.link, self.option, self.backward = problem, link, option, backward
        at = option.sequence.boundary
        self.span = range(at, len(option.sequence.nodes)) if backward else range(at)
        made = {v for node in link.nodes if problem.is_backward[node] == backward for v in problem.writes[node]}
        self.last_read: dict[int, int] = {}
        for position in self.span:
            for v in problem.reads[link.nodes[option.sequence.nodes[position]]]:
                if v not in made:
                    self.last_read[v] = position

    def way(self, data: dict[int, int], written_bytes: int, corrections: bool) -> Way:
        """The option as one of a computation node.

        Args:
            data: the data node of each value that has one.
            written_bytes: of the data nodes that the computation node makes.
            corrections: whether to use the correction terms.
        """
        problem, link = self.problem, self.link
        own = link.problem if len(self.option.sequence.nodes) > self.option.sequence.boundary else link.forward_problem
        memory = own.memory(self.option.sequence)
        last: dict[int, int] = {}
        for v, position in self.last_read.items():
            if v in data:
                last[data[v]] = max(position, last.get(data[v], -1))
        counted = written_bytes  # bytes that the program accounts for by itself
        incoming: dict[int, int] = {}
        if self.backward:
            counted += sum([own.nbytes[v] for v in own.forward_outputs])
            incoming = {
                v: position
                for v, position in self.last_read.items()
                if problem.producer[v] < 0 or problem.is_backward[problem.producer[v]]
            }
            counted += sum([problem.nbytes[v] for v in incoming])
        else:
            counted += self.option.saved_bytes
        steps: dict[frozenset[int], int] = {}
        for position in self.span:
            held = memory[position] + sum([problem.nbytes[v] for v, at in incoming.items() if at < position])
            gone = frozenset(d for d, at in last.items() if at < position) if corrections else frozenset[int]()
            steps[gone] = max(held - counted, steps.get(gone, held - counted))
        seconds = self.option.backward_seconds if self.backward else self.option.forward_seconds
        return Way(seconds, frozenset(last), tuple((overhead, gone) for gone, overhead in steps.items()))


@register("h_ilp")
def h_ilp(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    blocks: int = 8,
    total_options: int = 24,
    corrections: bool = True,
    gap: float = 5e-3,
    partitioner: str = "h_partition",
    solver: str = "CBC",
) -> Answer:
    """H-ILP on the top blocks of a partition, each with options that keep sets of its values.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        blocks: about how many blocks.
        total_options: N_o, the most options of all blocks together.
        corrections: whether to use the correction terms of appendix B.3 (see `recombine`).
        gap: stop when the schedule is proven to be within this share of the program's bound.
        partitioner: one of `partitioners`; its lower levels are not used.
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    if not problem.boundary:
        return Answer(None, Status.INFEASIBLE, notes=("no forward node that could be computed again",))
    size = max(2, 2 * problem.boundary // max(blocks, 1))
    tops = partition(partitioner, problem, top_size=blocks, block_size=size)
    known: dict[Hashable, list[Option]] = {}

    def options_of(_: int, part: PlainProblem) -> list[Option]:
        form = canonical_form(part)
        if form not in known:
            known[form] = keep_options(part, deadline)
        return known[form]

    chain = link_up(problem, [block.nodes for block in tops], options_of)
    until = deadline - min(2.0, 0.1 * max(0.0, deadline - clock()))  # the rest is for filling up
    result = recombine(
        chain,
        budget_bytes,
        until,
        total_options=total_options,
        corrections=corrections,
        gap=gap,
        solver=solver,
    )
    notes = (f"{len(tops)} blocks, {len(known)} of them distinct", f"program: {result.status.value}")
    if result.sequence is None:
        return Answer(None, result.status, notes=notes)
    if problem.evaluate(result.sequence).peak_bytes > budget_bytes:
        return Answer(None, Status.TIMEOUT, notes=(*notes, "its schedule is over the budget by a rounding error"))
    return Answer(finish(problem, [result.sequence], budget_bytes, deadline), Status.FEASIBLE, notes=notes)
