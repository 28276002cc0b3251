"""Schedules of graphs with the same ops at other sizes, which are valid for a graph that comes with yet others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lightning_remat._recent import Recent
from lightning_remat.graph import ComputationGraph
from lightning_remat.schedule import OUTSIDE, Schedule
from lightning_remat.solvers import OpSequence

MOST = 64
"""Sets of ops of which schedules are kept, at most: those that were used last."""


class Alike:
    """Keeps these schedules, and finds them by the names of a graph's ops.

    Args:
        most: graphs of the same ops whose schedules are kept, at most: those that were added last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: Recent[frozenset[str], tuple[tuple[OpSequence, ...], ...]] = Recent(MOST)

    def add(self, graph: ComputationGraph, schedules: Iterable[Schedule]) -> None:
        """Add the schedules of a graph; without the op `OUTSIDE`, if it has one, they are those of the graph alone."""
        sequences = [OpSequence.of_schedule(graph, schedule) for schedule in schedules]
        names = frozenset(op.name for op in graph.ops)
        self._add(names, sequences)
        if OUTSIDE in names:
            self._add(names - {OUTSIDE}, map(_alone, sequences))

    def of(self, graph: ComputationGraph) -> list[OpSequence]:
        """The schedules of graphs with the same ops."""
        known = self._known.get(frozenset(op.name for op in graph.ops)) or ()
        return list(dict.fromkeys(sequence for one in known for sequence in one))

    def _add(self, names: frozenset[str], sequences: Iterable[OpSequence]) -> None:
        self._known[names] = (*(self._known.get(names) or ()), tuple(sequences))[-self._most :]


def _alone(sequence: OpSequence) -> OpSequence:
    """The sequence without the op `OUTSIDE`, which stands once at the end of the forward."""
    ops = tuple(name for name in sequence.ops if name != OUTSIDE)
    return dataclasses.replace(sequence, ops=ops, boundary=sequence.boundary - (len(sequence.ops) - len(ops)))
