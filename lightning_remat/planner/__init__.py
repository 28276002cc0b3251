"""Budget and graph to plan, and the captured step that runs it."""

from typing import TYPE_CHECKING

from lightning_remat.capture import is_compiled, unknown_torch
from lightning_remat.errors import RematWarning
from lightning_remat.planner._agreement import Agreement
from lightning_remat.planner._batch_size import BatchSizes
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._make import AtHand, make_plan
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._surroundings import Surroundings

if TYPE_CHECKING or not unknown_torch():
    from lightning_remat.planner._step import ScheduledStep
else:
    from lightning_remat.planner._plain_step import PlainStep as ScheduledStep

__all__ = [
    "Agreement",
    "AtHand",
    "BatchSizes",
    "Plan",
    "RematConfig",
    "RematWarning",
    "ScheduledStep",
    "Surroundings",
    "is_compiled",
    "make_plan",
    "unknown_torch",
]
