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
        self._known: Recent[frozenset[str], tuple[tuple[int, tuple[OpSequence, ...]], ...]] = Recent(MOST)

    def add(self, graph: ComputationGraph, schedules: Iterable[Schedule]) -> None:
        """Add the schedules of a graph; without the op `OUTSIDE`, if it has one, they are those of the graph alone."""
        sequences = [OpSequence.of_schedule(graph, schedule) for schedule in schedules]
        names, nbytes = frozenset(op.name for op in graph.ops), sum(graph.storages)
        self._add(names, nbytes, sequences)
        if OUTSIDE in names:
            self._add(names - {OUTSIDE}, nbytes, map(_alone, sequences))

    def of(self, graph: ComputationGraph) -> list[OpSequence]:
        """The schedules of graphs with the same ops."""
        known = self._known.get(frozenset(op.name for op in graph.ops)) or ()
        return list(dict.fromkeys(sequence for _, one in known for sequence in one))

    def of_nearest(self, graph: ComputationGraph) -> list[OpSequence]:
        """Those of the smallest graph with the same ops that is no smaller than this one, in bytes; else of the largest."""
        known = self._known.get(frozenset(op.name for op in graph.ops)) or ()
        nbytes = sum(graph.storages)
        nearest = min(known, key=lambda one: (one[0] < nbytes, abs(one[0] - nbytes)), default=None)
        return [] if nearest is None else list(nearest[1])

    def _add(self, names: frozenset[str], nbytes: int, sequences: Iterable[OpSequence]) -> None:
        self._known[names] = (*(self._known.get(names) or ()), (nbytes, tuple(sequences)))[-self._most :]


def _alone(sequence: OpSequence) -> OpSequence:
    """The sequence without the op `OUTSIDE`, which stands once at the end of the forward."""
    ops = tuple(name for name in sequence.ops if name != OUTSIDE)
    return dataclasses.replace(sequence, ops=ops, boundary=sequence.boundary - (len(sequence.ops) - len(ops)))
