"""The report of a check, as text and as a JSON file."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_remat._disk import replace_file
from lightning_remat.exactness._outcome import Difference, Kind
from lightning_remat.exactness._trace import FirstDifference

FORMAT = "lightning_remat.check"
FORMAT_VERSION = 1

SHOWN = 3
"""Differences that a summary names, at most."""


class Verdict(str, Enum):
    """The outcome of a check; ``sentence`` says it in words."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNREPEATABLE = "unrepeatable"
    UNCHECKED = "unchecked"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Verdict.EQUAL: "the planned step has bit for bit the results of eager mode",
    Verdict.DIFFERENT: "eager mode repeats its own bits, and the planned step has others",
    Verdict.UNREPEATABLE: "eager mode, run twice from the same state, has other bits the second time: there is nothing that "
    "the planned step could be equal to",
    Verdict.UNCHECKED: "nothing was compared",
}


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The report of a check.

    Attributes:
        verdict: the outcome.
        outputs: names of the outputs that were compared.
        gradients, buffers: how many were compared.
        differences: tensors with other bits than eager mode's first run has: in the planned step, or, where eager mode
            does not repeat its own bits, in its second run.
        first: the first operation that returns other bits; ``None`` where there is none, or it could not be found.
        advice: settings and other ways that may make the bits equal, in sentences.
        notes: what happened on the way, and why nothing was compared.
        plans: how many plans have run, and how many of these evaluate something again.
        samples: how many samples of the batch were used; ``None`` for all of them.
        out_of_memory: whether eager mode ran out of memory.
    """

    verdict: Verdict
    outputs: tuple[str, ...] = ()
    gradients: int = 0
    buffers: int = 0
    differences: tuple[Difference, ...] = ()
    first: FirstDifference | None = None
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plans: tuple[int, int] = (0, 0)
    samples: int | None = None
    out_of_memory: bool = False

    @property
    def equal(self) -> bool:
        """Whether the planned step has eager's bits."""
        return self.verdict is Verdict.EQUAL

    @property
    def repeats(self) -> bool | None:
        """Whether eager mode repeats its own bits; ``None`` where that is not known."""
        return None if self.verdict is Verdict.UNCHECKED else self.verdict is not Verdict.UNREPEATABLE

    def summary(self) -> str:
        """The report as text, of one line or a few."""
        notes = [f"({note})" for note in self.notes]
        if self.verdict is Verdict.EQUAL:
            return " ".join([f"checked: {self._compared()} are bit for bit those of eager mode", *notes])
        if self.verdict is Verdict.UNCHECKED:
            return f"not checked: {'; '.join(self.notes) or self.verdict.sentence}"
        lines = [f"checked: {self.verdict.sentence}. {_counted(self.differences)} differ:"]
        lines += [f"  {one}" for one in self.differences[:SHOWN]]
        if self.first is not None:
            lines.append(f"First differs {self.first}.")
        lines += [f"What to do: {one}." for one in self.advice]
        return "\n".join([*lines, *notes])

    def _compared(self) -> str:
        outputs = ", ".join(self.outputs) if len(self.outputs) <= SHOWN else f"{len(self.outputs)} outputs"
        parts = [outputs, _number(self.gradients, "gradient"), _number(self.buffers, "buffer")]
        *some, last = [part for part in parts if part] or ["the random state"]
        return f"{', '.join(some)} and {last}" if some else last

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"format": FORMAT, "version": FORMAT_VERSION, **dataclasses.asdict(self), "summary": self.summary()}

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        Raises:
            OSError: when the file cannot be written.
        """
        replace_file(path, json.dumps(self.to_dict(), indent=1))


def _number(count: int, of: str) -> str:
    return f"{count:,} {of}{'s' * (count != 1)}" if count else ""


def _counted(differences: tuple[Difference, ...]) -> str:
    kinds = [(kind, sum(one.kind is kind for one in differences)) for kind in Kind]
    return ", ".join(_number(count, kind.value) for kind, count in kinds if count)
