"""Processes that train one model together run the same plans: each is made in one of them, and the others take it."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning_remat.capture import _torch as internals
from lightning_remat.errors import InfeasibleBudgetError, RematError, ScheduleError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Seconds between two looks for another process's answer."""

ALL_SECONDS = 20.0
"""Seconds that all processes are waited for, where each has something to say."""

PIECE_BYTES = 4 * 1024**2
"""A store closes the connection of a process that sends it more than 8 MiB at once, as the plan of a large graph is."""


class Agreement:
    """Questions that one process answers for all, through the key-value store of ``torch.distributed``.

    The process that asks first computes the answer; whoever asks later, or again, is given the same one. Nothing here
    is a collective operation: a question that only some processes ask, because only they met a batch of that shape,
    does not block the others.

    Args:
        name: identifies this fit: the same in all of its processes, and different from that of every other fit.
        patience: seconds to wait for an answer that another process is computing, before computing one's own.
        store: the key-value store; by default that of ``torch.distributed``.
        processes: how many there are.
    """

    def __init__(self, name: str, patience: float = 1800.0, store: Any = None, processes: int = 1) -> None:
        self.name = name
        self.patience = patience
        self.processes = processes
        self._store = store if store is not None else internals.default_store()
        self._read: Counter[str] = Counter()

    def once(self, question: str, answer: Callable[[], Any]) -> Any:
        """What ``answer`` returned in the process that asked first.

        Args:
            question: the same text in all processes that want the same answer.
            answer: computes the answer, as plain data for JSON.

        Raises:
            InfeasibleBudgetError, ScheduleError: in all processes that ask, where ``answer`` raised it.
            RematError: where ``answer`` raised anything else, in the other processes; the one that ran it raises that
                itself.
        """
        key = f"lightning_remat/{self.name}/{question}"
        if self._store.add(f"{key}/asked", 1) == 1:
            return self._found(key, answer)
        until = time.monotonic() + self.patience
        while not self._store.check([f"{key}/answer"]):
            if time.monotonic() > until:
                log.warning("another process has not answered in %g s: this one plans for itself", self.patience)
                return answer()
            time.sleep(POLL_SECONDS)
        kind, value = json.loads(self._get(f"{key}/answer"))
        if kind == "infeasible":
            raise InfeasibleBudgetError(*value)
        if kind == "refused":
            raise ScheduleError(value)
        if kind == "error":
            raise RematError(f"in another process: {value}")
        return value

    def of_all(self, question: str, mine: Any, patience: float = ALL_SECONDS) -> list[Any]:
        """What every process has to say to a question that all of them ask at about the same time.

        Args:
            question: the same text in all processes.
            mine: what this one has to say, as plain data for JSON.
            patience: seconds to wait for the others; then it is what those say that have asked.
        """
        key = f"lightning_remat/{self.name}/{question}"
        number = self._store.add(f"{key}/said", 1)
        self._put(f"{key}/said/{number}", json.dumps(mine))
        until = time.monotonic() + patience
        while (said := self._store.add(f"{key}/said", 0)) < self.processes and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return [json.loads(self._get(f"{key}/said/{n}")) for n in range(1, said + 1)]

    def first(self, what: str) -> bool:
        """Whether this process is the first to ask about ``what``: it does something for all."""
        return bool(self._store.add(f"lightning_remat/{self.name}/{what}/first", 1) == 1)

    def tell(self, what: str, text: str) -> None:
        """Leave a note, ``text`` on the topic ``what``, for the other processes."""
        key = f"lightning_remat/{self.name}/told/{what}"
        number = self._store.add(key, 1)
        self._put(f"{key}/{number}", text)

    def news(self, what: str) -> list[str]:
        """The notes on the topic ``what`` that were left since this process last asked, its own included."""
        key = f"lightning_remat/{self.name}/told/{what}"
        first, self._read[what] = self._read[what], self._store.add(key, 0)
        return [self._get(f"{key}/{number}") for number in range(first + 1, self._read[what] + 1)]

    def _found(self, key: str, answer: Callable[[], Any]) -> Any:
        said: tuple[str, Any] = ("error", "it ended while it planned")
        try:
            value = answer()
            said = ("value", value)
        except InfeasibleBudgetError as error:
            said = ("infeasible", [error.budget_bytes, error.smallest_bytes, error.op, error.module])
            raise
        except ScheduleError as error:
            said = ("refused", str(error))
            raise
        except BaseException as error:
            said = ("error", f"{type(error).__name__}: {error}")
            raise
        finally:
            self._put(f"{key}/answer", json.dumps(said))
        return value

    def _put(self, key: str, text: str) -> None:
        data = zlib.compress(text.encode(), level=1)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)))  # last: where this is, the pieces are

    def _get(self, key: str) -> str:
        """The text of a key, which is waited for."""
        count = int(self._store.get(key))
        return zlib.decompress(b"".join(self._store.get(f"{key}/{number}") for number in range(count))).decode()
