"""Exact training in less memory: rematerialization for PyTorch and Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_remat._version import __version__

if TYPE_CHECKING:
    from lightning_remat._rematerialize import Rematerialized, rematerialize
    from lightning_remat.errors import InfeasibleBudgetError, RematError
    from lightning_remat.exactness import CheckReport, check
    from lightning_remat.planner import Plan, RematConfig, RematWarning

__all__ = [
    "CheckReport",
    "InfeasibleBudgetError",
    "Plan",
    "RematConfig",
    "RematError",
    "RematWarning",
    "Rematerialized",
    "__version__",
    "check",
    "rematerialize",
]

_HOMES = {
    "CheckReport": "lightning_remat.exactness",
    "check": "lightning_remat.exactness",
    "InfeasibleBudgetError": "lightning_remat.errors",
    "RematError": "lightning_remat.errors",
    "Plan": "lightning_remat.planner",
    "RematConfig": "lightning_remat.planner",
    "RematWarning": "lightning_remat.planner",
    "Rematerialized": "lightning_remat._rematerialize",
    "rematerialize": "lightning_remat._rematerialize",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: solving a graph file needs neither torch nor the time to import it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
