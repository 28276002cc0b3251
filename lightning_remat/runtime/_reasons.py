"""Why a step, or a part of it, runs as before: each reason is given once, as a warning."""

from __future__ import annotations

import logging
import warnings

import torch

from lightning_remat._version import __version__
from lightning_remat.errors import RematWarning
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner._plan_cache import PlanCache

log = logging.getLogger(__name__)


class Reasons:
    """The reasons why one step, or a part of it, runs as before, and the warnings with them.

    Args:
        name: name of the step, for the warnings.

    Attributes:
        failures: the reasons, in the order in which they were found.
        gave_up: whether all later calls run as before.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures: list[str] = []
        self.gave_up = False

    def failed(self, reason: str, error: Exception | None = None) -> None:
        """Warn that something could not be captured, once for each reason."""
        reason = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
        if reason in self.failures:
            return
        self.failures.append(reason)
        log.debug("capture of %s failed", self.name, exc_info=error)
        warnings.warn(
            f"{self.name or 'the step'} (or a part of it) could not be captured and runs as before, without "
            f"rematerialization: {reason}",
            RematWarning,
            stacklevel=2,
        )

    def give_up(self, reason: str) -> None:
        """Run all later calls as before, and warn with the reason."""
        self.gave_up = True
        self.failed(reason)

    def refused(self, graph: ComputationGraph, reason: str, instead: str, budget: object, cache: PlanCache) -> None:
        """Warn that the verifier refuses all schedules for a graph, a defect of this library, and save the graph."""
        reason = f"every schedule that was found for it breaks a rule ({reason})"
        if reason in self.failures:
            return
        self.failures.append(reason)
        warnings.warn(
            f"{self.name or 'the step'} (or a part of it): {reason}. This is a defect of lightning_remat "
            f"{__version__}: {instead}. Please report it with this message, torch's version "
            f"({torch.__version__}), the budget ({budget!r}) and {cache.keep_refused(graph)}",
            RematWarning,
            stacklevel=2,
        )
