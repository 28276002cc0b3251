"""What a part of the suite is: cases, how to run one, and how to show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OK, INFEASIBLE, INAPPLICABLE, SKIPPED = "ok", "infeasible", "does not apply", "skipped"
UNREPEATABLE = "eager does not repeat its bits"
"""Nothing can be said of this project's then."""

MISMATCH, OVER, CRASHED, HUNG, FAILED = "mismatch", "over budget", "crashed", "timed out", "failed"
FAULTS = {
    MISMATCH: "mismatches",
    OVER: "steps over budget",
    CRASHED: "crashes",
    HUNG: "time-outs",
    FAILED: "failures",
}
"""What must not be, and how several are called."""

Result = dict[str, Any]
"""Plain data, ready for JSON: ``status``, ``faults`` where there are some, and what the part has to say."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How cases are run.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` for a dry run.
        networks: those that were asked for; empty for each part's own.
        test_files: where `gpu_tests` looks for tests, relative to the repository; empty for all that have some.
    """

    device: str = "cuda"
    networks: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()

    @property
    def dry(self) -> bool:
        """Whether this only shows that the code runs."""
        return not self.device.startswith("cuda")

    @property
    def options(self) -> dict[str, Any]:
        """Of the planner, beside a part's own: a dry run plans briefly."""
        return {"solver": "greedy", "time_limit": 2.0} if self.dry else {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One result of a part.

    Attributes:
        key: names it among the part's.
        group: cases of one group run in one process, one after the other.
        options: what `Part.run` gets: plain data.
        after: keys of cases that it waits for; their results, where there are some, are the option ``found``.
        of_others: whether it runs nothing of this project: a result counts whatever the project's sources are.
    """

    key: str
    group: str
    options: Mapping[str, Any]
    after: Sequence[str] = ()
    of_others: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the suite.

    Attributes:
        name: on the command line, and of its file of results.
        title: of its table.
        about: a sentence or two below the title.
        module: where this object is, as ``PART``: a worker imports it from there.
        cases: lists them.
        run: runs one, in a worker; what it raises is a failure.
        table: Markdown of the results by key.
        limit_seconds: a case that takes longer hangs.
        least_seconds: with less time left than this, no case is begun.
        workers: processes at a time; 1 where times or free memory are looked at.
    """

    name: str
    title: str
    about: str
    module: str
    cases: Callable[[Settings], Sequence[Case]]
    run: Callable[[Mapping[str, Any], Settings], Result]
    table: Callable[[Mapping[str, Result]], str]
    limit_seconds: float
    least_seconds: float = 30.0
    workers: int = 1


def result(*faults: str, status: str = OK, **fields: Any) -> Result:
    """A result with these faults, or with this status where there are none."""
    found = [fault for fault in FAULTS if fault in faults]
    return {"status": found[0] if found else status, **({"faults": found} if found else {}), **fields}


def faults(one: Result) -> Sequence[str]:
    """The faults of a result."""
    return one.get("faults", ())
