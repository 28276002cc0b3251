"""The method "lp_rounding": Checkmate's approximation (Jain et al. 2020, section 5), a linear program and its rounding.

The program of eq. 9 is solved with R, S and FREE in [0, 1] (section 5.1, `Program.relax`). Of the fractional solution only
the checkpoints S are rounded, by a threshold or, in appendix D, at random with the fraction as the probability; R is then
the smallest that S allows (Algorithm 2, `fill_computations`), and FREE follows from last uses.

Rounding looks at no budget. So the linear program is given less (section 5.3: U <= (1 - ε) M_budget), and ε is
searched, as appendix D suggests: from 0 upwards while the rounded schedule does not fit, downwards while it does, then
by bisection for the smallest ε that fits; then at larger ones, since neither peak nor cost of the rounded schedules
need be monotone in ε. Below 0 the linear program gets more than the budget, which pays where rounding down frees more
than rounding up takes. The ε of the paper is a share of the whole budget; here it is one of what the budget leaves
beside the bytes that are held all through the step.

What differs from the paper, beyond `_integer_program`: values of nodes that may run only once are held from their
evaluation on where the rounded S asks for them. Above ``max_ops`` nodes the problem is coarsened, as for the method
"milp": then no bound is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import mip

from lightning_remat.errors import SolverError
from lightning_remat.solvers.checkmate._integer_program import CAPTURED_ORDER, Program, fill_computations, too_large
from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._coarsen import Coarsening, coarsen
from lightning_remat.solvers.common._problem import Evaluation, NodeSequence, PlainProblem, Problem
from lightning_remat.solvers.common._prune import drop_unused, keep_longer, once, required
from lightning_remat.solvers.common._registry import Answer, register
from lightning_remat.solvers.common._solution import Status
from lightning_remat.solvers.common._stages import from_stages
from lightning_remat.solvers.common._working_set import alone_bytes

Checkpoints = list[dict[int, float]]
"""The rows of S: by stage, the share of each value that is held into it."""


@register("lp_rounding")
def lp_rounding(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float,
    rounding: str = "deterministic",
    threshold: float = 0.5,
    samples: int = 20,
    seed: int = 0,
    programs: int = 24,
    max_ops: int = 80,
    coarsen_to: int = 40,
    fill_up: bool = True,
    solver: str = "CBC",
) -> Answer:
    """Two-phase rounding of the linear program, over budget allowances (ε).

    Args:
        problem: the problem.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        rounding: "deterministic" (section 5.2) or "randomized" (appendix D).
        threshold: deterministic: a value is held where its share is above this.
        samples: randomized: roundings of each linear program.
        seed: randomized: of the random numbers.
        programs: how many linear programs are solved, one an allowance, at most.
        max_ops: with more nodes than this the problem is coarsened.
        coarsen_to: number of nodes of the coarsened problem, about.
        fill_up: whether what the budget has left is spent by `keep_longer`. The paper does not.
        solver: python-mip's name of the solver: "CBC", "HIGHS", "GRB".

    Raises:
        SolverError: for an unknown ``rounding``.
    """
    if rounding not in ("deterministic", "randomized"):
        raise SolverError(f"rounding={rounding!r}: choose 'deterministic' or 'randomized'")
    if problem.evaluate(once(problem)).peak_bytes <= budget_bytes:
        return Answer(once(problem), Status.OPTIMAL)
    coarse = coarsen(problem, coarsen_to) if len(problem) > max_ops else None
    planned = coarse.problem if coarse else problem
    notes: list[str] = [f"{len(problem)} ops coarsened to {len(planned)}"] if coarse else []
    if note := too_large(problem, budget_bytes):
        return Answer(None, Status.INFEASIBLE, notes=(note,))
    numbers = random.Random(seed)

    def rounded(checkpoints: Checkpoints) -> Iterator[NodeSequence]:
        if rounding == "deterministic":
            yield _scheduled(problem, coarse, round_checkpoints(planned, checkpoints, threshold))
            return
        for _ in range(samples):
            yield _scheduled(problem, coarse, sample_checkpoints(planned, checkpoints, numbers))

    until = deadline - min(2.0, 0.1 * max(0.0, deadline - clock()))  # the rest is for filling up
    bound, status = 0.0, Status.INFEASIBLE
    found: dict[NodeSequence, tuple[Evaluation, float]] = {}
    closest = -1
    tightest = max([alone_bytes(planned, node) for node in required(planned)], default=planned.base_bytes)
    headroom = budget_bytes - planned.base_bytes
    search = _Allowances((budget_bytes - tightest) / max(1, headroom))
    with contextlib.closing(Program(planned, budget_bytes, solver)) as program:
        for remaining in range(programs, 0, -1):
            allowance = search.following(remaining)
            if allowance is None:
                break
            if clock() >= until:
                status = Status.TIMEOUT
                break
            allowed = budget_bytes - round(allowance * headroom)
            value = program.relax(allowed, until - clock())
            if value is None:
                if program.status is not mip.OptimizationStatus.INFEASIBLE:
                    status = Status.TIMEOUT
                    break
                if allowance == 0 and coarse is None:  # no schedule of the program fits, however it is rounded
                    notes.append("the linear program is infeasible: no schedule of stages fits")
                    break
                search.tell(allowance, enough=True)
                continue
            if allowance == 0 and coarse is None:
                bound = value
            fits = False
            for sequence in rounded(program.checkpoints()):
                evaluation = problem.evaluate(sequence)
                closest = evaluation.peak_bytes if closest < 0 else min(closest, evaluation.peak_bytes)
                if evaluation.peak_bytes <= budget_bytes:
                    fits = True
                    found.setdefault(sequence, (evaluation, allowance))
            search.tell(allowance, enough=fits)
    tried = ", ".join(f"{allowance:.3g}" for allowance in sorted(search.tried))
    notes.append(f"{len(search.tried)} budget allowances tried: {tried}")
    scope = f"{CAPTURED_ORDER}, each result in memory of its own" if any(problem.overwrites) else CAPTURED_ORDER
    if not found:
        notes.append(
            f"the smallest rounded schedule peaks at {closest:,} bytes" if closest >= 0 else "none was rounded"
        )
        return Answer(None, status, bound, scope, notes=tuple(notes))
    ranked = sorted(found, key=lambda sequence: found[sequence][0].seconds)
    notes.append(f"the cheapest was rounded at an allowance of {found[ranked[0]][1]:.3g}")
    best = ranked[0]
    if fill_up:
        late = max(deadline, clock() + 0.5)
        for sequence in ranked:
            longer = keep_longer(problem, sequence, budget_bytes, late)
            best = min(best, longer, key=lambda one: problem.evaluate(one).seconds)
            if clock() > late:
                break
    bound = min(bound, problem.evaluate(best).seconds)
    return Answer(best, Status.FEASIBLE, bound, scope, notes=tuple(notes))


@dataclasses.dataclass
class _Allowances:
    """Bisection for the smallest allowance ε whose rounded schedule fits, from 0 outwards in doubling steps.

    Peaks of rounded schedules need not fall as the allowance grows, so it may be missed. The attempts that are left are
    spread between what was found and the largest allowance.
    """

    largest: float
    """The allowance that leaves no more than the largest working set."""
    low: float | None = None
    """The largest allowance known whose schedule does not fit."""
    high: float | None = None
    """The smallest allowance known that is enough: its schedule fits, or its linear program is infeasible."""
    step: float = 0.1
    """How far outwards the next step goes; the first is the paper's ε of section 5.3."""
    tried: list[float] = dataclasses.field(default_factory=list)
    spread: list[float] = dataclasses.field(default_factory=list)
    """Allowances still to be tried after the bisection."""
    is_spread: bool = False

    def following(self, remaining: int) -> float | None:
        """The next allowance to try, of ``remaining`` attempts; ``None`` when the search is over."""
        if self.spread:
            return self.spread.pop()
        if self.low is None and self.high is None:
            return 0.0
        if self.low is not None and self.high is not None:
            if self.high - self.low > 5e-3:
                return (self.low + self.high) / 2
            if self.is_spread or self.high >= self.largest:
                return None
            self.is_spread = True
            self.spread = [
                self.high + (self.largest - self.high) * i / (remaining + 1) for i in range(remaining, 0, -1)
            ]
            return self.spread.pop()
        step, self.step = self.step, 2 * self.step
        if self.high is not None:
            return self.high - step
        return min((self.low or 0.0) + step, ((self.low or 0.0) + 1) / 2)

    def tell(self, allowance: float, enough: bool) -> None:
        """Take note of the outcome of an allowance."""
        self.tried.append(allowance)
        if self.is_spread:
            return
        if enough:
            self.high = allowance
        else:
            self.low = allowance


def round_checkpoints(problem: PlainProblem, checkpoints: Checkpoints, threshold: float = 0.5) -> NodeSequence:
    """Two-phase deterministic rounding: S_int = 1[S* > threshold], then the fewest computations (Algorithm 2)."""
    held = [{v for v, share in row.items() if share > threshold} for row in checkpoints]
    return from_stages(problem, fill_computations(problem, held))


def sample_checkpoints(problem: PlainProblem, checkpoints: Checkpoints, numbers: random.Random) -> NodeSequence:
    """Two-phase randomized rounding: Pr[S_int = 1] = S* (section 5.1, appendix D), then the fewest computations."""
    held = [{v for v, share in row.items() if numbers.random() < share} for row in checkpoints]
    return from_stages(problem, fill_computations(problem, held))


def _scheduled(problem: Problem, coarse: Coarsening | None, sequence: NodeSequence) -> NodeSequence:
    """A sequence of the planned problem as one of the problem itself."""
    return coarse.refine(sequence) if coarse else drop_unused(problem, sequence)
