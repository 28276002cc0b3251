"""One process searches for cheaper schedules for all that train together; each verifies what it is told, and takes it."""

from __future__ import annotations

import json
import logging
import time

from lightning_remat.errors import RematError
from lightning_remat.planner._config import RematConfig
from lightning_remat.planner._plan import Plan
from lightning_remat.planner._plan_cache import verified
from lightning_remat.runtime._agreement import Agreement
from lightning_remat.runtime._search import Search
from lightning_remat.solvers import Solution

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
"""Seconds between two looks for what another process has found."""

ENDED = "ended"


class TellingSearch(Search):
    """A search that tells the other processes what it finds.

    Args:
        plan, config: see `Search`.
        agreement: how the processes talk.
        topic: of the notes.
    """

    def __init__(self, plan: Plan, config: RematConfig, agreement: Agreement, topic: str) -> None:
        self._agreement, self._topic, self._told = agreement, topic, False
        super().__init__(plan, config)

    def better(self) -> Solution | None:
        """A cheaper schedule, verified, if one was found since the last call."""
        solution = super().better()
        if solution is not None:
            self._agreement.tell(self._topic, json.dumps(solution.to_dict()))
        if not self.running and not self._told:
            self._told = True
            self._agreement.tell(self._topic, ENDED)
        return solution


class ToldSearch:
    """What another process's search finds.

    Args:
        plan: the present plan.
        agreement: how the processes talk.
        topic: of the notes.

    Attributes:
        running: whether there may be more.
        completed: never: the process that searches keeps what it has found.
    """

    completed = False

    def __init__(self, plan: Plan, agreement: Agreement, topic: str) -> None:
        self._plan, self._agreement, self._topic = plan, agreement, topic
        self._asked = 0.0
        self.running = True

    def better(self) -> Solution | None:
        """A cheaper schedule, verified, if one was told since the last call."""
        now = time.monotonic()
        if not self.running or now < self._asked + ASK_SECONDS:
            return None
        self._asked = now
        notes = self._agreement.news(self._topic)
        if ENDED in notes:
            self.running = False
        found = [note for note in notes if note != ENDED]
        try:
            return verified(json.loads(found[-1]), self._plan.graph, self._plan.budget_bytes) if found else None
        except (ValueError, RematError) as error:
            log.warning("A schedule that another process has found cannot be used (%s): the plan at hand stays.", error)
            return None

    def close(self) -> None:
        """Hear no more."""
        self.running = False
