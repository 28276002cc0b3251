"""Budget and graph to plan."""

from lightning_remat.errors import RematWarning
from lightning_remat.planner._batch_size import BatchSizes
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._make import AtHand, make_plan
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._sharded import with_shards
from lightning_remat.planner._surroundings import Surroundings

__all__ = [
    "AtHand",
    "BatchSizes",
    "Plan",
    "RematConfig",
    "RematWarning",
    "Surroundings",
    "make_plan",
    "with_shards",
]
