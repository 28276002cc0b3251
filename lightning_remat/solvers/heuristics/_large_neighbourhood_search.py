"""Large neighbourhood search: give up some of what a schedule holds, compute it again, and fill the budget up anew.

A schedule that any method found is a good start and seldom the end: methods decide by blocks, by sets of kept values, or by
what is held at one moment. Here some held values are given up between two uses (`Lives.evict`), for a random moment or a random
stretch of the step, and `Lives.fill` spends the room on what is worth most, in one of its ways, in a slightly random order,
and sometimes on everything else first: else most attempts end where they began. A schedule that is no dearer is gone on from.
All of it is judged by the exact peak.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import Lives, Span
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import CHARGES, drop_unused

WINDOWS = (0.03, 0.08, 0.2)
"""Shares of the step whose values are given up together."""

SPREADS = (0.0, 0.0, 0.3, 0.7)
"""Spreads of the random factors of prices, as powers of two."""

RELUCTANCES = (1.0, 8.0, 1000.0)
"""Factors of the prices of keeping what was given up."""


def improve(
    problem: PlainProblem,
    sequence: NodeSequence,
    budget_bytes: int,
    deadline: float,
    *,
    patience: int | None = None,
    seed: int = 0,
) -> tuple[NodeSequence, int]:
    """Search around a sequence within the budget.

    Args:
        problem: the problem.
        sequence: where to begin.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        patience: attempts without success after which to stop; ``None`` for some hundreds, and some for each node.
        seed: of the random numbers.

    Returns:
        The cheapest sequence found, and the number of attempts.
    """
    most = 200 + 4 * len(problem) if patience is None else patience
    generator = random.Random(seed)
    charges = tuple(CHARGES.values())
    lives = Lives(problem, drop_unused(problem, sequence))
    seconds = lives.seconds
    attempts = failures = 0
    while lives.movable and lives.keys and failures < most and clock() < deadline:
        attempts += 1
        failures += 1
        spans = _neighbourhood(lives, generator)
        share = len(problem) * generator.random() ** 3
        lives.mark()
        if spans and lives.evict(spans, share) and lives.peak() <= budget_bytes:
            lives.fill(budget_bytes, deadline, generator.choice(charges), _bias(lives, generator))
            cost = lives.seconds
            if cost <= seconds * (1 + 1e-12):
                if cost < seconds * (1 - 1e-9):
                    failures = 0
                    lives = Lives(problem, lives.sequence())  # evenly spaced keys again
                seconds = cost
                continue
        lives.undo()
    return lives.sequence(), attempts


def _neighbourhood(lives: Lives, generator: random.Random) -> list[Span]:
    """Some of the values that are held at one moment, or that come from one stretch of the step."""
    values = lives.movable
    if generator.random() < 0.5:
        key = generator.choice(lives.keys)
        near = [span for v in values if (span := lives.span_at(v, key))]
    else:
        middle = generator.randrange(len(values))
        width = max(3, int(len(values) * generator.choice(WINDOWS)))
        near = [span for v in values[max(0, middle - width) : middle + width + 1] for span in lives.spans(v)]
    return generator.sample(near, int(len(near) ** generator.random())) if near else []


def _bias(lives: Lives, generator: random.Random) -> Callable[[float], float] | None:
    """Factors of prices: random ones, and larger ones for what was just given up."""
    spread, reluctance = generator.choice(SPREADS), generator.choice(RELUCTANCES)
    if not spread and reluctance == 1.0:
        return None
    given_up = {key for _, key in lives.added}
    return lambda key: 2.0 ** generator.gauss(0.0, spread) * (reluctance if key in given_up else 1.0)
