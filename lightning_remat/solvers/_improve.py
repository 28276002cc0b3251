"""Large neighbourhood search: give up some of what a schedule holds, compute it again, and fill the budget up anew.

A schedule that any method found is a good start and seldom the end: methods decide by blocks, by sets of kept values, or by
what is held at one moment. Here a few held values are given up between two uses (`evict`), for a random moment or a random
stretch of the forward, and `keep_longer` spends the room on what is worth most, in one of its ways and in a slightly random
order. A schedule that is no dearer is gone on from. All of it is judged by the exact peak.
"""

from __future__ import annotations

import random
import time

from lightning_remat.solvers._neighbourhood import Gap, evict, gaps
from lightning_remat.solvers._problem import NodeSequence, PlainProblem
from lightning_remat.solvers._prune import CHARGES, keep_longer

WINDOWS = (0.03, 0.08, 0.2)
"""Shares of the forward whose values are given up together."""

PARTS = (0.1, 0.25, 0.5, 1.0)
"""Shares of the values in question that are given up."""

BIASES = (0.0, 0.0, 0.3, 0.7)
"""Spreads of the random factors of prices, as powers of two."""


def improve(
    problem: PlainProblem,
    sequence: NodeSequence,
    budget_bytes: int,
    deadline: float,
    *,
    patience: int = 200,
    seed: int = 0,
) -> tuple[NodeSequence, int]:
    """Search around a sequence within the budget.

    Args:
        problem: the problem.
        sequence: where to begin.
        budget_bytes: the most that may be held at any moment.
        deadline: `time.monotonic` at which to stop.
        patience: attempts without success after which to stop.
        seed: of the random numbers.

    Returns:
        The cheapest sequence found, and the number of attempts.
    """
    generator = random.Random(seed)
    charges = tuple(CHARGES)
    seconds = problem.evaluate(sequence).seconds
    around = gaps(problem, sequence)
    attempts = failures = 0
    while around and failures < patience and time.monotonic() < deadline:
        attempts += 1
        failures += 1
        chosen = _neighbourhood(problem, sequence, around, generator)
        other = evict(problem, sequence, chosen)
        if other is None or problem.evaluate(other).peak_bytes > budget_bytes:
            continue
        spread = generator.choice(BIASES)
        other = keep_longer(
            problem,
            other,
            budget_bytes,
            deadline,
            generator.choice(charges),
            (lambda s=spread: 2.0 ** generator.gauss(0.0, s)) if spread else None,  # type: ignore[misc]
        )
        cost = problem.evaluate(other).seconds
        if cost <= seconds * (1 + 1e-12):
            if cost < seconds * (1 - 1e-9):
                failures = 0
            sequence, seconds, around = other, cost, gaps(problem, other)
    return sequence, attempts


def _neighbourhood(
    problem: PlainProblem, sequence: NodeSequence, around: list[Gap], generator: random.Random
) -> list[Gap]:
    """Some of the values that are held at one moment, or that come from one stretch of the forward."""
    if generator.random() < 0.5:
        moment = generator.randrange(len(sequence.nodes))
        near = [gap for gap in around if gap[1] < moment <= gap[2]]
    else:
        middle = generator.randrange(problem.boundary)
        width = max(3, int(problem.boundary * generator.choice(WINDOWS)))
        near = [gap for gap in around if abs(problem.producer[gap[0]] - middle) <= width]
    if not near:
        return []
    return generator.sample(near, max(1, int(len(near) * generator.choice(PARTS))))
