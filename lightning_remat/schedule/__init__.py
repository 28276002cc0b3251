"""The answer: compute and free steps, their memory over time, and the check that they are right."""

from lightning_remat.schedule._schedule import Compute, Free, Schedule, Step
from lightning_remat.schedule._simulate import Allocations, Event, Timeline, allocations, simulate
from lightning_remat.schedule._verify import verify

__all__ = [
    "Allocations",
    "Compute",
    "Event",
    "Free",
    "Schedule",
    "Step",
    "Timeline",
    "allocations",
    "simulate",
    "verify",
]
