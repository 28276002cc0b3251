"""A function that runs as it is: takes the place of `ScheduledStep` on torch releases that are not supported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning_remat.capture import unknown_torch
from lightning_remat.errors import RematWarning
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._plan import Plan


class PlainStep:
    """``function``, never captured; warns once, and says why. Arguments and attributes are those of `ScheduledStep`."""

    def __init__(self, function: Callable[..., Any], config: RematConfig, *, name: str = "", **_options: Any) -> None:
        self.function, self.config, self.name = function, config, name
        self.plans: list[Plan] = []
        self.runs: list[int] = []
        self.failures = [unknown_torch()]
        self.planning_seconds = 0.0
        self.last_plan: Plan | None = None
        warnings.warn(f"{name or 'the step'}: {self.failures[0]}", RematWarning, stacklevel=3)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def begin_anew(self) -> None:
        """Do nothing: no runs are counted."""

    def close(self) -> None:
        """Do nothing: no search runs."""
