"""Numbers that Python and NumPy draw in a step: each step draws its own, and leaves the generators as eager mode does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_remat import rematerialize

OWN, NEWER, STEPS = random.Random(), np.random.default_rng(3), 4
LEGACY = vars(np.random)  # most steps have these


def shuffled(shuffle: Callable[[Any], None]) -> float:
    numbers = list(range(1000))
    shuffle(numbers)
    return numbers[0]


def restored(generator: Any) -> float:
    state = generator.getstate()
    drawn = generator.random()
    generator.setstate(state)
    return float(drawn)


def seeded() -> float:
    random.seed(OWN.randrange(5))
    return random.random()


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "uniform": lambda: random.uniform(1, 2),
    "sample": lambda: random.sample(range(1000), 2)[1],
    "shuffle": lambda: shuffled(random.shuffle),
    "restored": lambda: restored(random),
    "seeded": seeded,
    "own": lambda: OWN.betavariate(1, 1),
    "own sample": lambda: OWN.sample(range(1000), 2)[1],
    "own shuffle": lambda: shuffled(OWN.shuffle),
    "own restored": lambda: restored(OWN),
    "numpy": lambda: LEGACY["beta"](1.0, 1.0),
    "numpy shuffle": lambda: shuffled(LEGACY["shuffle"]),
    "numpy own": lambda: int(NEWER.integers(1000)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_eager_mode(name: str) -> None:
    draw, begins = DRAWS[name], NEWER.bit_generator.state

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).tanh().sum() * draw() + draw()

    def results(run: Callable[..., torch.Tensor]) -> list[Any]:
        random.seed(3)
        OWN.seed(5)
        LEGACY["seed"](3)
        NEWER.bit_generator.state = begins
        found: list[Any] = []
        for _ in range(STEPS):
            weight = torch.linspace(0, 1, 4, requires_grad=True)
            loss = run(torch.ones(4), weight)
            loss.backward()
            found += [loss.item(), weight.grad]
        return [*found, random.random(), OWN.random(), LEGACY["rand"](), NEWER.random()]

    planned = rematerialize(step, budget="min", cost_model="unit", solver="greedy", time_limit=0.1)
    right, ours = results(step), results(planned)
    for one, other in zip(right, ours, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert sum(planned.runs) >= STEPS
