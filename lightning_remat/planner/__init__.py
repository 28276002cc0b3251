"""Budget and graph to plan, and the captured step that runs it."""

from lightning_remat.capture import is_compiled
from lightning_remat.planner._agreement import Agreement
from lightning_remat.planner._batch_size import BatchSizes
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._make import AtHand, make_plan
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._step import RematWarning, ScheduledStep
from lightning_remat.planner._surroundings import Surroundings

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
]
