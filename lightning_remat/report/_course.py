"""Memory over a step, as it is drawn: an interval an op, or fewer of which each shows its highest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_remat.report._replay import GRADIENTS, OUTSIDE, WORKSPACE, Replay
from lightning_remat.schedule import Compute, Copy, Life, Stretch


@dataclasses.dataclass(frozen=True)
class Course:
    """Memory over a step, as it is drawn: one interval an op, or so many intervals of which each has its highest op.

    Attributes:
        left, right: where each interval begins and ends, in seconds (or in ops, where no times are known).
        nbytes: the most that is held in each.
        ops, modules: of the op at which that is, and the module of that.
        alive: the largest tensors held there, in words; empty where that is not known.
        layers: bytes by module at that op, and by what is no module's: a name and an array each, which add up to ``nbytes``;
            none where that is not known.
        boundary: where the backward begins.
        end: where the step ends.
        steps: how many ops and copies run.
    """

    left: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.int64]
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    alive: tuple[str, ...]
    layers: tuple[tuple[str, npt.NDArray[np.int64]], ...]
    boundary: float
    end: float
    steps: int

    @property
    def exact(self) -> bool:
        """Whether each op has an interval of its own."""
        return len(self.left) >= self.steps


def course(
    replay: Replay, name_of: Callable[[str], str], layers: Sequence[str], words: Callable[[int], str], most: int = 1500
) -> Course:
    """The memory of a replayed schedule over its time, for drawing.

    Args:
        replay: the schedule.
        name_of: groups modules.
        layers: those groups that get a layer of their own.
        words: bytes in words.
        most: how many intervals there are at most.
    """
    schedule, timeline = replay.schedule, replay.timeline
    steps = np.array([i for i, s in enumerate(schedule.steps) if isinstance(s, (Compute, Copy))], dtype=np.int64)
    timed = timeline.seconds > 0
    ends = timeline.seconds_after[steps] if timed else np.arange(1.0, len(steps) + 1)
    starts = np.concatenate([[0.0], ends[:-1]]) if len(steps) else ends
    end = float(ends[-1]) if len(steps) else 1.0
    ahead = int(np.searchsorted(steps, schedule.boundary))
    left, right, chosen = _intervals(starts, ends, timeline.during[steps], most)
    shown = steps[chosen]
    ops = [replay.op(int(step)) for step in shown]
    graph = replay.graph
    return Course(
        left=left,
        right=right,
        nbytes=timeline.during[shown],
        ops=tuple(graph.ops[op].name if op >= 0 else "" for op in ops),
        modules=tuple(graph.ops[op].module or OUTSIDE if op >= 0 else "" for op in ops),
        alive=tuple(
            ", ".join(f"{held.name} {words(held.nbytes)}" for held in map(replay.held, replay.alive(int(step), 3)))
            for step in shown
        ),
        layers=tuple((name, layer[shown]) for name, layer in _layers(replay, name_of, layers)),
        boundary=float(starts[ahead]) if ahead < len(steps) else end,
        end=end,
        steps=len(steps),
    )


def course_of_whole(stretch: Stretch, boundary: int, most: int = 1500) -> Course:
    """The same of a step that runs as several graphs: what is alive, and by module, is told for each graph.

    Args:
        stretch: the ops of the step.
        boundary: how many of them come before the first backward.
        most: how many intervals there are at most.
    """
    timed = bool(stretch.seconds.any())
    ends = np.cumsum(stretch.seconds) if timed else np.arange(1.0, len(stretch) + 1)
    starts = np.concatenate([[0.0], ends[:-1]]) if len(stretch) else ends
    end = float(ends[-1]) if len(stretch) else 1.0
    left, right, chosen = _intervals(starts, ends, stretch.during, most)
    return Course(
        left=left,
        right=right,
        nbytes=stretch.during[chosen],
        ops=tuple(stretch.ops[i] for i in chosen),
        modules=tuple(stretch.modules[i] or OUTSIDE for i in chosen),
        alive=(),
        layers=(),
        boundary=float(starts[boundary]) if boundary < len(stretch) else end,
        end=end,
        steps=len(stretch),
    )


def _layers(
    replay: Replay, name_of: Callable[[str], str], names: Sequence[str]
) -> list[tuple[str, npt.NDArray[np.int64]]]:
    """Bytes at each step, layer by layer from below."""
    number = {name: i for i, name in enumerate(names)}
    other, gradients = len(names), len(names) + 1

    def label(one: Life) -> int:
        return gradients if replay.is_gradient(one) else number.get(name_of(replay.module(one)), other)

    sums = replay.sums(label, len(names) + 2)
    count = len(replay.schedule.steps)
    before = np.arange(count) < replay.schedule.boundary
    constant = np.full(count, sum(replay.always().values()), dtype=np.int64)
    found = [
        ("parameters, batch and what is held beside", constant),
        (GRADIENTS, sums[gradients] + replay.graph.forward_resident_bytes * before),
        *((name, sums[i]) for name, i in number.items()),
        ("other modules", sums[other]),
        (WORKSPACE, replay.workspaces()),
    ]
    return [(name, layer) for name, layer in found if layer.any()]


def _intervals(
    starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], held: npt.NDArray[np.int64], most: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Left and right of at most so many intervals, and the index of the highest step that touches each.

    Each step touches an interval, be it as short as it may: the peak is never lost.
    """
    if len(starts) <= most:
        return starts, ends, np.arange(len(starts), dtype=np.int64)
    width = float(ends[-1]) / most
    first = np.minimum((starts / width).astype(np.int64), most - 1)
    last = np.maximum(first, np.minimum(np.ceil(ends / width).astype(np.int64) - 1, most - 1))
    chosen = np.zeros(most, dtype=np.int64)
    highest = np.full(most, -1, dtype=np.int64)
    for step in range(len(starts)):
        for at in range(first[step], last[step] + 1):
            if held[step] > highest[at]:
                highest[at], chosen[at] = held[step], step
    edges = np.linspace(0.0, float(ends[-1]), most + 1)
    return edges[:-1], edges[1:], chosen
