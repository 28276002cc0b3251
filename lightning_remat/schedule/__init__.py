"""The answer: compute, free and copy steps, their memory over time, and the check that they are right.

* ``_schedule``: schedules, and their plain data.
* ``_simulate``: bytes held and time passed at each step, and what an allocator is asked for; ``_memory``: what is held.
* ``_lives``: from which step to which each piece of memory is held.
* ``_whole_step``: the same of a step that runs as several graphs.
* ``_clocks``: the time passed for ops and copies.
* ``_verify``: the independent check that every schedule passes before it runs; ``_copy_rules``: its part about copies.
"""

from lightning_remat.schedule._lives import Life, lives
from lightning_remat.schedule._memory import Event
from lightning_remat.schedule._schedule import Compute, Copy, Free, Schedule, Step
from lightning_remat.schedule._simulate import Allocations, Timeline, allocations, simulate
from lightning_remat.schedule._verify import verify
from lightning_remat.schedule._whole_step import OUTSIDE, Stretch, WholeStep

__all__ = [
    "OUTSIDE",
    "Allocations",
    "Compute",
    "Copy",
    "Event",
    "Free",
    "Life",
    "Schedule",
    "Step",
    "Stretch",
    "Timeline",
    "WholeStep",
    "allocations",
    "lives",
    "simulate",
    "verify",
]
