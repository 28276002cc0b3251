"""The memory of a step that runs as several graphs: their forwards in order, their backwards in reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule._schedule import Compute, Schedule
from lightning_remat.schedule._simulate import Timeline, simulate

OUTSIDE = "outside"
"""Name of the op that stands for the memory that others need between a graph's forward and its backward."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Ops that run one after another.

    Attributes:
        during, after: bytes held while each runs, and until the next one.
        seconds: time of each.
        ops, modules: what runs, and of which module it is.
    """

    during: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    ops: tuple[str, ...]
    modules: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ops)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stretch):
            return False
        arrays = ((getattr(one, name) for name in ("during", "after", "seconds")) for one in (self, other))
        return (self.ops, self.modules) == (other.ops, other.modules) and all(map(np.array_equal, *arrays))

    def __hash__(self) -> int:
        return hash((self.ops, self.modules))

    @property
    def most_bytes(self) -> int:
        """The most that is held; 0 where nothing runs."""
        return int(self.during.max(initial=0))

    def part(self, begin: int, end: int) -> Stretch:
        """The ops from ``begin`` to before ``end``."""
        return Stretch(*(getattr(self, field.name)[begin:end] for field in dataclasses.fields(self)))

    def with_beside(self, nbytes: int) -> Stretch:
        """The same with so many bytes more held all the time."""
        return dataclasses.replace(self, during=self.during + nbytes, after=self.after + nbytes)

    def behind(self, nbytes: int) -> Stretch:
        """The same behind an op of others (`OUTSIDE`), which needs so many bytes in all and leaves what is held then."""
        first = int(self.after[0]) if len(self) else nbytes
        one = Stretch(np.array([nbytes]), np.array([min(nbytes, first)]), np.array([0.0]), (OUTSIDE,), ("",))
        return _concatenated([one, self])

    def timeline(self) -> Timeline:
        """The same as a timeline, of which a step is an op; what is saved for the backward is not told by it."""
        peak = int(self.during.argmax()) if len(self) else -1
        seconds_after = np.cumsum(self.seconds)
        return Timeline(
            during=self.during,
            after=self.after,
            seconds_after=seconds_after,
            peak_bytes=self.most_bytes,
            peak_step=peak,
            peak_op=self.ops[peak] if len(self) else "",
            peak_module=self.modules[peak] if len(self) else "",
            seconds=float(seconds_after[-1]) if len(self) else 0.0,
            saved_bytes=0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        arrays = {name: getattr(self, name).tolist() for name in ("during", "after", "seconds")}
        return {**arrays, "ops": list(self.ops), "modules": list(self.modules)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stretch:
        """What `to_dict` gave."""
        return cls(
            np.array(data["during"], dtype=np.int64),
            np.array(data["after"], dtype=np.int64),
            np.array(data["seconds"], dtype=np.float64),
            tuple(data["ops"]),
            tuple(data["modules"]),
        )


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step that runs as several graphs.

    Attributes:
        graphs: how many they are.
        before, after: what runs without rematerialization, and by their schedules.
        boundaries: how many ops of each come before the first backward.
    """

    graphs: int
    before: Stretch
    after: Stretch
    boundaries: tuple[int, int]

    @property
    def overhead(self) -> float:
        """Extra time as a share of the step without rematerialization."""
        before, after = float(self.before.seconds.sum()), float(self.after.seconds.sum())
        return after / before - 1.0 if before > 0 else 0.0

    @property
    def counted(self) -> bool:
        """Whether costs are numbers of ops or FLOPs, and no seconds."""
        seconds = self.before.seconds
        return bool(seconds.any()) and bool((seconds == np.floor(seconds)).all())

    @property
    def always_bytes(self) -> int:
        """What is held at any time, before and after."""
        return min(int(one.after.min()) if len(one) else 0 for one in (self.before, self.after))

    def with_beside(self, nbytes: int) -> WholeStep:
        """The same with so many bytes more held all the time."""
        return dataclasses.replace(self, before=self.before.with_beside(nbytes), after=self.after.with_beside(nbytes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "graphs": self.graphs,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "boundaries": list(self.boundaries),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WholeStep:
        """What `to_dict` gave."""
        before, after = data["boundaries"]
        return cls(data["graphs"], Stretch.from_dict(data["before"]), Stretch.from_dict(data["after"]), (before, after))


Halves = tuple[Stretch, Stretch, Stretch]
"""A graph's forward, what others need between it and its backward (nothing, or one op), and its backward."""


def halves(graph: ComputationGraph, schedule: Schedule, more_bytes: int = 0) -> Halves:
    """The ops of one graph.

    Args:
        graph: the graph, with an op `OUTSIDE`, and what its neighbours hold counted as resident.
        schedule: how it runs.
        more_bytes: held beside it all the time.
    """
    timeline = simulate(graph, schedule)
    steps = [(i, graph.ops[step.op]) for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    at = np.array([i for i, _ in steps], dtype=np.int64)
    last = np.append(at[1:], len(schedule.steps)) - 1  # before the next op; what is given up until then is gone
    names = [op.name for _, op in steps]
    whole = Stretch(
        timeline.during[at] + more_bytes,
        timeline.after[last] + more_bytes,
        np.diff(timeline.seconds_after[at], prepend=0.0),
        tuple(names),
        tuple(op.module for _, op in steps),
    )
    begin = names.index(OUTSIDE)
    needed = begin + (steps[begin][1].workspace_bytes > 0)
    return whole.part(0, begin), whole.part(begin, needed), whole.part(begin + 1, len(whole))


def joined(graphs: Sequence[Halves]) -> tuple[Stretch, int]:
    """All ops of a step, of graphs in the order of their forwards, and how many come before the first backward."""
    found: list[Stretch] = []
    later = 0
    for forward, outside, backward in reversed(graphs):
        # What others need after a graph is what the later ones hold, unless code that was not captured needs more.
        needed = [outside] if outside.most_bytes > later else []
        found = [forward, *needed, *found, backward]
        later = max(later, *(stretch.most_bytes for stretch in (forward, outside, backward)))
    boundary = sum(map(len, found[: len(found) - len(graphs)]))
    return _concatenated(found), boundary


def _concatenated(stretches: Iterable[Stretch]) -> Stretch:
    all_of_them = list(stretches)
    return Stretch(
        np.concatenate([one.during for one in all_of_them]),
        np.concatenate([one.after for one in all_of_them]),
        np.concatenate([one.seconds for one in all_of_them]),
        tuple(op for one in all_of_them for op in one.ops),
        tuple(module for one in all_of_them for module in one.modules),
    )
