"""Modules as people think of them: those that are alike as one, and what each keeps, computes again, slices and offloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lightning_remat.graph import ComputationGraph
from lightning_remat.report._replay import OUTSIDE, Replay
from lightning_remat.schedule import Copy

MOST = 14
"""How many groups of modules there are at most, unless the outermost alone are more."""


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """What a group of modules costs.

    Attributes:
        name: their path, with ``*`` for numbers: ``"transformer.h.*.mlp"``.
        count: how many modules that is.
        peak_bytes: of what they made and is held at the peak.
        kept_bytes: of what the forward leaves to the backward.
        again_bytes, again_seconds: of what is computed again.
        sliced_bytes: of tensors that would lie in memory as a whole, and are made in slices instead.
        offloaded_bytes: of what waits on the host.
        seconds: time of their ops, each evaluated once.
    """

    name: str
    count: int
    peak_bytes: int
    kept_bytes: int
    again_bytes: int
    again_seconds: float
    sliced_bytes: int
    offloaded_bytes: int
    seconds: float


class Groups:
    """Paths of modules, grouped: numbers are ``*``, and paths are as deep as ``most`` groups allow.

    Example:
        >>> Groups(["h.0.mlp.fc", "h.1.mlp.fc", "head"], most=2).name("h.1.mlp.fc")
        'h.*.mlp.fc'
    """

    def __init__(self, paths: Iterable[str], most: int = MOST) -> None:
        paths = {path or OUTSIDE for path in paths}
        deepest = max((path.count(".") + 1 for path in paths), default=1)
        self._depth = next(
            (depth for depth in range(deepest, 1, -1) if len({_kind(path, depth) for path in paths}) <= most), 1
        )
        members: dict[str, set[str]] = {}
        for path in paths:
            members.setdefault(self.name(path), set()).add(".".join(path.split(".")[: self._depth]))
        self.count = {name: len(found) for name, found in members.items()}

    def name(self, path: str) -> str:
        """The group of a module."""
        return _kind(path or OUTSIDE, self._depth)


def _kind(path: str, depth: int) -> str:
    if path == OUTSIDE:
        return path
    return ".".join("*" if part.isdigit() else part for part in path.split(".")[:depth])


def module_rows(replay: Replay, groups: Groups, untiled: ComputationGraph | None) -> tuple[ModuleRow, ...]:
    """What each group of modules costs, those with the most at the peak first, and then those with the most that is kept."""
    graph, schedule = replay.graph, replay.schedule
    rows = {
        name: dict.fromkeys(("peak", "kept", "again", "sliced", "offloaded"), 0) | {"seconds": 0.0, "extra": 0.0}
        for name in groups.count
    }

    def row(path: str) -> dict[str, float]:
        return rows[groups.name(path)]

    for one in replay.alive(replay.timeline.peak_step) if replay.timeline.peak_step >= 0 else ():
        if not replay.is_gradient(one):
            row(replay.module(one))["peak"] += one.nbytes
    for one in replay.lives:
        if replay.is_kept(one):
            row(replay.module(one))["kept"] += one.nbytes
    for op, count in schedule.evaluations.items():
        made = graph.ops[op]
        row(made.module)["seconds"] += made.seconds
        if count > 1 and not graph.is_view[op]:
            read = {graph.tensors[t].storage for t in made.inputs}
            fresh = {graph.tensors[t].storage for t in made.outputs} - read
            row(made.module)["again"] += (count - 1) * sum(graph.storages[s] for s in fresh)
            row(made.module)["extra"] += (count - 1) * made.seconds
    for t in {step.tensor for step in schedule.steps if isinstance(step, Copy) and not step.to_device}:
        maker = graph.producer[t]
        row(graph.ops[maker].module if maker >= 0 else "")["offloaded"] += graph.storages[graph.tensors[t].storage]
    for path, nbytes in _sliced(graph, untiled):
        row(path)["sliced"] += nbytes
    made_rows = [
        ModuleRow(
            name,
            groups.count[name],
            peak_bytes=int(found["peak"]),
            kept_bytes=int(found["kept"]),
            again_bytes=int(found["again"]),
            again_seconds=found["extra"],
            sliced_bytes=int(found["sliced"]),
            offloaded_bytes=int(found["offloaded"]),
            seconds=found["seconds"],
        )
        for name, found in rows.items()
    ]
    return tuple(sorted(made_rows, key=lambda one: (-one.peak_bytes, -one.kept_bytes, -one.seconds, one.name)))


def _sliced(graph: ComputationGraph, untiled: ComputationGraph | None) -> Iterable[tuple[str, int]]:
    """Module and bytes of each storage of the graph as it was captured of which the planned one has no tensor."""
    if untiled is None:
        return
    there = {tensor.name for tensor in graph.tensors}
    for storage, tensors in enumerate(untiled.tensors_on):
        makers = [untiled.producer[t] for t in tensors if untiled.producer[t] >= 0]
        if makers and not any(untiled.tensors[t].name in there for t in tensors):
            yield untiled.ops[makers[0]].module, untiled.storages[storage]
