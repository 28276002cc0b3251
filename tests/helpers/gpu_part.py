"""A part of the GPU suite whose cases do what they are told: to answer, to raise, to die, to hang."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import MISMATCH, Case, Part, Result, Settings, result

DO: list[str] = []
"""What the cases do; a test fills it in. Several that are split by a slash are one group."""


def cases(settings: Settings) -> Sequence[Case]:
    """One a word; its log is the first of the settings' files, if there is one."""
    log = settings.test_files[0] if settings.test_files else ""
    return [
        Case(f"{group}-{number}-{do}", str(group), {"do": do, "log": log, "name": f"{number}-{do}"})
        for group, words in enumerate(DO)
        for number, do in enumerate(words.split("/"))
    ]


def run(case: Mapping[str, Any], settings: Settings) -> Result:
    """Do as told."""
    if case["log"]:
        with Path(case["log"]).open("a", encoding="utf-8") as log:
            log.write(f"{case['name']}\n")
    match case["do"]:
        case "abort":
            print("the last words", file=sys.stderr, flush=True)
            os.abort()
        case "raise":
            raise ArithmeticError("\nwhy it failed\nand more")
        case "hang":
            time.sleep(600)
        case "leave":
            os._exit(3)
        case "mismatch":
            return result(MISMATCH, size=float("nan"))
        case "print":
            print("this is no answer")
    return result(device=settings.device, process=os.getpid())


def table(results: Mapping[str, Result]) -> str:
    """Keys and their statuses."""
    return "\n".join(f"{key}: {one['status']}" for key, one in results.items())


PART = Part(
    name="made-up",
    title="Made up",
    about="For tests.",
    module=__name__,
    cases=cases,
    run=run,
    table=table,
    limit_seconds=60,
    least_seconds=0,
    workers=2,
)
