"""The method "hiremate": partition, solve every distinct block at several budgets, recombine level by level.

HiRemate (Gusak et al. 2025, section 3, figure 1): a partitioner makes a hierarchy of blocks of the forward. From the
lowest level up, each block is solved with several budgets; its schedules are its options in the block above. Blocks of
the same form are solved once (appendix C.1.1). The top level is solved for the one budget of the step.

Solvers and partitioners are found by name, the user's own as well. A solver that works with options ("rotor", "h_ilp")
recombines the schedules of a block's parts; any other registered method ignores the parts and solves the block as a graph of
its own (section 3.2.1). The options of a block are chosen from all schedules of all its solvers.

What differs from the paper:

* the paper solves the lowest blocks by its integer program. By default it is sets of kept values here (`keep_options`), which
  take milliseconds; ``bottom=("h_ilp",)`` or ``("milp",)`` asks for a program;
* for "rotor" and "h_ilp" consecutive top blocks are wrapped once more, so that few bytes cross between them (`sequences_of`).
  Other methods at the top get the whole problem, as the paper's non-hierarchical solvers do;
* the paper's budget of a block limits its peak alone. But the rest of the step runs between a block's forward and its
  backward, so at the levels below the top "rotor" also recombines a block with less room at that moment (`Table`,
  ``gap_bytes``);
* schedules are node sequences, in which the frees follow from last uses: nothing needs to be adjusted where a block gives up
  an input that another block reads (in the paper's section 3.2.2 the higher level does that), and evaluations that only
  served a block on its own are dropped. The top level's choice is by the exact peak.

Nothing here is optimal across blocks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, finish, once
from lightning_remat.solvers.common._registry import Answer, register, run_algorithm
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.hiremate._blocks import Chain, Option, keep_options, link_up, measure, select, undominated
from lightning_remat.solvers.hiremate._h_ilp import recombine
from lightning_remat.solvers.hiremate._isomorphism import canonical_form
from lightning_remat.solvers.hiremate._partition import Block, partition, sequences_of
from lightning_remat.solvers.hiremate._rotor import Table, fitting


@dataclasses.dataclass
class Hierarchy:
    """How the blocks below the top level are solved, and the options of those that were.

    Attributes:
        middle, bottom: names of the solvers of blocks with and without parts.
        options: the most options that a block has in the level above.
        budgets: number of budgets that a block is solved with.
        slots: steps in which "rotor" counts memory.
        keep_size: the most nodes of a block that "keep" is tried on.
        deadline: `clock` at which to stop.
        known: options of each form of block that was solved.
        blocks: number of blocks met, the repeated ones included.
    """

    middle: Sequence[str]
    bottom: Sequence[str]
    options: int
    budgets: int
    slots: int
    keep_size: int
    deadline: float
    known: dict[Hashable, tuple[Option, ...]] = dataclasses.field(default_factory=dict)
    blocks: int = 0

    def chain(self, problem: PlainProblem, blocks: Sequence[Block]) -> Chain:
        """The chain of some blocks with their options, each form of block solved once."""

        def options_of(index: int, part: PlainProblem) -> tuple[Option, ...]:
            place = {node: local for local, node in enumerate(blocks[index].nodes)}
            parts = tuple(_renumber(inner, place) for inner in blocks[index].parts)
            form = (canonical_form(part), parts)
            self.blocks += 1
            if form not in self.known:
                self.known[form] = self.solve(part, parts)
            return self.known[form]

        return link_up(problem, [block.nodes for block in blocks], options_of)

    def solve(self, problem: PlainProblem, parts: tuple[Block, ...]) -> tuple[Option, ...]:
        """Options of one block. There is always one: everything kept."""
        plain = measure(problem, drop_unused(problem, problem.captured))
        found = [plain]
        chain = self.chain(problem, parts) if parts else None
        for name in self.middle if parts else self.bottom:
            if clock() > self.deadline:
                break
            if name == "keep" and len(problem) <= self.keep_size:
                found += keep_options(problem, self.deadline)
            elif name == "keep":
                continue
            elif name == "rotor" and chain is not None:
                found += self._rotor_options(chain, plain)
            else:
                solve = _solver(name, chain)
                low = min([o.forward_peak for o in found] + [o.backward_peak for o in found])
                high = max(plain.forward_peak, plain.backward_peak)
                for share in range(self.budgets):  # evenly spaced, the largest first
                    budget = high - (high - low) * share // self.budgets
                    sequence = solve(problem, max(budget, 1), self.deadline)
                    if sequence is not None:
                        found.append(measure(problem, sequence))
        return select(undominated(found), self.options)

    def _rotor_options(self, chain: Chain, plain: Option) -> list[Option]:
        high = max(plain.forward_peak, plain.backward_peak)
        found: dict[tuple[int, ...], Option] = {}
        for share in range(self.budgets):
            table = Table(chain, high, self.slots, gap_bytes=high * share // self.budgets)
            levels = table.levels()
            step = max(1, len(levels) // max(1, self.options))
            for m in levels[::step]:
                sequence = chain.sequence(table.runs(m))
                if sequence.nodes not in found:
                    found[sequence.nodes] = measure(chain.problem, sequence)
            if clock() > self.deadline:
                break
        return list(found.values())


def _renumber(block: Block, place: dict[int, int]) -> Block:
    return Block(tuple(place[node] for node in block.nodes), tuple(_renumber(part, place) for part in block.parts))


def _solver(name: str, chain: Chain | None) -> Callable[[PlainProblem, int, float], NodeSequence | None]:
    """A registered solver as a function: "h_ilp" recombines where there is something to recombine."""

    def run(problem: PlainProblem, budget_bytes: int, deadline: float) -> NodeSequence | None:
        if name == "h_ilp" and chain is not None:
            return recombine(chain, budget_bytes, deadline).sequence
        return run_algorithm(name, problem, budget_bytes, deadline).sequence

    return run


@register("hiremate")
def hiremate(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    partitioner: str | Sequence[str] = ("h_partition", "chain"),
    top_size: int = 60,
    block_size: int = 20,
    top: Sequence[str] = ("rotor", "h_ilp"),
    middle: Sequence[str] = ("rotor", "keep"),
    bottom: Sequence[str] = ("keep",),
    options: int = 12,
    budgets: int = 4,
    slots: int = 400,
    sequences: Sequence[int] = (12, 24),
    program_size: int = 12,
    program_seconds: float = 4.0,
    total_options: int = 60,
    keep_size: int = 400,
) -> Answer:
    """Partition, solve blocks, recombine.

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        partitioner: one of `partitioners`, or several, each of which is tried.
        top_size: M^t, the most nodes of the top level.
        block_size: M^l, the most nodes of a block.
        top: solvers of the top level: "rotor", "h_ilp", or any registered method.
        middle: solvers of blocks that have parts; "keep" as at the bottom.
        bottom: solvers of the lowest blocks: "keep" (sets of kept values), or any registered method.
        options: the most options of a block.
        budgets: number of budgets that a block is solved with.
        slots: steps in which "rotor" counts memory.
        sequences: into about how many blocks the top level is wrapped for "rotor" (see `sequences_of`), each tried.
        program_size: into about how many blocks the top level is wrapped for "h_ilp".
        program_seconds: the most seconds that one of its programs may take.
        total_options: N_o, the most options in one of its programs.
        keep_size: the most nodes, forward and backward, of a block that "keep" is tried on.

    Raises:
        SolverError: for an unknown partitioner or solver, or blocks that break a partitioner's rules.
    """
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    started = clock()
    until = deadline - 0.2 * max(0.0, deadline - started)  # the rest is for the top level and for filling up
    hierarchy = Hierarchy(middle, bottom, options, budgets, slots, keep_size, until)
    found: list[NodeSequence] = []
    notes: list[str] = []
    for name in [partitioner] if isinstance(partitioner, str) else partitioner:
        begun = time.monotonic()
        if notes and clock() > until:
            break
        blocks = partition(name, problem, top_size=top_size, block_size=block_size)
        depth = 1 + max([block.depth for block in blocks if len(block.nodes) > 1], default=0)
        took = time.monotonic() - begun
        for solver in top:
            fit: list[NodeSequence] = []
            if solver in ("rotor", "h_ilp"):
                counts = sequences if solver == "rotor" else (program_size,)
                wraps = [wrap for count in counts for wrap in sequences_of(problem, blocks, min(count, len(blocks)))]
                programs = [wrap for wrap in wraps if len(wrap) <= 2 * program_size][:1]
                for wrapped in dict.fromkeys(wraps) if solver == "rotor" else programs:
                    if fit and clock() > until:
                        break
                    chain = hierarchy.chain(problem, wrapped)
                    if solver == "rotor":
                        fit += fitting(chain, budget_bytes, slots, deadline)[:3]
                    else:
                        left = min(program_seconds, 0.5 * (until - clock()))
                        result = recombine(chain, budget_bytes, clock() + left, total_options=total_options)
                        fit += [result.sequence] if result.sequence is not None else []
            else:
                alone = _solver(solver, None)(problem, budget_bytes, deadline)
                fit += [alone] if alone is not None else []
            best_of = min([problem.evaluate(one).seconds for one in fit], default=None)
            outcome = "nothing within the budget" if best_of is None else f"{best_of:.6g} s a step"
            notes.append(f"{name} ({len(blocks)} top blocks, depth {depth}, {took:.2f} s), {solver}: {outcome}")
            found += fit
    notes.append(f"{hierarchy.blocks} subgraphs, {len(hierarchy.known)} of them distinct")
    fits = [sequence for sequence in found if problem.evaluate(sequence).peak_bytes <= budget_bytes]
    best = finish(problem, fits, budget_bytes, deadline)
    if best is None:
        status = Status.TIMEOUT if clock() > deadline else Status.INFEASIBLE
        return Answer(None, status, notes=tuple(notes))
    return Answer(best, Status.FEASIBLE, notes=tuple(notes))
