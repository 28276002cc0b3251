"""Why a step, or a part of it, runs as before: each reason is given once, as a warning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch

from lightning_remat._version import __version__
from lightning_remat.errors import InfeasibleBudgetError, RematWarning, listed
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
        self._told_of_share = self._told_of_part = False

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

    def only_a_part(self, names: Sequence[str]) -> None:
        """Warn, once, that Dynamo has skipped what is done with some parameters."""
        if self._told_of_part or not names:
            return
        self._told_of_part = True
        warnings.warn(
            f"only a part of {self.name or 'the step'} could be captured: what is done with {listed(names)} runs as before, "
            "without rematerialization, and is in the budget only where it can be measured (nn.LSTM, nn.GRU and nn.RNN on "
            "CUDA, packed sequences in some places, backward hooks on modules, and hooks that the step registers itself are "
            "known to be left out; TORCH_LOGS=graph_breaks says more)",
            RematWarning,
            stacklevel=2,
        )

    def given_up_by_torch(self) -> None:
        """Warn, once, that nothing runs any more of what was captured, unless another reason for that was given."""
        if not self.failures:
            self.failed(
                "torch has given up on what was captured, and nothing of it runs any more; TORCH_LOGS=recompiles says why"
            )

    def give_up(self, reason: str) -> None:
        """Run all later calls as before, and warn with the reason."""
        self.gave_up = True
        self.failed(reason)

    def no_longer_fits(self, error: InfeasibleBudgetError) -> None:
        """Warn that training that went on within its budget does not fit it any more."""
        self.failures.append(f"it no longer fits its budget ({error})")
        warnings.warn(
            f"{self.name or 'the step'} no longer fits its budget, since something in it has changed (what is frozen, a "
            f"statistic that Python reads, sizes of what is not captured): {error} The smallest plans run from now on, so that "
            "training goes on",
            RematWarning,
            stacklevel=2,
        )

    def share_is_too_small(self, error: InfeasibleBudgetError) -> None:
        """Warn, once, that a batch needs more than the share that is asked for."""
        if not self._told_of_share:
            self._told_of_share = True
            warnings.warn(
                f"{self.name or 'the step'} does not fit its budget, a share, with every batch: {error} Where it does not, the "
                "smallest plan runs, so that training goes on",
                RematWarning,
                stacklevel=2,
            )
        log.info("%s runs by the smallest plan: %s", self.name or "the step", error)

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
