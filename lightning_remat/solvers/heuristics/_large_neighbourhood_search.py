"""Large neighbourhood search: give up some of what a schedule holds, compute it again, and spend the freed memory anew.

A schedule that another method found can mostly be improved, since methods decide by blocks, by sets of kept values, or
by what is held at one moment. An attempt changes it in one of two ways:

* some values are given up between two uses and computed again (`Lives.evict`), at a random moment or in a random
  stretch of the step;
* the other way round (`_exchange`): a few repeated evaluations are dropped whether or not there is room to hold their
  results. Where too much is held then, other values are given up, which are cheap to compute again for their bytes.
  Near the smallest peak nearly all of the gain comes from this, since giving up makes little room there.

Then `Lives.fill` spends the freed memory on dropping repeated evaluations, by one of `CHARGES` and in a slightly random
order, sometimes with those that were just added last: otherwise most attempts would end where they began. A schedule
that is no dearer becomes the next one to change. Peaks are always exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from lightning_remat.solvers.common._clock import clock
from lightning_remat.solvers.common._lifetimes import Lives, Span
from lightning_remat.solvers.common._problem import NodeSequence, PlainProblem
from lightning_remat.solvers.common._prune import CHARGES, drop_unused

WINDOWS = (0.03, 0.08, 0.2)
"""Half widths of the stretch of the step whose values are given up together, as shares of `Lives.movable`."""

SPREADS = (0.0, 0.0, 0.3, 0.7)
"""Standard deviations of the exponents in the random powers of two that prices are multiplied by."""

RELUCTANCES = (1.0, 8.0, 1000.0)
"""Factors of the prices of dropping evaluations that were just added: the larger, the later these are considered."""

EXCHANGES = 0.5
"""Share of the attempts that are exchanges."""

DROPS = (1, 2, 4)
"""How many evaluations an exchange drops first, each the one of `CHOICES` random ones that saves the most."""

CHOICES = 8
"""How many evaluations to drop, or values to give up, are looked at more closely."""

EXCHANGED = 12
"""The most values that an exchange gives up in turn."""

TOO_DEAR = 1.2
"""A schedule that costs more than so many times the best while an exchange goes on is not followed further."""


def improve(
    problem: PlainProblem,
    sequence: NodeSequence,
    budget_bytes: int,
    deadline: float,
    *,
    patience: int | None = None,
    seed: int = 0,
) -> tuple[NodeSequence, int]:
    """Search around a sequence within the budget for cheaper ones, to the deadline or until ``patience`` runs out.

    Args:
        problem: the problem.
        sequence: where to begin.
        budget_bytes: the most that may be held at any moment.
        deadline: `clock` at which to stop.
        patience: attempts without success after which to stop; ``None`` for 200 and four more for each node.
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
        share = len(problem) * generator.random() ** 3
        lives.mark()
        if generator.random() < EXCHANGES and lives.repeated:
            changed = _exchange(lives, budget_bytes, TOO_DEAR * seconds, share, generator)
        else:
            spans = _neighbourhood(lives, generator)
            changed = bool(spans) and lives.evict(spans, share)
        if changed and lives.peak() <= budget_bytes:
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
    """Some of the intervals in which values are idle at one moment, or of values made in one stretch of the step."""
    values = lives.movable
    if generator.random() < 0.5:
        key = generator.choice(lives.keys)
        near = [span for v in values if (span := lives.span_at(v, key))]
    else:
        middle = generator.randrange(len(values))
        width = max(3, int(len(values) * generator.choice(WINDOWS)))
        near = [span for v in values[max(0, middle - width) : middle + width + 1] for span in lives.spans(v)]
    return generator.sample(near, int(len(near) ** generator.random())) if near else []


def _exchange(lives: Lives, budget_bytes: int, limit_seconds: float, share: float, generator: random.Random) -> bool:
    """Drop some repeated evaluations, then give up what is cheap to compute again where too much is held.

    Returns:
        ``False`` where that leads nowhere: the caller must undo it then.
    """
    for _ in range(generator.choice(DROPS)):
        repeats = [(node, key) for node in sorted(lives.repeated) for key in lives.runs[node][1:]]
        if repeats:
            some = generator.sample(repeats, min(len(repeats), CHOICES))
            lives.drop(*max(some, key=lambda one: lives.saved(*one) * 2.0 ** generator.gauss(0.0, 1.0)))
    for _ in range(EXCHANGED):
        over = lives.peak() - budget_bytes
        if over <= 0:
            return True
        span = _cheapest(lives, over, generator) if lives.seconds <= limit_seconds else None
        if span is None or not lives.evict([span], share):
            return False
    return True


def _cheapest(lives: Lives, over: int, generator: random.Random) -> Span | None:
    """What is idle at the moment of the peak and takes the least time for its bytes to compute again, about."""
    problem = lives.problem
    key = lives.keys[int(lives.memory.argmax())]

    def price(span: Span, seconds: float, spread: float) -> float:
        about: float = 2.0 ** generator.gauss(0.0, spread)
        return about * seconds / min(problem.nbytes[span[0]], over)

    idle = [span for v in lives.movable if (span := lives.span_at(v, key)) and span[1] < key < span[2]]
    idle.sort(key=lambda span: price(span, problem.seconds[problem.producer[span[0]]], 1.0))
    return min(idle[:CHOICES], key=lambda span: price(span, lives.seconds_again(span), 0.5), default=None)


def _bias(lives: Lives, generator: random.Random) -> Callable[[float], float] | None:
    """Factors of prices by key: random ones, and larger ones for what was just added; ``None``: no factors."""
    spread, reluctance = generator.choice(SPREADS), generator.choice(RELUCTANCES)
    if not spread and reluctance == 1.0:
        return None
    given_up = {key for _, key in lives.added}
    return lambda key: 2.0 ** generator.gauss(0.0, spread) * (reluctance if key in given_up else 1.0)
